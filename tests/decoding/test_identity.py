"""The token of a row is the same alone, in any batch, in any order, on both sides of a slice boundary, and after a
preemption.
"""

from __future__ import annotations

import random

import pytest
import torch

from kvasir.decoding import sampler as sampler_module
from kvasir.decoding.sampler import Sampler
from kvasir.types import Span
from tests.decoding.helpers import EOS, TableModel, decode, decode_span, sequence, step

V, TOKENIZER = 96, 90
KINDS = [
    dict(temperature=0),
    dict(),
    dict(temperature=0.7, top_p=0.9),
    dict(top_k=7),
    dict(min_p=0.1, temperature=1.5),
    dict(top_k=20, top_p=0.6, logprobs=3),
    dict(repetition_penalty=1.2, frequency_penalty=0.3, logprobs=0),
    dict(presence_penalty=-0.5, min_tokens=6, stop_token_ids=[5, 6, 7]),
    dict(logit_bias={3: 4.0, 8: -100.0}),
    dict(allowed_token_ids=list(range(2, 40)), logprobs=2, logprobs_mode="processed"),
    dict(bad_words=[[9], [3, 4], [8, 8, 8]]),
    dict(temperature=0, logprobs=5, bad_words=[[2, 3]]),
]


def requests():
    return [sequence(row, [row + 2, 3, 4], seed=1000 + row, **params) for row, params in enumerate(KINDS)]


def sampler():
    return Sampler(V, TOKENIZER, len(KINDS), "cpu", (EOS,))


def drawn(seqs, drafts=True):
    """Run one step over ``seqs`` and return the results by request."""
    s, model = sampler(), TableModel(V)
    rng = random.Random(1)
    proposals = {n: [rng.randrange(2, TOKENIZER) for _ in range(n % 4)] for n in range(len(KINDS))}
    for place, seq in enumerate(seqs):
        seq.draft = proposals[int(seq.request.id[1:])] if drafts else []
        seq.seat = place
        s.open(seq)
    return {seq.request.id: result for seq, result in zip(seqs, step(s, model, [decode_span(seq) for seq in seqs]))}


@pytest.mark.parametrize("drafts", [False, True])
def test_alone_or_in_any_batch_and_order(drafts):
    whole = drawn(requests(), drafts)
    for seq in requests():
        assert drawn([seq], drafts) == {seq.request.id: whole[seq.request.id]}
    for salt in range(8):
        seqs = requests()
        random.Random(salt).shuffle(seqs)
        for part in (seqs, seqs[:5], seqs[5:]):
            assert all(result == whole[id] for id, result in drawn(part, drafts).items())


def test_scored_prompts_in_the_batch_change_nothing():
    """Scored rows lie between sampled ones, and every condition must still find its own row."""
    want = drawn(requests())
    s, model = Sampler(V, TOKENIZER, 2 * len(KINDS), "cpu", (EOS,)), TableModel(V)
    rng = random.Random(1)
    spans = []
    for n, seq in enumerate(requests()):
        seq.draft = [rng.randrange(2, TOKENIZER) for _ in range(n % 4)]
        scored = sequence(
            len(KINDS) + n, [n + 2, 3, 4, 5], seed=n, prompt_logprobs=n % 3, repetition_penalty=1.5, logprobs=1
        )
        for each in (scored, seq):
            s.open(each)
        spans += [
            Span(scored, 0, 4, want={"score": range(3), "sample": range(3, 4)} if n % 2 else {"score": range(3)}),
            decode_span(seq),
        ]
    results = step(s, model, spans)
    assert {span.seq.request.id: r for span, r in zip(spans[1::2], results[1::2])} == want
    for n, result in enumerate(results[::2]):
        assert len(result.scores) == 3 and len(result.tokens) == n % 2


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_slices_of_any_size(rows, monkeypatch):
    whole = drawn(requests())
    monkeypatch.setattr(sampler_module, "SLICE_BYTES", rows * 4 * V)
    assert drawn(requests()) == whole


