"""The kernels that report of drawn tokens, against plain torch: whatever the shape, the ties and the chunks."""

from __future__ import annotations

import pytest
import torch

from kvasir.kernels.report import MOST, report_rows_ref, report_rows_triton
from tests.kernels.sampling import KINDS, logits

ROWS = 4


def given(rows, vocab_size, draw):
    """Tokens and the k of each row's confidence."""
    tokens = torch.randint(0, vocab_size, (rows,), generator=draw)
    return tokens, torch.tensor([0, 20, 2, MOST] * rows, dtype=torch.int32)[:rows]


def close(found, want):
    """Values to fp32 accuracy, ranks to the number."""
    assert torch.equal(found[1], want[1]), (found[1], want[1])
    torch.testing.assert_close(found[[0, 2]], want[[0, 2]], rtol=1e-5, atol=2e-6)


SHAPES = [(1, 1, 16), (37, 40, 64), (301, 320, 32), (700, 700, 16)]


@pytest.mark.parametrize(
    "vocab_size, width, block, kind", [(*SHAPES[i % 4], kind) for k, kind in enumerate(KINDS) for i in (k + 2, k + 3)]
)
def test_same_as_the_reference(vocab_size, width, block, kind, device):
    """Fewer columns than k, fewer chunks than k, and many more of both; columns past the vocabulary hold what must not
    count."""
    draw = torch.Generator().manual_seed(vocab_size)
    x = logits(kind, ROWS, width, draw)
    tokens, most = given(ROWS, vocab_size, draw)
    tokens[0] = x[0, :vocab_size].argmax()
    x[:, vocab_size:] = 50.0
    want = report_rows_ref(x, tokens, most, vocab_size)
    found = report_rows_triton(x.to(device), tokens.to(device), most.to(device), vocab_size, block=block).cpu()
    close(found, want)
    exact = torch.log_softmax(x[:, :vocab_size].double(), -1)
    for row, k in enumerate(most.tolist()):
        top = exact[row].sort(descending=True).values[:k]
        assert found[2, row] == pytest.approx(-top.mean().item() if k else 0.0, rel=1e-5, abs=1e-5)
    assert found[1, 0] == 1


def test_one_more_or_one_less_would_show(device):
    """The control: the k-th value counts, and the next does not."""
    x = torch.randn(3, 900, generator=torch.Generator().manual_seed(4)).to(device)
    tokens = torch.zeros(3, dtype=torch.int64, device=device)
    right = report_rows_triton(x, tokens, torch.full((3,), 20, dtype=torch.int32, device=device), 900, block=16).cpu()
    for k in (19, 21):
        other = report_rows_ref(x.cpu(), tokens.cpu(), torch.full((3,), k, dtype=torch.int32), 900)
        with pytest.raises(AssertionError):
            close(right, other)
    with pytest.raises(AssertionError):
        close(right, report_rows_ref(x.cpu(), tokens.cpu() + 1, torch.full((3,), 20, dtype=torch.int32), 900))


def test_all_large_values_in_one_chunk(device):
    x = torch.randn(2, 640, generator=torch.Generator().manual_seed(2))
    x[:, 32:60] += 9
    tokens, most = torch.tensor([40, 600]), torch.tensor([20, 32], dtype=torch.int32)
    close(
        report_rows_triton(x.to(device), tokens.to(device), most.to(device), 640, block=32).cpu(),
        report_rows_ref(x, tokens, most, 640),
    )


def test_a_row_does_not_depend_on_its_batch_nor_on_where_it_is_written(device):
    draw = torch.Generator().manual_seed(3)
    x = logits("bf16", ROWS, 330, draw).to(device)
    tokens, most = (a.to(device) for a in given(ROWS, 300, draw))
    whole = report_rows_triton(x, tokens, most, 300, block=16)
    out = torch.full((3, 2 * ROWS), 7.0, device=device)
    # The same numbers in other types.
    report_rows_triton(x.float(), tokens.float(), most.long(), 300, out[:, 2 : 2 + ROWS], block=16)
    assert torch.equal(out[:, 2 : 2 + ROWS], whole) and (out[:, :2] == 7).all() and (out[:, 2 + ROWS :] == 7).all()
    for row in range(ROWS):
        alone = report_rows_triton(x[row : row + 1], tokens[row : row + 1], most[row : row + 1], 300, block=16)
        assert torch.equal(alone[:, 0], whole[:, row])


def test_rows_that_cannot_be_drawn_from_harm_no_other(device):
    x = torch.randn(6, 64)
    x[0, 3], x[1, 5], x[2], x[3] = float("nan"), float("inf"), float("-inf"), float("nan")
    tokens, most = torch.tensor([1, 2, 3, -4, 1 << 20, 6]), torch.full((6,), 20, dtype=torch.int32)
    found = report_rows_triton(x.to(device), tokens.to(device), most.to(device), 60, block=16).cpu()
    close(found[:, 4:], report_rows_ref(x[4:], torch.tensor([59, 6]), most[4:], 60))


def test_no_rows(device):
    none = torch.zeros(0, dtype=torch.int32, device=device)
    assert report_rows_triton(torch.zeros(0, 8, device=device), none, none, 8).shape == (3, 0)
