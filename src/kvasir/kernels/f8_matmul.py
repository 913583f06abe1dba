"""y = x W^T for many rows, with both in FP8: prompts on the tensor cores of Hopper and later.

The rows are quantised as they come, with one scale a row where the weights have one a channel, else one for each row
and each block's inputs (DeepSeek-V3, arXiv:2412.19437, section 3.3). Products with scales of rows and channels are
those of ``torch._scaled_mm``. Blocks of 128 x 128 are multiplied by ``torch.nn.functional.scaled_mm`` where it can,
with which whole prompts take half as long on an H100 as with the kernel here. The kernel multiplies each step's fp32
sums with both scales.

FLOPs: 2 T N K. Legend: T rows, K inputs, N outputs, B outputs and inputs of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch

from kvasir.kernels._triton import cdiv, jit, tl, use_triton
from kvasir.kernels.f8 import F8, dequantise_reference, from_e4m3, quantise_rows, quantise_rows_reference
from kvasir.kernels.norm import rms_norm

GROUP_M = 8  # tiles of rows that share a tile of weights in the L2 cache
LIBRARY_ROWS = 16  # the library gets whole multiples of so many rows


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and outputs of a tile, its warps and pipeline stages. A step takes the inputs of one block of scales."""

    m: int
    n: int
    warps: int
    stages: int


# Large enough for two warp groups; a block's outputs are a multiple of n.
LARGE, SMALL = Tile(128, 128, 8, 4), Tile(64, 128, 4, 4)


def f8_matmul_reference(x_TK: torch.Tensor, w: F8) -> torch.Tensor:
    """[T, N] in x's dtype, with x quantised as the kernels do, and sums in fp32 (fp64 where x is)."""
    wide = torch.promote_types(x_TK.dtype, torch.float32)
    codes_TK, scale_TG = quantise_rows_reference(x_TK, w.block or x_TK.shape[1])
    group = w.block or x_TK.shape[1]
    x = codes_TK.to(wide) * scale_TG.repeat_interleave(group, 1)[:, : x_TK.shape[1]].to(wide)
    return (x @ dequantise_reference(w, wide).t()).to(x_TK.dtype)


