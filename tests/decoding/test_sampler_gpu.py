"""The sampler on a GPU: the same draws as on the CPU, and nothing read back by the host before ``read``."""

from __future__ import annotations

import pytest
import torch

from kvasir.decoding.sampler import Sampler
from kvasir.types import Span
from tests.decoding.helpers import EOS, decode_span, sequence

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

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
]


@pytest.mark.parametrize("vocab_size,copies", [(96, 1), (32_003, 4)])
def test_same_draws_as_on_the_cpu_and_no_host_read(vocab_size, copies):
    logits, found = None, []
    for device in ("cpu", "cuda"):
        sampler = Sampler(vocab_size, vocab_size - 3, 64, device, (EOS,))
        spans = []
        for row in range(copies * len(KINDS)):
            seq = sequence(row, [row + 2, 3, 4, 5], seed=row, prompt_logprobs=2, **KINDS[row % len(KINDS)])
            seq.draft = [7, 8][: row % 3]
            sampler.open(seq)
            spans += (
                [decode_span(seq)] if row % 4 else [Span(seq, 0, 4, want={"score": range(3), "sample": range(3, 4)})]
            )
        batch = sampler.pack(spans)
        if logits is None:
            logits = torch.randn(batch.num_rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
        there = logits.to(device)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            output = sampler.sample(there, batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found.append(output.read())
    for a, b in zip(*found):
        assert a.error is None and b.error is None and a.tokens == b.tokens
        for x, y in zip((a.logprobs or []) + (a.scores or []), (b.logprobs or []) + (b.scores or [])):
            assert (x.id, x.rank) == (y.id, y.rank) and x.logprob == pytest.approx(y.logprob, abs=1e-4)
            assert [i for i, _ in x.top] == [i for i, _ in y.top]


def test_ties_take_the_lowest_id():
    sampler = Sampler(5000, 5000, 2, "cuda", (EOS,))
    logits = torch.full((2, 5000), -1.0, device="cuda")
    logits[:, [9, 1777, 4097]] = 2.0
    spans = []
    for row, params in enumerate((dict(temperature=0), dict(top_k=1))):
        seq = sequence(row, [0], **params)
        sampler.open(seq)
        spans.append(decode_span(seq))
    assert [r.tokens for r in sampler.sample(logits, sampler.pack(spans)).read()] == [[9], [9]]
