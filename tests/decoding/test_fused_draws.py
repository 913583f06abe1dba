"""Constrained rows drawn by the fused function, as on a GPU: the draws and errors of the stages one by one."""

from __future__ import annotations

import pytest
import torch

from kvasir.decoding.sampler import Sampler
from tests.decoding.helpers import EOS, decode_span, sequence
from tests.decoding.test_sampler_gpu import KINDS

NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def drawn(vocab_size: int, device: str, fused: bool, dtype: torch.dtype = torch.float32):
    """Results of rows with masks, forced chains, bans, biases and penalties; one of them holds NaN."""
    sampler = Sampler(vocab_size, vocab_size - 3, 64, device, (EOS,))
    sampler.fused = fused
    spans = []
    for row, kind in enumerate([kind for kind in KINDS if "logprobs_mode" not in kind] * 3):
        seq = sequence(row, [row + 2, 3, 4, 5], seed=row, **kind)
        seq.draft = [7, 8, 9][: row % 4]
        seq.num_forced = min(2, len(seq.draft))
        sampler.open(seq)
        spans.append(decode_span(seq))
    batch = sampler.pack(spans)
    logits = torch.randn(batch.num_rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    logits = logits.to(dtype)
    logits[5, 11] = float("nan")
    there = logits.to(device)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        output = sampler.sample(there, batch)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(there.cpu().nan_to_num(), logits.nan_to_num()), "the logits are not changed"
    return output.read(), spans


@pytest.mark.parametrize("vocab_size, dtype", [(96, torch.float32), (3003, torch.float32), (3003, torch.bfloat16)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_same_draws(device, vocab_size, dtype):
    want, spans = drawn(vocab_size, "cpu", False, dtype)
    found, _ = drawn(vocab_size, device, True, dtype)
    assert [(a.tokens, a.error) for a in found] == [(b.tokens, b.error) for b in want]
    assert 0 < sum(result.error is not None for result in want) < 5
    for span, result in zip(spans, want):
        forced = span.seq.draft[: span.seq.num_forced]
        assert result.error or result.tokens[: len(forced)] == forced


def test_a_mask_hides_no_nan():
    """A row whose logits hold NaN fails, also where its mask rules the token out."""
    for fused in (False, True):
        sampler = Sampler(64, 64, 1, "cpu", (EOS,))
        sampler.fused = fused
        seq = sequence(0, allowed_token_ids=[3, 4])
        sampler.open(seq)
        logits = torch.zeros(1, 64)
        logits[0, 50] = float("nan")
        [result] = sampler.sample(logits, sampler.pack([decode_span(seq)])).read()
        assert result.error.startswith("internal_numeric_error")
