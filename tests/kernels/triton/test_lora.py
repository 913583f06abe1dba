"""The kernels of adapters in Triton's interpreter or on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvasir.kernels import gemv, lora
from kvasir.kernels.activation import ACTIVATIONS, gated
from kvasir.layers.formats import plain
from kvasir.layers.linear import Linear
from kvasir.layers.norm import RMSNorm
from kvasir.layers.spec import NormSpec
from kvasir.layers.weights import Placement
from kvasir.types import StepBatch
from tests.kernels import check_lora as checks
from tests.kernels.check_lora import FUSED, check_fused, check_gated, check_lora, check_row_bits, draw, draw_pairs


@pytest.mark.parametrize("case", list(lora.grid()), ids=lambda case: f"{len(case.slots)}x{case.width}r{case.rank}")
def test_against_the_reference(case, device):
    check_lora(case, torch.float32, device)


@pytest.mark.parametrize("case", list(lora.grid())[3:7:3])
def test_in_half_precision(case, device):
    check_lora(case, torch.float16, device)


def test_a_row_alone_has_the_same_bits(device):
    check_row_bits(lora.Case((2, 0, 1, 1, 2), 2100, (48, 16)), torch.float32, device)


def test_two_rows_slots_exchanged_would_fail(monkeypatch, device):
    """The mutation that the checks must catch."""
    case, rows = lora.Case((2, 0, 1, 1, 2), 320, (48, 16, 16)), lora.lora_rows
    monkeypatch.setattr(lora, "lora_rows", lambda x, y, pairs, slots: rows(x, y, pairs, slots[[2, 1, 0, 3, 4]]))
    with pytest.raises(AssertionError, match="rows"):
        check_lora(case, torch.float32, device)


def test_rows_are_sorted_by_slot(device):
    by_slot = lora.sort_rows(torch.tensor([2, 0, 1, 3, 1, 0], dtype=torch.int32, device=device), 4)
    assert by_slot.order_T.tolist() == [1, 5, 2, 4, 0, 3] and by_slot.starts_S.tolist() == [2, 4, 5, 6, 6]


def test_a_poisoned_slot_shows(device):
    case = lora.Case((1, 2), 64, (32,))
    pairs, (x, y, slots) = draw_pairs(case, torch.float32, device), draw(case, torch.float32, device)
    pairs.b_SNR[1] = torch.nan
    got = lora.lora_rows(x, y.clone(), pairs, slots)
    assert got[0].isfinite().all() and got[1].isnan().all()


@pytest.mark.parametrize(
    "case", [c for c in lora.grid() if 0 < len(c.slots) <= lora.MAX_ROWS], ids=lambda c: c.slots[:5]
)
def test_few_rows_are_sorted_in_one_launch(case, device):
    checks.check_sorting(case, torch.float32, device)


@pytest.mark.parametrize(
    ("slots", "kinds"), [((2, 0, 1, 1, 2), tuple(ACTIVATIONS)), ((1, 0, 2) * 45, ("silu",))], ids=len
)
def test_the_activation_follows_in_the_same_kernel(slots, kinds, device):
    check_gated(lora.Case(slots, 40, (40, 40)), torch.float32, device, kinds)


@pytest.mark.parametrize("entry", FUSED, ids=lambda e: f"{len(e[0].slots)}x{e[0].width}s{e[1].splits}r{e[0].rank}")
def test_products_end_in_what_adapters_add(entry, device):
    check_fused(entry, torch.float32, device)


@pytest.mark.parametrize("at", [3, 6, 8])
def test_products_in_half_precision(at, device):
    check_fused(FUSED[at], torch.float16, device)


@pytest.mark.parametrize("at", [0, 5, 8])
def test_a_product_that_reads_another_slot_would_fail(at, device, monkeypatch):
    """The mutation: expand takes each row's neighbour's slot."""
    shrink, entry = lora.shrink, FUSED[at]
    entry = (
        (replace(entry[0], slots=tuple(3 - s if s else 0 for s in entry[0].slots)), *entry[1:]) if at == 0 else entry
    )

    def wrong(x, pairs, slots, by_slot=None, *rest):
        found = shrink(x, pairs, slots, by_slot, *rest)
        return replace(found, slots_T=torch.where(slots > 0, slots % 2 + 1, slots))

    monkeypatch.setattr(lora, "shrink", wrong)
    with pytest.raises(AssertionError, match="Case"):
        check_fused(entry, torch.float32, device)


def test_a_norm_left_out_would_fail(device, monkeypatch):
    shrink = lora.shrink
    monkeypatch.setattr(lora, "shrink", lambda x, pairs, slots, by_slot, scale: shrink(x, pairs, slots, by_slot))
    with pytest.raises(AssertionError, match="Case"):
        check_fused(FUSED[0], torch.float32, device)


def test_what_a_product_cannot_end_in(device):
    """Blocks over two parts, and ranks beyond its registers."""
    for case, config in (
        (lora.Case((1,), 64, (20, 12)), gemv.Config(8, 64, 2)),
        (lora.Case((1,), 64, (32,), rank=128), gemv.Config(8, 64, 2)),
    ):
        assert not gemv.adapters_fit(draw_pairs(case, torch.float32, device), config)


LAYERS = {
    "one row": (1, gemv.Config(8, 64, 2)),
    "one row by tensor cores": (1, gemv.Config(16, 64, 2, 2)),
    "few rows": (5, gemv.Config(16, 64, 2, 2)),
    "rows in tiles": (12, gemv.Config(16, 64, 2, 2)),
    "the BLAS": (12, None),
    "blocks over two parts": (5, gemv.Config(32, 64, 2, 2)),
}


@pytest.mark.parametrize("way", LAYERS)
@pytest.mark.parametrize("form", ["norm", "residual", "activation"])
def test_a_layer_in_every_way(way, form, device, monkeypatch):
    """Products as steps run them: rows without an adapter have the bits of a step without, the others what they add."""
    rows, config = LAYERS[way]
    monkeypatch.setattr(plain, "choose", lambda *shape: config)
    place, case = Placement(torch.device(device), torch.float32), lora.Case((1, 0, 2) * 4, 64, (48, 48))
    product = Linear(64, {"gate": 48, "up": 48}, bias=False, place=place)
    product.weight.streams = config is not None
    matrix_NK = torch.randn(96, 64, generator=torch.Generator().manual_seed(3)).to(device) / 8
    product.weight.planes["weight"] = matrix_NK
    product.use_adapters(2, 16)
    product.low_rank.pairs = draw_pairs(case, torch.float32, device)
    x, y, slots = (t[:rows] for t in draw(case, torch.float32, device))
    norm = RMSNorm(64, NormSpec(1e-5), place)
    norm.weight.copy_(torch.rand(64, generator=torch.Generator().manual_seed(4)) + 0.5)
    normed = x if form == "residual" else norm(x)

    def run(slots: torch.Tensor | None) -> torch.Tensor:
        none = torch.zeros(0)
        batch = StepBatch(none, none, none, none, (), (), none, [], [], variants=slots)
        if form == "residual":
            return product(x, residual_TN=y.clone(), batch=batch)
        return product(x, norm, activation="silu" if form == "activation" else None, batch=batch)

    want = lora.lora_reference(normed, normed @ matrix_NK.t(), product.low_rank.pairs, slots)
    if form == "activation":
        want = gated(want, ACTIVATIONS["silu"])
    found = run(slots)
    assert torch.allclose(found, want + y if form == "residual" else want, atol=1e-4)
    assert torch.equal(found[slots == 0], run(None)[slots == 0])
    assert not torch.equal(found[0], run(None)[0])
