"""The kernels for codes against their reference by the 2 x rule: see ``check.py``. The reference in fp64 takes the
dequantised weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from kvasir.kernels import codes_gemv, codes_moe, moe, nibble_gemv
from kvasir.kernels.codes_gemv import Coded
from kvasir.kernels.gemv import gemv_reference
from tests.kernels.check_fused import Draw, hold, norm64


def weights(draw: Draw, layout: str, outputs: int, inputs: int, group: int, zeros: bool) -> Coded:
    """Random codes, with scales that differ by factors, so that a wrong one shows."""
    g, device = draw.generator, draw.device

    def whole(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=g, dtype=torch.uint8).to(device)

    groups = inputs // (group or inputs)
    if layout == "fp6":
        scales = draw(outputs, 1, dtype=torch.float32).exp() * inputs**-0.5 / 16
        return Coded(layout, whole(256, outputs, inputs // 2), scales, None, 0, whole(256, outputs, inputs // 4))
    if layout.endswith("_k"):
        shape, codes = (outputs, inputs // 256), whole(256, outputs, inputs // 2)
        factors = (draw(*shape, 2, dtype=torch.float32).exp() * inputs**-0.5 / 256).half()
        if layout == "q4_k":
            return Coded(layout, codes, whole(64, outputs, 2 * groups), factors.flatten(1), group)
        small, high = whole(256, outputs, groups).view(torch.int8), whole(256, outputs, inputs // 4)
        return Coded(layout, codes, small, factors[..., 0].contiguous() / 16, group, high)
    scales = draw(outputs, groups, dtype=torch.float32).exp() * inputs**-0.5 / (64 if layout == "i8" else 4)
    if layout == "i8":
        return Coded(layout, whole(255, outputs, inputs).view(torch.int8), scales, None, group)
    packed, more = whole(256, outputs, inputs // 2), None
    if layout == "u4":
        more = whole(17, outputs, groups) if zeros else None
    elif layout == "mxfp4":
        scales = 119 + whole(6, outputs, groups)
    else:
        scales, more = whole(127, outputs, groups).view(torch.float8_e4m3fn), draw(outputs, dtype=torch.float32).exp()
        more *= inputs**-0.5 / 1024
    return Coded(layout, packed, scales, more, group)


def check_gemv(
    case: codes_gemv.Case, dtype: torch.dtype, device: str, product: Callable = codes_gemv.codes_gemv
) -> float:
    draw = Draw(case.rows + case.width, dtype, device)
    num_rows = case.outputs * (1 if case.activation is None else 2)
    x = draw(case.rows, case.width + 8)[:, : case.width]
    w = weights(draw, case.layout, num_rows, case.width, case.group, case.zeros)
    extra = {
        "norm": (draw(case.width), 1e-5) if case.norm else None,
        "bias_N": draw(num_rows) if case.bias else None,
        "residual_TO": draw(case.rows, case.outputs) if case.residual else None,
    }

    def run(precision: torch.dtype) -> torch.Tensor:
        wide = {
            k: v if v is None else (v[0].to(precision), v[1]) if k == "norm" else v.to(precision)
            for k, v in extra.items()
        }
        return gemv_reference(x.to(precision), w.numbers().to(precision), activation=case.activation, **wide)

    want, plain = run(torch.float64), run(dtype)
    given = extra if case.norm else {name: value for name, value in extra.items() if name != "norm"}
    got = product(x, w, case.config, activation=case.activation, **given)
    assert extra["residual_TO"] is None or got is extra["residual_TO"], "the result takes the residual's place"
    return hold(case, got, plain, want)


def check_nibbles(case: codes_gemv.Case, dtype: torch.dtype, device: str) -> float:
    return check_gemv(case, dtype, device, nibble_gemv.nibble_gemv)


def experts(draw: Draw, case: codes_moe.Case) -> tuple[Coded, Coded]:
    """The matrices of gate and up, and of down, of all experts."""
    found = []
    for outputs, inputs in ((2 * case.width, case.dim), (case.dim, case.width)):
        w = weights(draw, case.layout, case.experts * outputs, inputs, case.group, case.zeros)
        planes = {name: getattr(w, name) for name in ("codes", "scales", "more")}
        split = {name: p if p is None else p.unflatten(0, (case.experts, outputs)) for name, p in planes.items()}
        found.append(replace(w, **split))
    return found[0], found[1]


def check_moe(case: codes_moe.Case, dtype: torch.dtype, device: str, wrong=lambda w: w) -> float:
    """Rows with a norm, a residual and perhaps biases; a single row by its own kernels, too. ``wrong`` changes the
    matrices that the kernels get."""
    draw, top_k = Draw(case.rows + case.dim, dtype, device), 2
    gate_up, down = experts(draw, case)
    x, router = draw(case.rows, case.dim), draw(case.experts, case.dim)
    norm = (1 + draw(case.dim, scale=0.1), 1e-5)
    sizes = (case.experts, 2 * case.width), (case.experts, case.dim)
    biases = tuple(draw(*size) for size in sizes) if case.bias else None
    residual = draw(case.rows, case.dim)

    def run(x: torch.Tensor, precision: torch.dtype, logits: torch.Tensor) -> torch.Tensor:
        w = [matrix.numbers().to(precision) for matrix in (gate_up, down)]
        wide = None if biases is None else tuple(bias.to(precision) for bias in biases)
        found = moe.moe_reference(x.to(precision), logits, *w, top_k, True, case.activation, wide)
        return found + residual.to(precision)

    given = wrong(gate_up), wrong(down)
    logits = (x @ router.t()).float()
    stream = residual.clone()
    tile = moe.Tile(16, case.outputs, 64, case.warps, 2)
    tiling = moe.Tiling(tile, tile)
    got = moe.moe_triton(x, logits, *given, top_k, True, case.activation, tiling=tiling, residual_TE=stream,
                         biases=biases)  # fmt: skip
    assert got is stream
    worst = hold(case, got, run(x, dtype, logits), run(x, torch.float64, logits))
    if case.rows == 1:
        normed = norm64(x, *norm)
        logits = normed @ router.double().t()
        arrived = torch.zeros(1, dtype=torch.int32, device=device)
        got = moe.moe_row_triton(x, router, *given, top_k, True, arrived, case.activation, norm=norm,
                                 residual_1E=residual.clone(), biases=biases)  # fmt: skip
        worst = max(worst, hold(case, got, run(normed, dtype, logits.to(dtype)), run(normed, torch.float64, logits)))
    return worst


CHECKS = {
    "codes gemv": (codes_gemv.grid, check_gemv),
    "nibble gemv": (nibble_gemv.grid, check_nibbles),
    "codes moe": (codes_moe.grid, check_moe),
}
