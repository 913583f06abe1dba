"""The kernels of adapters against their references, and what they must leave alone."""

from __future__ import annotations

import torch

from kvasir.kernels import lora

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


def check_lora(case: lora.Case, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Errors of both forms against fp64. Rows without an adapter keep their bits."""
    pairs = draw_pairs(case, dtype, device)
    x, y, slots = draw(case, dtype, device)
    wide = lora.Pairs(pairs.a_SCK.double(), pairs.b_SNR.double(), pairs.columns_SC, pairs.ranks_S, pairs.widths)
    want = lora.lora_reference(x.double(), y.double(), wide, slots)
    by_slot = lora.sort_rows(slots, len(case.ranks))
    forms = {
        "rows": lora.lora_rows(x, y.clone(), pairs, slots),
        "tiles": lora.lora_tiles(x, y.clone(), pairs, by_slot),
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
