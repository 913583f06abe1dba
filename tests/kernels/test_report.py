"""``report_rows`` at the size of real vocabularies, compared with torch in fp64."""

from __future__ import annotations

import pytest
import torch

from kvasir.kernels.report import report_rows
from tests.kernels.sampling import KINDS, logits

ON_GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)


def exact(x, tokens, most):
    """[3, M] in fp64."""
    logprobs = torch.log_softmax(x.double(), -1)
    chosen = logprobs.gather(1, tokens[:, None])
    sure = [-row[:k].mean() if k else 0.0 for row, k in zip(logprobs.sort(-1, descending=True).values, most.tolist())]
    return torch.stack(
        [chosen[:, 0], (x > x.gather(1, tokens[:, None])).sum(-1) + 1.0, torch.tensor(sure, dtype=torch.float64)]
    )


def close(found, want, tolerance=1e-5):
    assert torch.equal(found[1].double(), want[1])
    torch.testing.assert_close(found.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab_size, width", [(5000, 5056), (151_669, 151_936)])
def test_as_by_hand(kind, vocab_size, width, device):
    draw = torch.Generator().manual_seed(vocab_size)
    x, tokens = logits(kind, 3, width, draw), torch.randint(0, vocab_size, (3,), generator=draw)
    tokens[0], most = x[0, :vocab_size].argmax(), torch.tensor([20, 0, 2], dtype=torch.int32)
    x[:, vocab_size:] = 60.0
    found = report_rows(x.to(device), tokens.to(device), most.to(device), vocab_size).cpu()
    # Torch adds 150k terms in fp32, eight at a time.
    close(found, exact(x[:, :vocab_size], tokens, most), 1e-5 if device == "cuda" else 1e-4)
    with pytest.raises(AssertionError):  # the columns beyond would show
        close(
            report_rows(x.to(device), tokens.to(device), most.to(device), width).cpu(),
            exact(x[:, :vocab_size], tokens, most),
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_and_alone(dtype):
    """A full batch, replayed with other logits than it was captured with; each row as if it were the only one."""
    draw, rows, vocab_size = torch.Generator().manual_seed(1), 256, 128_256
    static = [
        torch.zeros(rows, vocab_size, dtype=dtype, device="cuda"),
        torch.zeros(rows, device="cuda"),
        torch.zeros(rows, dtype=torch.int32, device="cuda"),
    ]
    report_rows(*static, vocab_size)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = report_rows(*static, vocab_size)
    x, tokens = (
        logits("normal", rows, vocab_size, draw).to(dtype),
        torch.randint(0, vocab_size, (rows,), generator=draw),
    )
    most = torch.tensor([0, 20, 5, 32] * 64, dtype=torch.int32)
    for to, value in zip(static, (x, tokens, most)):
        to.copy_(value)
    graph.replay()
    found = out.cpu()
    for row in range(0, rows, 37):
        part = slice(row, row + 1)
        assert torch.equal(report_rows(*(a[part] for a in static), vocab_size).cpu(), found[:, part])
        assert torch.equal(
            report_rows(static[0][part].float(), static[1][part].long(), static[2][part], vocab_size).cpu(),
            found[:, part],
        )
        close(found[:, part], exact(x[part].float(), tokens[part], most[part]))