@jit(do_not_specialize=["num_rows"])
def _matmul_f8(x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, out_ptr, num_rows, N, K, B: tl.constexpr, WHOLE: tl.constexpr,
               NATIVE: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """One tile: a step takes B inputs. NATIVE: the tensor cores take the codes themselves."""
    tile = tl.program_id(0)
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    first = tile // (GROUP_M * tiles_n) * GROUP_M
    height = tl.minimum((num_rows + BLOCK_M - 1) // BLOCK_M - first, GROUP_M)
    inner = tile % (GROUP_M * tiles_n)
    m = (first + inner % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = inner // height * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, B)
    live_m, live_n = m < num_rows, n < N
    groups = (K + B - 1) // B
    x_at = x_ptr + tl.where(live_m, m, 0).to(tl.int64)[:, None] * K + k[None, :]
    w_at = w_ptr + tl.where(live_n, n, 0).to(tl.int64)[None, :] * K + k[:, None]
    x_scale_at = x_scale_ptr + tl.where(live_m, m, 0).to(tl.int64) * groups
    w_scale_at = w_scale_ptr + inner // height * BLOCK_N // B * groups
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(0, groups):
        if WHOLE:
            x, w = tl.load(x_at), tl.load(w_at)
        else:
            inside = step * B + k < K
            x, w = tl.load(x_at, mask=inside[None, :], other=0), tl.load(w_at, mask=inside[:, None], other=0)
        if NATIVE:
            part = tl.dot(x.to(tl.float8e4nv, bitcast=True), w.to(tl.float8e4nv, bitcast=True))
        else:
            part = tl.dot(from_e4m3(x, tl.float32), from_e4m3(w, tl.float32), input_precision="ieee")
        acc += part * (tl.load(x_scale_at + step) * tl.load(w_scale_at + step))[:, None]
        x_at += B
        w_at += B
    at = m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=live_m[:, None] & live_n[None, :])


def f8_matmul(x_TK: torch.Tensor, w: F8, tile: Tile | None = None, norm: tuple[torch.Tensor, float] | None = None
              ) -> torch.Tensor:
    """Compute ``f8_matmul_reference`` on a GPU with FP8 tensor cores, or blocks in the interpreter. ``norm``: weight
    [K] and eps of an RMS norm of x."""
    (rows, inputs), outputs = x_TK.shape, w.codes.shape[0]
    if norm is not None and not x_TK.is_cuda:  # the interpreter rounds to other codes
        x_TK, norm = rms_norm(x_TK, *norm), None
    if not use_triton(x_TK) or not w.block and not x_TK.is_cuda:
        return f8_matmul_reference(x_TK, w)
    if tile is None and _library_takes(x_TK, w):
        return _by_library(x_TK, w, norm)
    group = w.block or inputs
    codes_TK, scale_TG = (quantise_rows(x_TK, group, norm=norm) if x_TK.is_cuda
                          else quantise_rows_reference(x_TK, group))
    if not w.block:
        return torch._scaled_mm(codes_TK, w.codes.t(), scale_a=scale_TG, scale_b=w.scale[None], out_dtype=x_TK.dtype)
    out_TN = torch.empty(rows, outputs, dtype=x_TK.dtype, device=x_TK.device)
    if rows == 0:
        return out_TN
    tile = tile or (LARGE if rows > 128 else SMALL)
    block_n = min(tile.n, w.block)
    assert w.block % block_n == 0, "a tile's weights have one row of scales"
    _matmul_f8[(cdiv(rows, tile.m) * cdiv(outputs, block_n),)](
        codes_TK.view(torch.uint8), scale_TG, w.bytes, w.scale, out_TN, rows, outputs, inputs, B=w.block,
        WHOLE=inputs % w.block == 0, NATIVE=x_TK.is_cuda, GROUP_M=GROUP_M, BLOCK_M=tile.m, BLOCK_N=block_n,
        num_warps=tile.warps, num_stages=tile.stages)
    return out_TN


def _library_takes(x_TK: torch.Tensor, w: F8) -> bool:
    """Whether the library multiplies these blocks. It wants an output's scales in steps of four."""
    return (x_TK.is_cuda and x_TK.shape[0] > 0 and w.block == 128 and not w.codes.shape[0] % 128
            and not w.codes.shape[1] % 512 and _library_has_blocks(x_TK.device))


@cache
def _library_has_blocks(device: torch.device) -> bool:
    """Whether the installed torch and CUDA multiply FP8 in blocks on this GPU: cuBLAS 12.9 does, on Hopper alone."""
    cuda = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    return (hasattr(torch.nn.functional, "scaled_mm") and cuda >= (12, 9)
            and torch.cuda.get_device_capability(device) == (9, 0))


def _by_library(x_TK: torch.Tensor, w: F8, norm: tuple[torch.Tensor, float] | None) -> torch.Tensor:
    """The product by cuBLAS: a scale for each row and 128 inputs, and one for each block of the weights."""
    from torch.nn.functional import ScalingType, scaled_mm

    codes, scale = quantise_rows(x_TK, w.block, pad=LIBRARY_ROWS, by_group=True, norm=norm)
    made = scaled_mm(codes, w.codes.t(), scale, ScalingType.BlockWise1x128, w.scale.t(), ScalingType.BlockWise128x128,
                     output_dtype=x_TK.dtype)
    return made[: x_TK.shape[0]]


def fits(x_dtype: torch.dtype, device: torch.device, w: F8) -> bool:
    """Whether ``f8_matmul`` runs here with these weights: FP8 tensor cores take multiples of 16."""
    return (device.type == "cuda" and x_dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) >= (8, 9)
            and not any(size % 16 for size in w.codes.shape) and (w.block == 0 or w.block in (32, 64, 128)))


# ------------------------------------------------------------------------------------------------------------ test grid


@dataclass(frozen=True)
class Case:
    """One point of the test grid."""

    rows: int
    outputs: int
    inputs: int
    block: int = 0
    tile: Tile | None = None


def grid() -> Iterator[Case]:
    small = Tile(16, 32, 4, 2)
    for rows in (0, 1, 17, 70):
        yield Case(rows, 64, 96, 32, small)
    yield Case(33, 112, 208, 32, small)  # nothing is a multiple of a block
    yield Case(20, 144, 256, 128)
    for rows in (1, 100, 256):
        yield Case(rows, 256, 512, 128)  # on Hopper by the library
    yield Case(100, 256, 512, 128, Tile(64, 128, 4, 2))
    yield Case(70, 64, 96)  # by the library
