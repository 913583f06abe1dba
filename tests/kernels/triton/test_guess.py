"""The kernel that guesses, against plain torch."""

from __future__ import annotations

import pytest
import torch

from kvasir.kernels.guess import CHUNK, guess_rows_ref, guess_rows_triton
from kvasir.kernels.sample import sample_rows_ref


@pytest.mark.parametrize("vocab, count", [(37, 1), (CHUNK, 2), (2 * CHUNK + 300, 4), (3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_as_the_reference(vocab, count, dtype, device):
    """Greedy and noisy rows, filters that rule out the likeliest token, padded columns, unwanted rows, ties."""
    rows, draw = 6, torch.Generator().manual_seed(vocab)
    logits = (2 * torch.randn(rows, vocab + 5, generator=draw)).to(dtype)
    temperature, streams = torch.tensor([0.0, 0.7, 1.0, 1.0, 0.0, 2.5]), torch.arange(rows) * (1 << 33) + 7
    positions, wanted = torch.arange(rows) + 3, torch.tensor([True, True, False, True, True, True])
    top_k = torch.tensor([vocab, vocab, vocab, 1, vocab, 2], dtype=torch.int32)
    drawn = sample_rows_ref(logits, temperature, top_k, torch.ones(rows), torch.zeros(rows), streams, positions, vocab)
    given = [logits, drawn[0], temperature, streams, positions, wanted]
    want = guess_rows_ref(*given, vocab, count)
    out = torch.full((2 * count, rows + 2), 9.0, device=device)
    found = guess_rows_triton(*(x.to(device) for x in given), vocab, count, out[:, 1 : rows + 1]).cpu()
    least = min(count, vocab)
    kept = [*range(least), *range(count, count + least)]
    # bf16 logits tie; which of two equal ones is named second is of no matter
    assert torch.equal(found[0, wanted], drawn[0, wanted])
    torch.testing.assert_close(found[kept[least:]][:, wanted], want[kept[least:]][:, wanted], rtol=1e-4, atol=1e-6)
    if dtype == torch.float32:
        assert torch.equal(found[kept[:least]][:, wanted], want[kept[:least]][:, wanted])
    assert (out[:, [0, -1]] == 9).all() and (out[:, 3] == 9).all(), "nothing is written for rows that are not wanted"
