"""The FP8 kernels against their references by the 2 x rule: see ``check.py``. The reference in fp64 takes the
dequantised weights."""

from __future__ import annotations

import torch

from kvasir.kernels import f8, f8_gemv, f8_matmul
from kvasir.kernels.f8 import F8
from kvasir.kernels.gemv import gemv_reference
from kvasir.kernels.norm import rms_norm
from tests.kernels.check_fused import Draw, hold


def weights(draw: Draw, *shape: int, block: int) -> F8:
    """Quantised weights whose scales differ by factors, so that a wrong one shows."""
    w = draw(*shape, scale=shape[-1] ** -0.5, dtype=torch.float32)
    made = f8.quantise(w * draw(*shape[:-1], 1, dtype=torch.float32).exp(), block)
    return F8(made.codes, made.scale * draw(*made.scale.shape, dtype=torch.float32).exp(), block)


def exact(w: F8) -> torch.Tensor:
    """The matrix in fp64."""
    return w.codes.double() * f8.wide_scale(w).double()


def check_planes(case: f8.Case, dtype: torch.dtype, device: str) -> float:
    """Dequantised matrices and quantised rows, bit for bit."""
    draw = Draw(case.inputs, dtype, device)
    lead = () if case.experts is None else (case.experts,)
    w = weights(draw, *lead, case.outputs, case.inputs, block=case.block)
    got, want = f8.dequantise(w, dtype), f8.dequantise_reference(w, dtype)
    worst = hold(case, got, want, exact(w))
    assert device == "cpu" or torch.equal(got, want), "the same product, rounded once"
    x = draw(case.outputs, case.inputs + 8, scale=3.0)[:, : case.inputs]
    group = case.block or case.inputs
    (codes, scale), (want, wanted) = f8.quantise_rows(x, group), f8.quantise_rows_reference(x, group)
    torch.testing.assert_close(scale, wanted, rtol=1e-6, atol=0)
    if device == "cpu":  # the interpreter loses a carry into the exponent, and does not round ties to even
        assert (codes.float() != want.float()).sum() <= 2 + 0.05 * codes.numel()
    else:
        assert (codes.float() != want.float()).float().mean() < 1e-3, "a division may be off by one unit at a tie"
    norm = draw(case.inputs), 1e-5
    (codes_n, scale_n), (want_n, wanted_n) = (
        f8.quantise_rows(x, group, norm=norm),
        f8.quantise_rows(rms_norm(x, *norm), group),
    )
    torch.testing.assert_close(scale_n, wanted_n, rtol=0.01 if dtype == torch.bfloat16 else 1e-5, atol=0)
    assert (codes_n.float() != want_n.float()).float().mean() < (0.1 if dtype == torch.bfloat16 else 0.01)
    padded, by_group = f8.quantise_rows(x, group, pad=16, by_group=True)
    assert len(padded) % 16 == 0 and by_group.stride(0) == 1, "whole rows, and a group's scales side by side"
    assert torch.equal(padded[: len(x)].float(), codes.float()) and torch.equal(by_group[: len(x)], scale)
    assert not padded[len(x) :].float().any()
    return worst


def check_gemv(case: f8_gemv.Case, dtype: torch.dtype, device: str) -> float:
    if case.coded and dtype == torch.float32 and device != "cpu":
        return 0.0  # tensor cores for codes keep fewer bits of a sum than fp32 has
    draw = Draw(case.rows + case.width, dtype, device)
    num_rows = case.outputs * (1 if case.activation is None else 2)
    x = draw(case.rows, case.width + 8)[:, : case.width]
    w = weights(draw, num_rows, case.width, block=case.block)
    extra = {
        "norm": (draw(case.width), 1e-5) if case.norm else None,
        "bias_N": draw(num_rows) if case.bias else None,
        "residual_TO": draw(case.rows, case.outputs) if case.residual else None,
    }
    given, coded, read = x, {}, x.double()
    if case.coded:
        group = case.block or case.width
        given, scale = f8.quantise_rows_reference(x, group)
        coded = {"x_scale": scale * draw(*scale.shape, dtype=torch.float32).exp(), "dtype": dtype}
        read = given.double() * coded["x_scale"].double().repeat_interleave(group, 1)[:, : case.width]

    def run(precision: torch.dtype) -> torch.Tensor:
        wide = {
            k: v if v is None else (v[0].to(precision), v[1]) if k == "norm" else v.to(precision)
            for k, v in extra.items()
        }
        matrix = exact(w) if precision == torch.float64 else f8.dequantise_reference(w, precision)
        return gemv_reference(read.to(precision), matrix, activation=case.activation, **wide)

    want, plain = run(torch.float64), run(dtype)
    got = f8_gemv.f8_gemv(given, w, case.config, activation=case.activation, **coded, **extra)
    assert extra["residual_TO"] is None or got is extra["residual_TO"], "the result takes the residual's place"
    return hold(case, got, plain, want)


def check_matmul(case: f8_matmul.Case, dtype: torch.dtype, device: str) -> float:
    draw = Draw(case.rows + case.inputs, dtype, device)
    x, w = draw(case.rows, case.inputs), weights(draw, case.outputs, case.inputs, block=case.block)
    plain = f8_matmul.f8_matmul_reference(x, w)
    want = f8_matmul.f8_matmul_reference(x.double(), w)
    return hold(case, f8_matmul.f8_matmul(x, w, case.tile), plain, want)


CHECKS = {
    "f8 planes": (f8.grid, check_planes),
    "f8 gemv": (f8_gemv.grid, check_gemv),
    "f8 matmul": (f8_matmul.grid, check_matmul),
}
