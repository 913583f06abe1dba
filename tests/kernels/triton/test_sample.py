"""The sampling kernels against plain torch: the same tokens, whatever the parameters, ties and chunks."""

from __future__ import annotations

import pytest
import torch

from kvasir.kernels import sample
from kvasir.kernels.sample import sample_rows_ref, sample_rows_triton
from tests.kernels.sampling import KINDS, logits, parameters

ROWS = 6


def both(x, given, vocab_size, device, block):
    """Draws of the reference on the CPU and of the kernels on ``device``."""
    want = sample_rows_ref(x, *given, vocab_size)
    found = sample_rows_triton(x.to(device), *(a.to(device) for a in given), vocab_size, block=block)
    return want, found.cpu()


@pytest.mark.parametrize(
    "vocab_size, width, block, pack", [(1, 1, 16, 8), (37, 40, 64, 8), (301, 320, 64, 1), (200, 208, 16, 2)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_same_draws_as_the_reference(kind, vocab_size, width, block, pack, device, monkeypatch):
    monkeypatch.setattr(sample, "PACK", pack)  # few packed candidates: the row itself must be searched, too
    draw = torch.Generator().manual_seed(vocab_size)
    x, given = logits(kind, ROWS, width, draw), parameters(ROWS, vocab_size, draw)
    want, found = both(x, given, vocab_size, device, block)
    assert torch.equal(found, want), (found != want).any(0).nonzero()


def test_a_bound_from_chunks_that_takes_in_too_many(device, monkeypatch):
    """All large values stand in one chunk, so the k-th largest chunk says little: the candidates above it cannot be
    packed."""
    monkeypatch.setattr(sample, "PACK", 1)
    x = torch.randn(8, 160, generator=torch.Generator().manual_seed(2))
    x[:, :60] += 3
    given = [
        torch.ones(8),
        torch.full((8,), 6, dtype=torch.int32),
        torch.tensor([1.0, 0.4] * 4),
        torch.zeros(8),
        torch.arange(8),
        torch.arange(8),
    ]
    want, found = both(x, given, 160, device, 16)
    assert torch.equal(found, want)


@pytest.mark.parametrize("kind", ["normal", "ties"])
def test_a_cut_one_token_off_would_show(kind, device):
    """The noise of a row is made to favour the last kept token and the first dropped one, so that both sides of the cut
    are seen."""
    draw = torch.Generator().manual_seed(5)
    vocab_size, rows = 40, 20
    x = logits(kind, 1, vocab_size, draw).repeat(rows, 1)
    # So hot that all three are drawn often.
    given = [
        torch.full((rows,), 30.0),
        torch.full((rows,), 3, dtype=torch.int32),
        torch.ones(rows),
        torch.zeros(rows),
        torch.arange(rows),
        torch.arange(rows),
    ]
    want, found = both(x, given, vocab_size, device, 16)
    assert torch.equal(found, want) and len(set(found[0].tolist())) == 3
    given[1] = given[1] - 1
    fewer, _ = both(x, given, vocab_size, device, 16)
    assert not torch.equal(fewer, want)


def test_rows_that_cannot_be_drawn_from_are_recognisable(device):
    x = torch.randn(6, 64)
    x[0, 3], x[1, 5], x[2] = float("nan"), float("inf"), float("-inf")
    x[3, 60] = float("nan")  # a column past the vocabulary
    x[4, 7] = -torch.tensor(float("nan"))
    for temperature in (0.0, 1.0):
        given = (
            torch.full((6,), temperature),
            torch.full((6,), 5, dtype=torch.int32),
            torch.full((6,), 0.9),
            torch.full((6,), 0.1),
            torch.arange(6),
            torch.arange(6),
        )
        ids, largest, best = sample_rows_triton(x.to(device), *(a.to(device) for a in given), 60, block=16).cpu()
        assert largest.isnan().tolist() == [True, False, False, True, True, False] and largest[1] == float("inf")
        assert best[2] == float("-inf") and best[3].isfinite() and best[5] == x[5, :60].max()
        assert ((ids >= 0) & (ids < 60)).all()


def test_a_row_does_not_depend_on_its_batch(device):
    draw = torch.Generator().manual_seed(3)
    x, given = logits("ties", 6, 100, draw), parameters(6, 100, draw)
    _, whole = both(x, given, 100, device, 64)
    for row in range(0, 6, 5):
        _, alone = both(x[row : row + 1], [a[row : row + 1] for a in given], 100, device, 64)
        assert torch.equal(alone[:, 0], whole[:, row])


def test_zeros_are_equal(device):
    x = torch.tensor([[-1.0, -0.0, 0.0, -0.0]])
    for temperature, top_k in ((0.0, 4), (1.0, 1)):
        given = [
            torch.tensor([temperature]),
            torch.tensor([top_k], dtype=torch.int32),
            torch.ones(1),
            torch.zeros(1),
            torch.zeros(1).long(),
            torch.zeros(1).long(),
        ]
        want, found = both(x, given, 4, device, 16)
        assert found[0, 0] == want[0, 0] == 1


def test_no_rows(device):
    none = torch.zeros(0, device=device)
    assert sample_rows_triton(
        torch.zeros(0, 8, device=device), none, none.int(), none, none, none.long(), none.long(), 8
    ).shape == (3, 0)
