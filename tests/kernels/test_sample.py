"""``sample_rows`` compared with the sampler that it replaces, and with the exact distribution."""

from __future__ import annotations

import pytest
import torch

from kvasir.decoding.sampler import Sampler
from kvasir.kernels.sample import sample_rows
from tests.decoding.helpers import decode_span, sequence
from tests.decoding.test_distribution import p_value
from tests.kernels.sampling import KINDS, logits, parameters

ON_GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)


def by_the_sampler(x, given, vocab_size, device):
    """Draws [3, M]: ids by ``Sampler``, each row a request with its parameters; the largest of all columns and of the
    vocabulary."""
    temperature, top_k, top_p, min_p, stream, position = given
    sampler = Sampler(x.shape[1], vocab_size, len(x), device, ())
    spans = []
    for row in range(len(x)):
        seq = sequence(
            row,
            temperature=float(temperature[row]),
            top_k=int(top_k[row]),
            top_p=float(top_p[row]),
            min_p=float(min_p[row]),
        )
        sampler.open(seq)
        spans.append(decode_span(seq))
    batch = sampler.pack(spans)
    batch.rows.streams[:], batch.rows.positions[:] = stream.numpy(), position.numpy()
    ids = [result.tokens[0] for result in sampler.sample(x.to(device).float(), batch).read()]
    return torch.stack([torch.tensor(ids, dtype=torch.float32), x.amax(1).float(), x[:, :vocab_size].amax(1).float()])


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows, vocab_size, width", [(40, 96, 96), (12, 5000, 5056)])
def test_same_draws_as_the_sampler(kind, rows, vocab_size, width, device):
    draw = torch.Generator().manual_seed(vocab_size + len(kind))
    x, given = logits(kind, rows, width, draw), parameters(rows, vocab_size, draw)
    want = by_the_sampler(x, given, vocab_size, device)
    found = sample_rows(x.to(device), *(a.to(device) for a in given), vocab_size).cpu()
    assert torch.equal(found, want), (found != want).any(0).nonzero()
    if kind == "normal":  # another position, other noise: the comparison can fail
        assert not torch.equal(
            sample_rows(x.to(device), *(a.to(device) for a in given[:5]), given[5].to(device) + 1, vocab_size).cpu(),
            want,
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_large_vocabulary_and_capture(kind):
    """128k ids, replayed as a graph with other parameters and logits than it was captured with."""
    draw = torch.Generator().manual_seed(1)
    rows, vocab_size = 64, 128_256
    x = logits(kind, rows, vocab_size, draw)
    static = [torch.zeros_like(x).cuda(), *(a.cuda() for a in parameters(rows, vocab_size, draw))]
    sample_rows(*static, vocab_size)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sample_rows(*static, vocab_size)
    given = parameters(rows, vocab_size, draw)
    for to, value in zip(static, (x, *given)):
        to.copy_(value)
    graph.replay()
    want = by_the_sampler(x, given, vocab_size, "cuda")
    assert torch.equal(out.cpu(), want), (out.cpu() != want).any(0).nonzero()


V, ROWS, BLOCKS = 12, 2000, 10
LOGITS = torch.tensor([2.0, 1.5, 1.5, 0.3, 0.0, -0.5, -1.0, 1.0, -2.0, 0.7, -3.0, 0.2])


def draws(device, temperature=1.0, top_k=V, top_p=1.0, min_p=0.0):
    counts = torch.zeros(V, dtype=torch.int64)
    for block in range(BLOCKS):
        numbers = torch.arange(block * ROWS, (block + 1) * ROWS, device=device)
        given = (
            torch.full((ROWS,), temperature, device=device),
            torch.full((ROWS,), top_k, dtype=torch.int32, device=device),
            torch.full((ROWS,), top_p, dtype=torch.float64, device=device),
            torch.full((ROWS,), min_p, device=device),
        )
        found = sample_rows(LOGITS.to(device).repeat(ROWS, 1), *given, numbers * 7919, numbers, V)
        counts += torch.bincount(found[0].long().cpu(), minlength=V)
    return counts


def exact(temperature=1.0, keep=range(V)):
    p = torch.zeros(V, dtype=torch.float64)
    p[list(keep)] = (LOGITS.double() / temperature).exp()[list(keep)]
    return p / p.sum()


# Kept, by hand: the order is 0, 1, 2, 7, 9, 3, 11, 4, ...; masses of the first four 0.37, 0.22, 0.22, 0.14 of their
# sum.
@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize(
    "given, temperature, keep",
    [
        ({}, 1.0, range(V)),
        ({"temperature": 1.7}, 1.7, range(V)),
        ({"top_k": 2}, 1.0, (0, 1)),
        ({"top_k": 4, "top_p": 0.7}, 1.0, (0, 1, 2)),
        ({"min_p": 0.3}, 1.0, (0, 1, 2, 7)),
        ({"temperature": 0.5, "min_p": 0.3}, 0.5, (0, 1, 2)),
    ],
    ids=str,
)
def test_exact_distribution(given, temperature, keep, device):
    assert p_value(draws(device, **given), exact(temperature, keep)) > 1e-3


def test_control_a_wrong_temperature_is_rejected():
    assert p_value(draws("cpu"), exact(1.08)) < 1e-6
