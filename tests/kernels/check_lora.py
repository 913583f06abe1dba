"""The kernels of adapters against their references, and what they must leave alone."""

from __future__ import annotations

from unittest import mock

import torch
import torch.nn.functional as F

from kvasir.kernels import gemv, lora
from kvasir.kernels.activation import ACTIVATIONS, gated
from kvasir.kernels.gemv import Config

# Largest error against fp64, as a share of the largest result.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def draw_pairs(case: lora.Case, dtype: torch.dtype, device: str, seed: int = 0) -> lora.Pairs:
    """Random pairs; padding is zero, as the loader leaves it, and a slot that no row names is poisoned."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    slots, parts, rank = len(case.ranks), len(case.widths), case.rank
    a = normal(slots, parts, rank, case.width) * case.width**-0.5
    b = normal(slots, sum(case.widths), rank)
    columns = torch.full((slots, parts, rank), -1, dtype=torch.int32, device=device)
    for slot, used in enumerate(case.ranks):
        a[slot, :, used:], b[slot, :, used:] = 0, 0
        if slot in case.gathered:
            for part in range(parts):
                picked = torch.randperm(case.width, generator=generator)[:used]
                columns[slot, part, :used] = picked.to(device, torch.int32)
                a[slot, part] = 0
                a[slot, part, range(used), picked] = 1
        if slot + 1 not in case.slots:
            a[slot], b[slot] = torch.nan, torch.nan
    ranks = torch.tensor(case.ranks, dtype=torch.int32, device=device)
    return lora.Pairs(a.view(slots, parts * rank, -1), b, columns.view(slots, -1), ranks, case.widths)


def draw(case: lora.Case, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, outputs so far, and slots of the case's rows."""
    generator = torch.Generator().manual_seed(1)
    x, y = (
        torch.randn(len(case.slots), size, generator=generator).to(device, dtype)
        for size in (case.width, sum(case.widths))
    )
    return x, y, torch.tensor(case.slots, dtype=torch.int32, device=device)


def sort(slots: torch.Tensor, count: int) -> lora.Sorted:
    return (lora.sort_few_rows if len(slots) <= lora.MAX_ROWS else lora.sort_rows)(slots, count)


def in_tiles() -> mock._patch:
    """Tiles however few rows there are."""
    return mock.patch.object(lora, "FEW_ROWS", 0)


def tiled(x: torch.Tensor, y: torch.Tensor, pairs: lora.Pairs, slots: torch.Tensor) -> torch.Tensor:
    with in_tiles():
        return lora.expand(lora.shrink(x, pairs, slots, sort(slots, len(pairs.ranks_S))), y)


