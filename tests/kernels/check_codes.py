"""The kernels for codes against their reference by the 2 x rule: see ``check.py``. The reference in fp64 takes the
dequantised weights."""

from __future__ import annotations

import torch

from kvasir.kernels import codes_gemv
from kvasir.kernels.codes_gemv import Coded
from kvasir.kernels.gemv import gemv_reference
from tests.kernels.check_fused import Draw, hold


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


def check_gemv(case: codes_gemv.Case, dtype: torch.dtype, device: str) -> float:
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
    got = codes_gemv.codes_gemv(x, w, case.config, activation=case.activation, **extra)
    assert extra["residual_TO"] is None or got is extra["residual_TO"], "the result takes the residual's place"
    return hold(case, got, plain, want)


CHECKS = {"codes gemv": (codes_gemv.grid, check_gemv)}
