"""The Gumbel kernel against its reference: the same integers, so the same numbers up to the logarithm's rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvasir.kernels.noise import gumbel_reference, gumbel_triton


@pytest.mark.parametrize("vocab_size,block", [(1, 16), (3, 16), (64, 16), (131, 16), (1027, 256)])
def test_same_noise_as_the_reference(vocab_size, block, device):
    streams = torch.from_numpy(np.array([0, 1, (1 << 64) - 1, 0x123456789ABCDEF0, 1 << 63], np.uint64).view(np.int64))
    positions = torch.tensor([0, 1, 2**31 + 7, 2**32 - 1, 12345])
    want = gumbel_reference(streams, positions, vocab_size)
    found = gumbel_triton(streams.to(device), positions.to(device), vocab_size, block).cpu()
    # noise = -log(e): an error of r in e (relative) is an error of r in the noise, so a wrong word would show by far.
    torch.testing.assert_close(found, want, rtol=2e-6, atol=2e-6)


def test_no_rows(device):
    none = torch.zeros(0, dtype=torch.int64, device=device)
    assert gumbel_triton(none, none, 8).shape == (0, 8)