def check_lora(case: lora.Case, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Errors of both forms against fp64. Rows without an adapter keep their bits."""
    pairs = draw_pairs(case, dtype, device)
    x, y, slots = draw(case, dtype, device)
    want = lora.lora_reference(x.double(), y.double(), wider(pairs), slots)
    forms = {
        "rows": lora.lora_rows(x, y.clone(), pairs, slots),
        "tiles": tiled(x, y.clone(), pairs, slots),
        "static": lora.lora_static(x, y.clone(), pairs, slots),
        "reference": lora.lora_reference(x, y.clone(), pairs, slots),
    }
    errors = {}
    for name, got in forms.items():
        assert torch.equal(got[slots == 0], y[slots == 0]), f"{name} touched a row without an adapter"
        errors[name] = ((got - want).abs().max() / want.abs().max()).item() if len(y) else 0.0
        assert errors[name] <= TOLERANCE[dtype], f"{name}: {errors[name]}"
    return errors


def check_row_bits(case: lora.Case, dtype: torch.dtype, device: str) -> None:
    """Row by row, a row alone has the bits that it has in any batch."""
    pairs = draw_pairs(case, dtype, device)
    x, y, slots = draw(case, dtype, device)
    together = lora.lora_rows(x, y.clone(), pairs, slots)
    for row in range(len(y)):
        one = slice(row, row + 1)
        assert torch.equal(lora.lora_rows(x[one], y[one].clone(), pairs, slots[one]), together[one]), row


def check_sorting(case: lora.Case, dtype: torch.dtype, device: str) -> None:
    """One launch sorts as torch does, and lists the slots that rows have."""
    slots = torch.tensor(case.slots, dtype=torch.int32, device=device)
    want, got = lora.sort_rows(slots, len(case.ranks)), lora.sort_few_rows(slots, len(case.ranks))
    assert torch.equal(got.order_T, want.order_T) and torch.equal(got.starts_S, want.starts_S)
    present = sorted(set(case.slots) - {0})
    assert got.present_S[-1] == len(present) and got.present_S[: len(present)].tolist() == [s - 1 for s in present]


def check_gated(case: lora.Case, dtype: torch.dtype, device: str, kinds: tuple[str, ...] = tuple(ACTIVATIONS)) -> float:
    """Expand that ends in the activation of gate and up. Rows without an adapter have the bits of the activation."""
    pairs, worst = draw_pairs(case, dtype, device), 0.0
    x, y, slots = draw(case, dtype, device)
    for name, function in ((name, ACTIVATIONS[name]) for name in kinds):
        wide = lora.lora_reference(x.double(), y.double(), wider(pairs), slots)
        want = gated(wide.float(), function).double()
        for by_slot in [sort(slots, len(case.ranks))] + [None] * (len(slots) < lora.MAX_ROWS):
            with in_tiles():
                shrunk = lora.shrink(x, pairs, slots, by_slot)
                got = lora.expand(shrunk, y.clone(), function, torch.empty_like(y[:, : y.shape[1] // 2]))
            free = slots == 0
            assert torch.equal(got[free], gated(y, function)[free]), f"{name} changed a row without an adapter"
            worst = max(worst, hold(got, want, dtype, name))
    return worst


def wider(pairs: lora.Pairs) -> lora.Pairs:
    return lora.Pairs(pairs.a_SCK.double(), pairs.b_SNR.double(), pairs.columns_SC, pairs.ranks_S, pairs.widths)


def hold(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, what: object) -> float:
    error = ((got - want).abs().max() / want.abs().max()).item() if len(got) else 0.0
    assert error <= TOLERANCE[dtype], f"{what}: {error}"
    return error


# Products that end in expand: the case, how it runs, and what else the product fuses.
FUSED = [
    (lora.Case((1,), 320, (16, 8, 8)), Config(4, 128, 2), {"norm": True}),
    (lora.Case((2,), 320, (16, 8, 8), gathered=(1,)), Config(4, 128, 2), {"norm": True, "bias": True}),
    (lora.Case((0,), 320, (40,)), Config(4, 128, 2), {"residual": True}),
    (lora.Case((2,), 1100, (24, 24), rank=64), Config(4, 256, 2), {"norm": True, "activation": "silu"}),
    (lora.Case((3, 0, 1), 200, (32, 16), ranks=(8, 16, 5)), Config(16, 64, 1, 2), {"norm": True, "bias": True}),
    (lora.Case((2, 0, 1, 1, 2) * 5, 320, (64, 64), gathered=(0,)), Config(32, 64, 4, 2), {"activation": "silu"}),
    (lora.Case((2, 0, 1, 1, 2) * 4, 96, (64, 64), rank=32), Config(32, 64, 4, 2), {"norm": True, "activation": "gelu"}),
    (lora.Case((1, 2, 0) * 13, 1100, (96,)), Config(32, 64, 4, 2), {"residual": True}),
    (lora.Case((3, 0, 1, 2, 2), 512, (300,), ranks=(8, 16, 1)), Config(64, 64, 4, 2, splits=4), {"residual": True}),
    (lora.Case((1, 0, 2), 512, (256, 256)), Config(64, 64, 4, 2, splits=2), {"norm": True, "activation": "silu"}),
]


def check_fused(entry: tuple, dtype: torch.dtype, device: str) -> float:
    """Products that end in expand: against fp64, and rows without an adapter have the bits of a product without."""
    case, config, also = entry
    pairs = draw_pairs(case, dtype, device)
    x, y, slots = draw(case, dtype, device)
    generator = torch.Generator().manual_seed(2)
    weight, bias, scale = (
        torch.randn(*size, generator=generator).to(device, dtype)
        for size in ((sum(case.widths), case.width), (sum(case.widths),), (case.width,))
    )
    weight *= case.width**-0.5
    norm = (scale, 1e-5) if also.get("norm") else None
    options = {"norm": norm, "bias_N": bias if also.get("bias") else None, "activation": also.get("activation")}
    residual = y if also.get("residual") else None
    normed = x.double() if norm is None else F.rms_norm(x.double(), x.shape[1:], scale.double(), 1e-5)
    want = normed @ weight.double().t() + (0 if options["bias_N"] is None else bias.double())
    want = lora.lora_reference(normed, want, wider(pairs), slots)
    if options["activation"] is not None:
        want = gated(want.float(), ACTIVATIONS[options["activation"]]).double()
    want = want if residual is None else want + residual.double()
    by_slot = sort(slots, len(case.ranks)) if len(slots) > 1 else None
    shrunk = lora.shrink(x, pairs, slots, by_slot, None if norm is None else scale)
    old = None if residual is None else residual.clone()
    plain = gemv.gemv(x, weight, config, residual_TO=old, **options)
    got = gemv.gemv(
        x, weight, config, residual_TO=None if residual is None else residual.clone(), shrunk=shrunk, **options
    )
    free = slots == 0
    assert torch.equal(got[free], plain[free]), "a row without an adapter has other bits"
    assert free.all() or not torch.equal(got[~free], plain[~free])
    return hold(got, want, dtype, entry)
