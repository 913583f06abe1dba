"""All of a layer that comes after attention in one kernel: in a decoder, in a graph, and with something missing. Its grid runs in test_fused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvasir.kernels import _triton
from kvasir.kernels import after_attention as after
from kvasir.kernels.after_attention import Case, Config, Tiling
from kvasir.layers.spec import DenseSpec, GQASpec, MoESpec, NormSpec, RopeSpec
from kvasir.layers.weights import Placement
from kvasir.models.decoder import Decoder
from kvasir.models.loader import fill_random
from kvasir.models.spec import LayerSpec, ModelSpec
from tests.kernels.check_fused import Draw, check_after_attention
from tests.kernels.triton.test_fused import tap_logits

CONFIG = Config(Tiling(16, 32, 2), Tiling(16, 32), Tiling(16, 16, 3), 4)
LAYER = LayerSpec(GQASpec(4, 2, 16, 0.25), DenseSpec(48), RopeSpec(100.0, 16), NormSpec())
KEPT = {"experts": replace(LAYER, ffn=MoESpec(4, 2, 32, True)), "sandwich": replace(LAYER, norms="sandwich")}


@pytest.mark.parametrize("splits", [1, 3])
def test_what_is_left_out_shows(splits, device):
    """The check against the reference sees that one block of K was lost in one product."""
    case = Case(5, 64, 96, 64, replace(CONFIG, o=Tiling(16, 32, splits)))
    check_after_attention(case, torch.float32, device)
    with pytest.raises(AssertionError):
        check_after_attention(case, torch.float32, device, lost=32)


@pytest.mark.parametrize("splits", [1, 3])
def test_what_is_waited_for_is_what_is_counted(splits, device, monkeypatch):
    """A program alone, all phases in one launch: it never waits, and leaves the counters at zero (which the check looks at)."""
    if device != "cpu":
        pytest.skip("a GPU has programs that wait")
    waits = []

    def look(arrived_ptr, goal) -> None:
        waits.append([int(_triton.tl.load(arrived_ptr).handle.data.item()), getattr(goal, "value", goal)])

    monkeypatch.setattr(after, "_wait", look)
    monkeypatch.setattr(after, "INTERPRETED", False)
    monkeypatch.setattr(after, "multiprocessors", lambda device: 1)
    check_after_attention(Case(5, 80, 96, 112, replace(CONFIG, o=Tiling(32, 32, splits))), torch.float32, device)
    assert waits == [[3, 3], [3 + 14, 3 + 14], [3 + 14 + 1, 3 + 14 + 1]]


@pytest.mark.parametrize("name", ["dense", *KEPT])
def test_a_decoder_on_the_kernel_is_the_plain_decoder(name, device, monkeypatch):
    """In steps of up to 16 rows; layers of another form keep their own way beside it."""
    layers = (LAYER, KEPT.get(name, LAYER), LAYER)
    spec = ModelSpec(family="none", hidden_size=32, vocab_size=56, max_position=64, layers=layers, final_norm=NormSpec())
    model = Decoder(spec, Placement(torch.device(device), torch.float32))
    fill_random(model, 0)
    draw = Draw(1, torch.float32, device)
    for block in model.blocks:
        block.ffn_norm.weight.copy_(1 + draw(32, scale=0.2))
    sizes, calls = (1, 17, 3, 1, 10), []
    with monkeypatch.context() as plain:
        plain.setattr(_triton, "triton", None)
        want = tap_logits(model, device, sizes)
    kernel = after.after_attention

    def count(*arguments):
        calls.append(arguments)
        return kernel(*arguments)

    monkeypatch.setattr(after, "after_attention", count)
    monkeypatch.setattr(after, "choose", lambda rows, *shape: CONFIG if rows <= 16 and shape == (32, 64, 48) else None)
    taken = [block for block, layer in zip(model.blocks, layers) if layer is LAYER]
    for block in taken:
        block.arrived = after.counters(32, device)
        for product in (block.mixer.o, block.ffn.gate_up, block.ffn.down):
            product.weight_NK = product.weight_NK.contiguous()
            product.weight_KN = product.weight_NK.t()
    for got, wanted in zip(tap_logits(model, device, sizes), want):
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)
    assert len(calls) == len(taken) * sum(size <= 16 for size in sizes)


def test_who_is_asked(monkeypatch):
    """Rows are rounded up to a measured step; a shape nobody measured goes its way."""
    monkeypatch.setattr(after, "MEASURED", {(16, 64, 96, 128): CONFIG})
    assert after.choose(9, 64, 96, 128) == after.choose(16, 64, 96, 128) == CONFIG
    assert [after.choose(rows, 64, 96, 128) for rows in (0, 8, 17, 65)] == [None] * 4 and after.choose(9, 64, 96, 112) is None


@pytest.mark.parametrize("rows", [8, 64])
def test_replayed_launches_leave_the_same_bits(rows, device):
    """Many launches of one graph, one close after the other: each finds the counters at zero, and what it reads is its own."""
    if device == "cpu":
        pytest.skip("programs that wait for each other need a GPU")
    draw = Draw(rows, torch.bfloat16, device)
    config = Config(Tiling(64, 128, 4), Tiling(64, 128), Tiling(64, 128, 3), 8)
    weights = [draw(*shape, scale=shape[1] ** -0.5) for shape in ((512, 1024), (3072, 512), (512, 1536))]
    x, start, scale, arrived = draw(rows, 1024), draw(rows, 512), draw(512), after.counters(512, device)

    def chain() -> torch.Tensor:
        h = start.clone()
        for _ in range(10):
            after.after_attention(x, h, weights[0], (scale, 1e-5), weights[1], weights[2], "silu", config, arrived)
        return h

    want = start.clone()
    for _ in range(10):
        want = after.after_attention_reference(x, want, weights[0], (scale, 1e-5), weights[1], weights[2], "silu")
    first = chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for _ in range(20):
        graph.replay()
        assert torch.equal(out, first)
    assert not arrived.any() and float((first.float() - want.float()).abs().max() / want.float().abs().max()) < 0.05
