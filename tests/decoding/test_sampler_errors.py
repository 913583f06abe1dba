"""A row that cannot be sampled fails its own sequence and leaves every other as it was."""

from __future__ import annotations

import pytest
import torch

from kvasir.decoding.sampler import MASKED_ERROR, NUMERIC_ERROR, Sampler
from kvasir.types import Span
from tests.decoding.helpers import EOS, decode_span, sequence

V, TOKENIZER = 24, 20
KINDS = [
    dict(temperature=0),
    dict(),
    dict(top_p=0.7, top_k=4),
    dict(repetition_penalty=1.3, logprobs=2),
    dict(min_tokens=3, min_p=0.2),
]


def run(poison=None, bad=2, drafts=None, logits=None):
    sampler = Sampler(V, TOKENIZER, len(KINDS), "cpu", (EOS,))
    spans = []
    for row, params in enumerate(KINDS):
        seq = sequence(row, seed=row, **params)
        seq.draft = (drafts or {}).get(row, [])
        sampler.open(seq)
        spans.append(decode_span(seq))
    if logits is None:
        logits = torch.randn(sum(s.length for s in spans), V, generator=torch.Generator().manual_seed(3))
    if poison is not None:
        at, value = poison
        logits[bad, at] = value
    return sampler.sample(logits, sampler.pack(spans)).read()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [0, TOKENIZER - 1, V - 1], ids=["first", "last", "padding"])
@pytest.mark.parametrize("bad", range(len(KINDS)))
def test_nan_and_infinity_fail_one_request(bad, at, value):
    clean, poisoned = run(), run((at, value), bad)
    for row, (a, b) in enumerate(zip(clean, poisoned)):
        if row == bad:
            assert b.error == NUMERIC_ERROR and b.error.startswith("internal_numeric_error") and b.tokens == []
        else:
            assert (a.tokens, a.logprobs, a.error) == (b.tokens, b.logprobs, b.error) and a.error is None


def test_minus_infinity_is_only_a_token_that_is_never_drawn():
    results = run((slice(0, TOKENIZER - 1), float("-inf")))
    assert results[2].error is None and results[2].tokens == [TOKENIZER - 1]


@pytest.mark.parametrize("tokens", [V, TOKENIZER], ids=["all", "all but padding"])
@pytest.mark.parametrize(
    "params", [dict(), dict(temperature=0), dict(top_k=3, presence_penalty=1.0), dict(allowed_token_ids=[7])]
)
def test_a_model_that_rules_out_every_token_is_not_the_requests_fault(params, tokens):
    """The request is at fault if it forbids tokens itself and the model allowed one that does not exist."""
    sampler = Sampler(V, TOKENIZER, 1, "cpu", (EOS,))
    seq = sequence(0, **params)
    sampler.open(seq)
    logits = torch.zeros(1, V)
    logits[:, :tokens] = float("-inf")
    [result] = sampler.sample(logits, sampler.pack([decode_span(seq)])).read()
    assert (
        result.error == (MASKED_ERROR if "allowed_token_ids" in params and tokens < V else NUMERIC_ERROR)
        and not result.tokens
    )


@pytest.mark.parametrize(
    "params,words",
    [
        (dict(allowed_token_ids=[EOS], min_tokens=5), []),
        (dict(allowed_token_ids=[7]), [[7]]),
        (dict(temperature=0, allowed_token_ids=[7]), [[7]]),
    ],
)
def test_nothing_left_to_draw_fails_one_request(params, words):
    sampler = Sampler(V, TOKENIZER, 2, "cpu", (EOS,))
    stuck, healthy = sequence(0, bad_words=words, **params), sequence(1)
    for seq in (stuck, healthy):
        sampler.open(seq)
    a, b = sampler.sample(torch.randn(2, V), sampler.pack([decode_span(stuck), decode_span(healthy)])).read()
    assert a.error == MASKED_ERROR and a.tokens == [] and b.error is None and len(b.tokens) == 1


def test_an_error_on_a_draft_row_matters_only_once_it_is_reached():
    """The greedy row 0 drafts [5, 6].

    If 5 is drawn, the tokens before the bad row are emitted, and the error is left to the next step, which starts at
    that row. If not, the bad row was never part of the output."""
    for drawn, want in ((5, [5]), (9, [9])):
        logits = torch.zeros(len(KINDS) + 2, V)
        logits[0, drawn] = 4.0
        logits[1, 3] = float("nan")
        result = run(drafts={0: [5, 6]}, logits=logits)[0]
        assert result.error is None and result.tokens == want


def test_a_bad_scored_row_fails_the_request():
    sampler = Sampler(V, TOKENIZER, 1, "cpu", (EOS,))
    seq = sequence(0, [3, 4, 5], prompt_logprobs=1)
    sampler.open(seq)
    logits = torch.zeros(3, V)
    logits[1, 2] = float("nan")
    [result] = sampler.sample(
        logits, sampler.pack([Span(seq, 0, 3, want={"score": range(2), "sample": range(2, 3)})])
    ).read()
    assert result.error == NUMERIC_ERROR


def test_huge_logits_and_tiny_temperatures_do_not_overflow():
    sampler = Sampler(V, TOKENIZER, 4, "cpu", (EOS,))
    spans = []
    for row, temperature in enumerate((1e-30, 1.1e-5, 1e-3, 1.0)):
        seq = sequence(row, temperature=temperature, top_p=0.9, min_p=0.01)
        sampler.open(seq)
        spans.append(decode_span(seq))
    logits = torch.full((4, V), -3e38)
    logits[:, 8] = 3e38
    for result in sampler.sample(logits, sampler.pack(spans)).read():
        assert result.error is None and result.tokens == [8]


def test_a_row_must_be_open():
    sampler = Sampler(V, TOKENIZER, 1, "cpu", (EOS,))
    seq = sequence(0)
    sampler.open(seq)
    sampler.close(0)
    with pytest.raises(AssertionError, match="not open"):
        sampler.pack([decode_span(seq)])
