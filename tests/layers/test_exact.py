"""Exact mode: the bits of a row do not depend on how many rows there are, on its place among them, or on what they
hold."""

import pytest
import torch

from kvasir.kernels.activation import ACTIVATIONS, gated, sigmoid
from kvasir.kernels.norm import rms_norm
from kvasir.kernels.rope import rotate
from kvasir.layers.ffn.moe import FFN as MoE
from kvasir.layers.linear import Linear
from kvasir.layers.products import linear, matrix
from kvasir.layers.rope import RopeTable
from kvasir.layers.spec import MoESpec, RopeSpec
from kvasir.layers.weights import Placement

PLACE = Placement(torch.device("cpu"), torch.float32, exact=True)
FEW = (1, 2, 3, 7, 16, 31, 32, 33, 64, 65, 100)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def check(fn, row, sizes=range(1, 101), every_place=True):
    """``fn`` maps [T, ...] to [T, ...]; ``row`` alone must give the same bits as at any place among others."""
    generator = torch.Generator().manual_seed(7)
    alone = fn(row[None])[0]
    for size in sizes:
        others = torch.randn(size, *row.shape, generator=generator).to(row.dtype)
        for place in range(size) if every_place else {0, size // 2, size - 1}:
            batch = others.clone()
            batch[place] = row
            assert torch.equal(fn(batch)[place], alone), f"row {place} of {size} differs"


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def weights(*shape, dtype=torch.float32, layout="column"):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(*shape, generator=generator).to(dtype)
    return values if layout == "row" else matrix(*shape, place=Placement(torch.device("cpu"), dtype)).copy_(values)


@pytest.mark.parametrize("layout", ["column", "row"])
def test_linear_in_every_batch_and_place(layout):
    weight = weights(96, 64, layout=layout)
    check(lambda x: linear(x, weight, exact=True), torch.randn(64))


@pytest.mark.parametrize("outputs", range(1, 19))
@pytest.mark.parametrize("layout", ["column", "row"])
def test_linear_of_few_outputs(outputs, layout):
    """A router of five experts: some BLAS take another kernel for the last rows of such a tile."""
    weight = weights(outputs, 48, layout=layout)
    check(lambda x: linear(x, weight, exact=True), torch.randn(48), sizes=(1, 5, 31, 32, 33))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 64), (97, 33), (512, 256), (256, 704), (1500, 129), (64, 2048)], ids=str)
@pytest.mark.parametrize("layout", ["column", "row"])
def test_linear_of_many_shapes(shape, dtype, layout, threads):
    weight, bias = weights(*shape, dtype=dtype, layout=layout), torch.randn(shape[0]).to(dtype)
    check(lambda x: linear(x, weight, bias, exact=True), torch.randn(shape[1]).to(dtype), FEW, every_place=False)


def test_linear_does_not_see_where_its_input_lies():
    """A slice of a wider tensor, or one that begins at an odd address, gives the bits of a fresh copy."""
    weight, x = weights(48, 40), torch.randn(64, 40)
    want = linear(x, weight, exact=True)
    wide = torch.randn(64, 99)
    wide[:, 3:43] = x
    assert torch.equal(linear(wide[:, 3:43], weight, exact=True), want)
    shifted = torch.empty(64 * 40 + 1)[1:].view(64, 40).copy_(x)
    assert shifted.data_ptr() % 64 and torch.equal(linear(shifted, weight, exact=True), want)
    assert linear(x[:0], weight, exact=True).shape == (0, 48)


def test_exact_linear_is_the_plain_one_in_other_bits():
    layer = Linear(40, {"a": 16, "b": 32}, bias=True, place=PLACE)
    for slot in layer.slots().values():
        slot.fill(torch.randn(slot.shape))
    x = torch.randn(37, 40)
    torch.testing.assert_close(layer(x), x @ layer.weight.tensor.T + layer.bias_N)
    torch.testing.assert_close(
        layer(x)[:, 16:], x @ layer.slots()["b.weight"].target.T + layer.slots()["b.bias"].target
    )


@pytest.mark.parametrize("width", [8, 30, 250, 1024, 3002])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm(width, dtype, threads):
    weight = torch.randn(width).to(dtype)
    check(lambda x: rms_norm(x, weight, 1e-6), torch.randn(width).to(dtype), FEW, every_place=False)
    heads = torch.randn(6, width).to(dtype)
    check(lambda x: rms_norm(x, heads, 1e-6), torch.randn(6, width).to(dtype), FEW[:8], every_place=False)


@pytest.mark.parametrize("width", [8, 30, 250, 1024, 3002])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name, width, threads):
    check(lambda x: gated(x, ACTIVATIONS[name], exact=True), torch.randn(2 * width), FEW, every_place=False)


@pytest.mark.parametrize("width", [1, 5, 128])
def test_sigmoids(width, threads):
    check(lambda x: sigmoid(x, exact=True), torch.randn(width), FEW, every_place=False)


def test_rope(threads):
    table = RopeTable(RopeSpec(10000.0, 18), 300, PLACE.device)

    def turn(x):
        return rotate(x, *table.rows(torch.full((len(x),), 77)))

    check(turn, torch.randn(5, 18), FEW, every_place=False)


@pytest.mark.parametrize("renormalize", [True, False])
def test_mixture_of_experts(renormalize, threads):
    """Also with experts of very different loads, and with rows that come to an expert in any order."""
    moe = MoE(MoESpec(6, 3, 20, renormalize), 24, PLACE)
    for slot in moe.slots().values():
        slot.fill(torch.randn(slot.shape))
    check(moe.forward, torch.randn(24), FEW, every_place=False)


def test_mixture_of_experts_against_the_definition():
    moe = MoE(MoESpec(6, 2, 20, True), 24, PLACE)
    for slot in moe.slots().values():
        slot.fill(torch.randn(slot.shape))
    x = torch.randn(9, 24)
    probabilities = (x @ moe.router.weight.tensor.T).softmax(-1)
    want = torch.zeros(9, 24)
    for t in range(9):
        chosen = probabilities[t].topk(2).indices
        for e in chosen:
            gate, up = (moe.gate_up.tensor[e] @ x[t]).chunk(2)
            share = probabilities[t, e] / probabilities[t, chosen].sum()
            want[t] += share * (moe.down.tensor[e] @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(moe.forward(x), want, atol=1e-4, rtol=1e-4)
    assert moe.forward(x[:0]).shape == (0, 24)