def test_logits_may_come_from_a_function():
    s, model, seqs = sampler(), TableModel(V), requests()
    for seq in seqs:
        s.open(seq)
    spans = [decode_span(seq) for seq in seqs]
    logits = model.logits(spans)
    asked = []

    def compute(first, stop):
        asked.append((first, stop))
        return logits[first:stop]

    assert s.sample(compute, s.pack(spans)).read() == s.sample(logits, s.pack(spans)).read()
    assert asked == [(0, len(KINDS))]


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_reopening_changes_nothing(kind):
    """All counts are rebuilt from the tokens after a preemption."""
    model = TableModel(V)
    plain = decode(sampler(), model, requests()[kind], 24)
    assert decode(sampler(), model, requests()[kind], 24, reopen_every=1)[0] == plain[0]
    assert decode(sampler(), model, requests()[kind], 24, reopen_every=3)[0] == plain[0]
    for cut in (1, 5, 11):
        replayed = sequence(kind, [kind + 2, 3, 4], seed=1000 + kind, emitted=plain[0][:cut], **KINDS[kind])
        assert decode(sampler(), model, replayed, 24)[0][: len(plain[0])] == plain[0] or len(plain[0]) < cut


def test_streams_decide():
    """The same request gives the same tokens again; another seed or another branch gives others."""
    model = TableModel(V)

    def output(**kind):
        return decode(sampler(), model, sequence(0, [2, 3], ignore_eos=True, **kind), 20)[0]

    assert output(seed=4) == output(seed=4)
    different = [
        output(seed=4),
        output(seed=5),
        output(seed=4 + (1 << 63)),
        output(seed=4, branch=1),
        output(seed=4, branch=2),
    ]
    assert len({tuple(d) for d in different}) == len(different)


def test_a_row_of_the_sampler_keeps_nothing_of_its_last_sequence():
    model, s = TableModel(V), sampler()
    want = decode(sampler(), model, sequence(0, [2, 3], seed=8), 12)[0]
    for kind in KINDS:
        decode(s, model, sequence(0, [5, 6], seed=3, **kind), 5)
        assert decode(s, model, sequence(0, [2, 3], seed=8), 12)[0] == want


@pytest.mark.parametrize("threads", [1, 2])
def test_bits_of_the_draw_do_not_depend_on_threads_or_batch(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        wide = Sampler(40_003, 40_003, 3, "cpu", (EOS,))
        logits = torch.randn(3, 40_003, generator=torch.Generator().manual_seed(0))
        spans = []
        for row in range(3):
            seq = sequence(row, seed=row, temperature=0.8, top_p=0.95, logprobs=3)
            wide.open(seq)
            spans.append(decode_span(seq))
        whole = wide.sample(logits, wide.pack(spans)).read()
        for row in range(3):
            assert wide.sample(logits[row : row + 1], wide.pack([spans[row]])).read() == [whole[row]]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("vocab_size, tokenizer_size", [(64, 64), (200, 187)])
def test_draws_on_the_device_are_those_of_the_pipeline(vocab_size, tokenizer_size):
    """``sample_rows`` equals the pipeline, bit for bit, for rows that need only their numbers; with ties and NaN."""
    kinds = [
        dict(temperature=0),
        dict(),
        dict(temperature=0.3, top_p=0.7),
        dict(top_k=5),
        dict(min_p=0.2),
        dict(top_k=9, top_p=0.5, min_p=0.05),
    ]
    sampler = Sampler(vocab_size, tokenizer_size, 60, "cpu", ())
    spans = []
    for row in range(60):
        seq = sequence(row, [3] * (1 + row % 7), seed=row * 7919, **kinds[row % len(kinds)])
        sampler.open(seq)
        spans.append(decode_span(seq))
    logits = (torch.randn(60, vocab_size, generator=torch.Generator().manual_seed(1)) * 3).round(decimals=1)
    logits[11, 5] = float("nan")
    rows = sampler.pack(spans).rows
    assert torch.equal(sampler._draw_plain(logits, rows).nan_to_num(-1), sampler._slice(logits, rows)[0].nan_to_num(-1))
