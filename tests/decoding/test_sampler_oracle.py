"""Every parameter equals a slow sampler written with scalars: tokens, logprobs, ranks, alternatives, prompt scores."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir.decoding.sampler import MASKED_ERROR, Sampler
from kvasir.types import Span
from tests.decoding.helpers import EOS, decode_span, log_softmax_scalar, processed_scalar, sample_scalar, sequence

V, TOKENIZER = 16, 14
TOKEN = st.integers(0, TOKENIZER - 1)


@st.composite
def requests(draw):
    params = dict(
        temperature=draw(st.sampled_from([0.0, 1e-30, 0.01, 0.5, 1.0, 2.5])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 5, 13, 14])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.9, 0.5, 1e-4])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 0.4, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.5])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.5, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.7, -1.1])),
        min_tokens=draw(st.integers(0, 6)),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.lists(TOKEN, max_size=2)),
        logit_bias=draw(st.dictionaries(TOKEN, st.floats(-5, 5, width=32), max_size=3)),
        allowed_token_ids=draw(st.none() | st.lists(TOKEN, min_size=1, max_size=10)),
        logprobs=draw(st.none() | st.integers(0, 4)),
        logprobs_mode=draw(st.sampled_from(["raw", "processed"])),
    )
    words = draw(st.lists(st.lists(TOKEN, min_size=1, max_size=3), max_size=3))
    prompt, emitted = draw(st.lists(TOKEN, min_size=1, max_size=5)), draw(st.lists(TOKEN, max_size=5))
    seed, branch = draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 2))
    return dict(prompt=prompt, emitted=emitted, seed=seed, branch=branch, bad_words=words, **params), draw(
        st.lists(TOKEN, max_size=3)
    )


def check_row(result_token, entry, logits, seq, path):
    """Compare one emitted token with the oracle. False where the rounding of a threshold may decide."""
    weights, close = processed_scalar(logits, seq, path, (EOS,), TOKENIZER)
    assert weights[result_token] > -math.inf, "a forbidden token was drawn"
    token, margin = sample_scalar(weights, seq, seq.num_tokens - 1 + len(path))
    if close or (margin < 1e-3 and margin != 0.0):
        return False
    assert result_token == token
    if entry is not None:
        logprobs = log_softmax_scalar(logits[:TOKENIZER] if seq.request.params.logprobs_mode == "raw" else weights)
        check_report(entry, token, logprobs, seq.request.params.logprobs)
    return True


def check_report(entry, token, logprobs, count):
    assert entry.id == token and entry.logprob == pytest.approx(logprobs[token], abs=1e-3)
    assert (
        sum(v > logprobs[token] + 1e-4 for v in logprobs)
        < entry.rank
        <= 1 + sum(v > logprobs[token] - 1e-4 for v in logprobs)
    )
    best = sorted((v for v in logprobs if v > -math.inf), reverse=True)[:count]
    assert [v for _, v in entry.top] == pytest.approx(best, abs=1e-3)
    assert all(v == pytest.approx(logprobs[i], abs=1e-3) for i, v in entry.top)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(requests(), min_size=1, max_size=4), st.integers(0, 2**31))
def test_random_requests_in_one_batch(cases, salt):
    sampler = Sampler(V, TOKENIZER, len(cases), "cpu", (EOS,))
    spans = []
    for row, (case, draft) in enumerate(cases):
        seq = sequence(row, **case)
        seq.draft = draft
        sampler.open(seq)
        spans.append(decode_span(seq))
    logits = torch.randn(sum(s.length for s in spans), V, generator=torch.Generator().manual_seed(salt)) * 3
    before = logits.clone()
    results = sampler.sample(logits, sampler.pack(spans)).read()
    assert torch.equal(logits, before)
    first = 0
    for span, result in zip(spans, results):
        rows = logits[first : first + span.length].tolist()
        first += span.length
        check_span(span, result, rows)


def check_span(span, result, rows):
    seq = span.seq
    if result.error is not None:
        assert result.error == MASKED_ERROR
        assert max(processed_scalar(rows[0], seq, [], (EOS,), TOKENIZER)[0]) == -math.inf
        return
    wants = seq.request.params.logprobs is not None
    assert (result.logprobs is not None) == wants
    for i, token in enumerate(result.tokens):
        assert result.tokens[:i] == seq.draft[:i]
        if not check_row(token, result.logprobs[i] if wants else None, rows[i], seq, seq.draft[:i]):
            return
    n = len(result.tokens)
    if (
        n <= len(seq.draft) and result.tokens[-1] == seq.draft[n - 1]
    ):  # stopped although the draft was right: an error follows
        assert max(processed_scalar(rows[n], seq, seq.draft[:n], (EOS,), TOKENIZER)[0]) == -math.inf


@pytest.mark.parametrize("alternatives", [0, 3, 20])
def test_prompt_scores(alternatives):
    sampler = Sampler(V, TOKENIZER, 1, "cpu", (EOS,))
    seq = sequence(0, [3, 4, 5, 6, 7], prompt_logprobs=alternatives, logprobs=1)
    sampler.open(seq)
    logits = torch.randn(5, V, generator=torch.Generator().manual_seed(1))
    [result] = sampler.sample(
        logits, sampler.pack([Span(seq, 0, 5, want={"score": range(4), "sample": range(4, 5)})])
    ).read()
    assert len(result.scores) == 4 and len(result.tokens) == len(result.logprobs) == 1
    for i, entry in enumerate(result.scores):
        check_report(entry, seq.tokens[i + 1], log_softmax_scalar(logits[i, :TOKENIZER].tolist()), alternatives)


def test_a_chunk_in_the_middle_of_a_prompt_is_scored_up_to_its_neighbour():
    sampler = Sampler(V, TOKENIZER, 1, "cpu", (EOS,))
    seq = sequence(0, [3, 4, 5, 6, 7], prompt_logprobs=0)
    sampler.open(seq)
    [result] = sampler.sample(torch.zeros(2, V), sampler.pack([Span(seq, 1, 2, want={"score": range(2)})])).read()
    assert [e.id for e in result.scores] == [5, 6] and result.tokens == [] and result.logprobs is None
    assert [e.logprob for e in result.scores] == pytest.approx([-math.log(TOKENIZER)] * 2)


def test_spans_that_want_nothing_have_empty_results():
    sampler = Sampler(V, TOKENIZER, 2, "cpu", (EOS,))
    a, b = sequence(0, [3, 4, 5]), sequence(1, [3, 4, 5], temperature=0)
    for seq in (a, b):
        sampler.open(seq)
    results = sampler.sample(
        torch.eye(V)[6:7], sampler.pack([Span(a, 0, 2), Span(b, 2, 1, want={"sample": range(1)})])
    ).read()
    assert results[0].tokens == [] and results[0].error is None and results[1].tokens == [6]
    assert sampler.sample(torch.zeros(0, V), sampler.pack([Span(a, 0, 2)])).read()[0].tokens == []


@pytest.mark.parametrize(
    "params", [dict(temperature=0), dict(temperature=1e-30), dict(temperature=0, repetition_penalty=1.5), dict(top_k=1)]
)
def test_ties_take_the_lowest_id(params):
    sampler = Sampler(40, 40, 1, "cpu", (EOS,))
    seq = sequence(0, [0], **params)
    sampler.open(seq)
    logits = torch.full((1, 40), -1.0)
    logits[0, [9, 17, 33]] = 2.0
    assert sampler.sample(logits, sampler.pack([decode_span(seq)])).read()[0].tokens == [9]


def test_padding_ids_are_never_drawn():
    sampler = Sampler(V, TOKENIZER, 2, "cpu", (EOS,))
    logits = torch.zeros(2, V)
    logits[:, TOKENIZER:] = 50.0
    greedy, hot = sequence(0, temperature=0, logprobs=20), sequence(1, temperature=10.0, logprobs=20)
    for seq in (greedy, hot):
        sampler.open(seq)
    for result in sampler.sample(logits, sampler.pack([decode_span(greedy), decode_span(hot)])).read():
        assert result.tokens[0] < TOKENIZER and max(i for i, _ in result.logprobs[0].top) < TOKENIZER
        assert result.logprobs[0].logprob == pytest.approx(-math.log(TOKENIZER), abs=1e-5)


TIES = [(0, 0.5, [2, 3, 5, 7]), (0, 0.51, [2, 3, 5, 7, 8]), (3, 1.0, [2, 3, 5]), (4, 0.5, [2, 3]), (0, 1e-9, [2])]


@pytest.mark.parametrize("top_k,top_p,kept", TIES)
def test_filters_cut_ties_at_the_lowest_ids(top_k, top_p, kept):
    """Eight tokens tie; whatever is kept is a prefix of them by id."""
    equal = [2, 3, 5, 7, 8, 9, 11, 12]
    logits = torch.full((1, V), -200.0)
    logits[0, equal] = 1.5
    sampler = Sampler(V, V, 1, "cpu", (EOS,))
    seq = sequence(0, top_k=top_k, top_p=top_p, logprobs=20, logprobs_mode="processed")
    sampler.open(seq)
    [result] = sampler.sample(logits, sampler.pack([decode_span(seq)])).read()
    assert sorted(i for i, v in result.logprobs[0].top if v > -50) == kept
    assert result.tokens[0] in kept
