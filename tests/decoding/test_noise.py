"""The noise: published Philox vectors, a scalar re-implementation, the shape of the distribution, and independence of
the batch.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvasir.kernels.noise import gumbel, gumbel_of_words, gumbel_reference, philox
from tests.decoding.helpers import gumbel_scalar, philox_scalar

# Random123's kat_vectors for philox4x32-10: counter, key, output.
KNOWN = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def i64(*values: int) -> torch.Tensor:
    return torch.from_numpy(np.array(values, np.uint64).view(np.int64))


@pytest.mark.parametrize("counter,key,want", KNOWN)
def test_published_vectors(counter, key, want):
    assert philox_scalar(counter, key) == want
    words = philox(tuple(np.array([c], np.uint64) for c in counter), tuple(np.array([k], np.uint64) for k in key))
    assert [int(w[0]) for w in words] == want


@pytest.mark.parametrize("stream", [0, 1, (1 << 64) - 1, 0x123456789ABCDEF0, 1 << 63, 0xFFFFFFFF])
@pytest.mark.parametrize("position", [0, 5, (1 << 31) + 3, (1 << 32) - 1])
def test_keyed_by_stream_position_and_token(stream, position):
    noise = gumbel_reference(i64(stream), torch.tensor([position]), 11)[0].tolist()
    assert noise == pytest.approx([gumbel_scalar(stream, position, t) for t in range(11)], rel=2e-6, abs=2e-6)


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 4, 5, 31, 4096, 5003])
def test_a_row_is_the_same_in_any_batch_and_vocabulary(vocab_size):
    streams, positions = i64(*(3 + 2**40 * n for n in range(9))), torch.arange(9) * 17
    whole = gumbel(streams, positions, vocab_size)
    assert whole.shape == (9, vocab_size) and whole.dtype == torch.float32 and whole.isfinite().all()
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    assert torch.equal(gumbel(streams[order], positions[order], vocab_size), whole[order])
    wider = gumbel(streams, positions, vocab_size + 6)
    for m in range(9):
        alone = gumbel(streams[m : m + 1], positions[m : m + 1], vocab_size)
        assert torch.equal(alone[0], whole[m])
        assert torch.equal(wider[m, :vocab_size], whole[m])


def test_no_rows():
    assert gumbel(i64(), torch.zeros(0, dtype=torch.int64), 8).shape == (0, 8)


def test_distribution_is_gumbel():
    noise = gumbel(i64(*range(64)), torch.zeros(64, dtype=torch.int64), 4096).double().flatten()
    uniform = torch.exp(-torch.exp(-noise)).sort().values
    grid = (torch.arange(len(uniform), dtype=torch.float64) + 0.5) / len(uniform)
    assert (uniform - grid).abs().max() < 1.95 / len(uniform) ** 0.5  # Kolmogorov-Smirnov at p = 1e-3
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01) and noise.var().item() == pytest.approx(
        1.6449, rel=0.02
    )


def test_neighbouring_keys_are_unrelated():
    base = gumbel(i64(5), torch.tensor([9]), 8192)[0]
    for stream, position in ((6, 9), (5, 10), (5 + (1 << 32), 9), (9, 5)):
        other = gumbel(i64(stream), torch.tensor([position]), 8192)[0]
        assert abs(torch.corrcoef(torch.stack([base, other]))[0, 1]) < 0.05


def test_every_word_gives_finite_noise():
    noise = gumbel_of_words(np.array([0, 1, (1 << 32) - 256, (1 << 32) - 1], np.uint64))
    assert noise.isfinite().all()
    assert noise[0] == pytest.approx(22.873, abs=1e-3) and noise[-1] == pytest.approx(-2.812, abs=1e-3)
