"""y = x W^T for few rows of x and weights as codes with scales by group (``kernels.weight_codes``). The time is that of
streaming the codes once.

These are the two kernels of ``kernels.gemv`` with the same work fused in: norm before, bias, gate and residual after,
and the early start. ``kernels.code_tiles`` makes numbers of the codes.

Several rows, or one where that is faster, go through tensor cores. Their numbers are exact in bf16 and so is their
scale in ``mxfp4`` and ``nvfp4``. In ``u4`` and ``i8`` a scale that a block of inputs shares multiplies the block's sums
in fp32; several scales multiply numbers, which rounds them. A scale of the whole tensor or of an output multiplies the
sum. The kernel without tensor cores sums numbers times scales in fp32.

Bytes: those of the planes. Legend: T rows, K inputs, N rows of W (F of gate, then F of up, where they are gated), O
outputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvasir import tuned
from kvasir.kernels import k_codes
from kvasir.kernels import weight_codes as codes
from kvasir.kernels._triton import INTERPRETED, cdiv, jit, next_power_of_2, tl
from kvasir.kernels.code_tiles import (
    expert_at,
    factor_of,
    inputs_of,
    load_codes,
    load_scales,
    prefetch,
    scales_of,
    tile_of,
    weights_of,
)
from kvasir.kernels.gemv import (
    MAX_ROWS,
    Config,
    ending,
    finish_row,
    finish_rows,
    gemv_reference,
    join,
    result_of,
    room_for_splits,
)
from kvasir.kernels.parts import share_of, splits_for

LAYOUTS = {"i8": 0, "u4": 1, "mxfp4": 2, "nvfp4": 3, "fp6": 4, "q6_k": 5, "q4_k": 6}


@dataclass(frozen=True, slots=True)
class Coded:
    """A matrix [N, K] as codes. ``more``: zero points uint8 [N, G] of ``u4``, the tensor's scale fp32 [N] of ``nvfp4``,
    or the factors of ``q4_k`` and ``q6_k``; None: there are none. ``group``: inputs of a scale, 0: all. ``high``: the
    upper two bits of codes of six, uint8 [N, K / 4]."""

    layout: str
    codes: torch.Tensor
    scales: torch.Tensor
    more: torch.Tensor | None
    group: int
    high: torch.Tensor | None = None

    @property
    def pair(self) -> int:
        """Codes of a byte."""
        return 1 if self.layout == "i8" else 2

    @property
    def num_inputs(self) -> int:
        return self.codes.shape[-1] * self.pair

    @property
    def num_groups(self) -> int:
        """Groups of a row."""
        return self.num_inputs // self.group if self.group else 1

    def pointers(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes, their upper bits, scales and ``more`` as kernels take them."""
        planes = self.codes, self.scales, self.more, self.high
        assert all(plane is None or plane.is_contiguous() for plane in planes), "dense planes"
        scales = self.scales.view(torch.uint8) if self.layout in ("mxfp4", "nvfp4") else self.scales
        more, high = self.scales if self.more is None else self.more, self.codes if self.high is None else self.high
        return self.codes, high, scales, more

    def constants(self, block_k: int) -> dict[str, int]:
        """The arguments of a kernel that takes ``block_k`` inputs at a time: a power of two, and whole groups."""
        assert not self.group or block_k % self.group == 0, "a block of whole groups"
        return {"B": self.codes.shape[-1], "G": self.num_groups, "BYTES": block_k // self.pair,
                "GROUP": self.group, "GROUPS": block_k // self.group if self.group else 1, "PAIR": self.pair,
                "LAYOUT": LAYOUTS[self.layout], "ZEROS": self.layout == "u4" and self.more is not None,
                "ASM": not INTERPRETED}

    def numbers(self) -> torch.Tensor:
        """The matrix fp32 [..., N, K]."""
        if self.layout == "i8":
            return codes.dequantise_i8(self.codes, self.scales)
        if self.layout == "u4":
            return codes.dequantise_u4(self.codes, self.scales, self.more)
        if self.layout == "mxfp4":
            return codes.dequantise_mxfp4(self.codes, self.scales)
        if self.layout == "fp6":
            return codes.dequantise_fp6(self.codes, self.high, self.scales)
        if self.layout == "q6_k":
            return k_codes.dequantise_q6_k(self.codes, self.high, self.scales, self.more)
        if self.layout == "q4_k":
            return k_codes.dequantise_q4_k(self.codes, self.scales, self.more)
        return codes.dequantise_nvfp4(self.codes, self.scales, self.more)


def codes_gemv_reference(x_TK: torch.Tensor, w: Coded, **options: object) -> torch.Tensor:
    """[T, O] in x's dtype: ``gemv_reference`` with the dequantised matrix."""
    return gemv_reference(x_TK, w.numbers().to(x_TK.dtype), **options)  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------------------- kernels


@jit
def _one_row_codes(x_ptr, w_ptr, high_ptr, w_scale_ptr, more_ptr, y_ptr, norm_ptr, bias_ptr, residual_ptr, eps,
                   OUT, K, B, G, BLOCK_N: tl.constexpr, BYTES: tl.constexpr, GROUPS: tl.constexpr,
                   GROUP: tl.constexpr, PAIR: tl.constexpr, LAYOUT: tl.constexpr, ZEROS: tl.constexpr,
                   ASM: tl.constexpr, WHOLE: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr,
                   RESIDUAL: tl.constexpr, PDL: tl.constexpr, ids_ptr=None, EXPERTS: tl.constexpr = False):
    """``BLOCK_N`` outputs of one row: [BLOCK_N, BYTES] running products, summed at the end.

    EXPERTS: the matrix and the bias are those of expert ``ids[choice]``, and y [choices, OUT] has a row a choice. Codes
    of six bits have no experts."""
    if EXPERTS:
        if PDL:  # the next kernel starts once the experts are known: it fetches their weights before it waits
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        expert = tl.load(ids_ptr + tl.program_id(1)).to(tl.int64)
        w_ptr, w_scale_ptr, more_ptr = expert_at(w_ptr, w_scale_ptr, more_ptr, expert * (2 * OUT if KIND >= 0 else OUT),
                                                 B, G, ZEROS)
        bias_ptr += expert * (2 * OUT if KIND >= 0 else OUT)
        y_ptr += tl.program_id(1) * OUT
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = n < OUT
    at = w_ptr + n.to(tl.int64)[:, None] * B
    up_at = w_ptr + (n.to(tl.int64) + OUT)[:, None] * B
    high_at = high_ptr + n.to(tl.int64)[:, None] * (B // 2)
    high_up_at = high_ptr + (n.to(tl.int64) + OUT)[:, None] * (B // 2)
    if PDL and not EXPERTS:
        tl.extra.cuda.gdc_launch_dependents()
    w = load_codes(at, high_at, live, 0, B, LAYOUT, BLOCK_N, BYTES, WHOLE)
    s, z = load_scales(w_scale_ptr, more_ptr, n, live, 0, G, LAYOUT, ZEROS, GROUP, GROUPS)
    if KIND >= 0:
        w_up = load_codes(up_at, high_up_at, live, 0, B, LAYOUT, BLOCK_N, BYTES, WHOLE)
        s_up, z_up = load_scales(w_scale_ptr, more_ptr, n + OUT, live, 0, G, LAYOUT, ZEROS, GROUP, GROUPS)
    if PDL and not EXPERTS:
        tl.extra.cuda.gdc_wait()
    b = tl.arange(0, BYTES)
    squares = tl.zeros([BYTES], tl.float32)
    acc = tl.zeros([BLOCK_N, BYTES], tl.float32)
    acc_up = acc
    for b0 in range(0, B, BYTES):
        left = live & (b0 + BYTES < B)
        group = (b0 // BYTES + 1) * GROUPS
        # The next block is being loaded while this one is multiplied.
        ahead = load_codes(at, high_at, left, b0 + BYTES, B, LAYOUT, BLOCK_N, BYTES, False)
        s_ahead, z_ahead = load_scales(w_scale_ptr, more_ptr, n, left, group, G, LAYOUT, ZEROS, GROUP, GROUPS)
        if KIND >= 0:
            ahead_up = load_codes(up_at, high_up_at, left, b0 + BYTES, B, LAYOUT, BLOCK_N, BYTES, False)
            s_up_ahead, z_up_ahead = load_scales(w_scale_ptr, more_ptr, n + OUT, left, group, G, LAYOUT, ZEROS, GROUP,
                                                 GROUPS)
        x_even, x_odd = inputs_of(x_ptr, b0 + b, B, PAIR, WHOLE)
        if NORM:
            norm_even, norm_odd = inputs_of(norm_ptr, b0 + b, B, PAIR, WHOLE)
            squares += x_even * x_even
            x_even *= norm_even
            if PAIR == 2:
                squares += x_odd * x_odd
                x_odd *= norm_odd
        scale, zero = scales_of(s, z, LAYOUT)
        even, odd = weights_of(w, scale, zero, LAYOUT, BLOCK_N, GROUPS, BYTES, ZEROS, GROUP != 0, ASM)
        acc += even * x_even[None, :]
        if PAIR == 2:
            acc += odd * x_odd[None, :]
        w, s, z = ahead, s_ahead, z_ahead
        if KIND >= 0:
            scale, zero = scales_of(s_up, z_up, LAYOUT)
            even, odd = weights_of(w_up, scale, zero, LAYOUT, BLOCK_N, GROUPS, BYTES, ZEROS, GROUP != 0, ASM)
            acc_up += even * x_even[None, :]
            if PAIR == 2:
                acc_up += odd * x_odd[None, :]
            w_up, s_up, z_up = ahead_up, s_up_ahead, z_up_ahead
    y = tl.sum(acc, 1)
    factor = 1.0
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    y *= factor
    y *= factor_of(w_scale_ptr, more_ptr, n, live, LAYOUT, GROUP)
    up = y
    if KIND >= 0:
        up = tl.sum(acc_up, 1) * factor * factor_of(w_scale_ptr, more_ptr, n + OUT, live, LAYOUT, GROUP)
    finish_row(y, up, n, y_ptr, bias_ptr, residual_ptr, OUT, BIAS, KIND, RESIDUAL)


@jit
def _columns(x_ptr, norm_ptr, x_row, k, live_m, squares, K, ROWS: tl.constexpr, WHOLE: tl.constexpr,
             NORM: tl.constexpr):
    """Inputs k of x^T [., ROWS] in its dtype, times the norm's weight, and the running sums of squares of its rows."""
    at = x_ptr + tl.arange(0, ROWS)[None, :] * x_row + k[:, None]
    if WHOLE:
        x = tl.load(at, mask=live_m[None, :], other=0.0)
    else:
        x = tl.load(at, mask=live_m[None, :] & (k < K)[:, None], other=0.0)
    if NORM:
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, 0)
        x = (wide * tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)[:, None]).to(x_ptr.dtype.element_ty)
    return x, squares


@jit
def add_product(acc, w, s, z, x, LAYOUT: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
                BYTES: tl.constexpr, PAIR: tl.constexpr, ZEROS: tl.constexpr, ASM: tl.constexpr):
    """Add the product of a block of codes [N, BYTES] and x^T [inputs, M] to acc [N, M], but for ``factor_of``. A scale
    that all inputs of the block share multiplies sums, in fp32."""
    s, z = scales_of(s, z, LAYOUT)
    a = tile_of(w, s, z, x.dtype, LAYOUT, N, GROUPS, BYTES, PAIR, ZEROS, GROUPS > 1, ASM)
    if LAYOUT <= 1 and GROUP != 0 and GROUPS == 1:
        acc += tl.dot(a, x, input_precision="ieee") * s
    else:
        acc = tl.dot(a, x, acc, input_precision="ieee")
    return acc


@jit(do_not_specialize=["rows"])
def _few_rows_codes(x_ptr, w_ptr, high_ptr, w_scale_ptr, more_ptr, y_ptr, part_ptr, squares_ptr, norm_ptr,
                    bias_ptr, residual_ptr, eps, rows, x_row, y_row, residual_row, share, OUT, K, B, G,
                    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BYTES: tl.constexpr, GROUPS: tl.constexpr,
                    GROUP: tl.constexpr, PAIR: tl.constexpr, LAYOUT: tl.constexpr, ZEROS: tl.constexpr,
                    ASM: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr, WHOLE: tl.constexpr,
                    NORM: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr, RESIDUAL: tl.constexpr,
                    PDL: tl.constexpr):
    """``BLOCK_N`` outputs of every row: y; or, over ``share`` bytes of a row of W, ``part`` [splits, T, N] fp32 and
    ``squares`` [splits, T]."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    start = split * share
    stop = tl.minimum(start + share, B)
    m = tl.arange(0, ROWS)
    k = tl.arange(0, PAIR * BYTES)
    live, live_m = n < OUT, m < rows
    at = w_ptr + n.to(tl.int64)[:, None] * B
    up_at = w_ptr + (n.to(tl.int64) + OUT)[:, None] * B
    high_at = high_ptr + n.to(tl.int64)[:, None] * (B // 2)
    high_up_at = high_ptr + (n.to(tl.int64) + OUT)[:, None] * (B // 2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    group = start // BYTES * GROUPS
    s, z = load_scales(w_scale_ptr, more_ptr, n, live, group, G, LAYOUT, ZEROS, GROUP, GROUPS)
    if KIND >= 0:
        s_up, z_up = load_scales(w_scale_ptr, more_ptr, n + OUT, live, group, G, LAYOUT, ZEROS, GROUP, GROUPS)
    if PDL:  # the first blocks are on their way while the kernel before ends
        SECTORS: tl.constexpr = 8 if STAGES * BYTES <= 256 else 16
        inside = tl.minimum(n, OUT - 1).to(tl.int64)[:, None]
        prefetch(w_ptr + inside * B, start, B, SECTORS)
        if KIND >= 0:
            prefetch(w_ptr + (inside + OUT) * B, start, B, SECTORS)
        tl.extra.cuda.gdc_wait()
    squares = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    acc_up = acc
    for b0 in tl.range(start, stop, BYTES, num_stages=STAGES):
        w = load_codes(at, high_at, live, b0, B, LAYOUT, BLOCK_N, BYTES, WHOLE)
        x, squares = _columns(x_ptr, norm_ptr, x_row, b0 * PAIR + k, live_m, squares, K, ROWS, WHOLE, NORM)
        group = (b0 // BYTES + 1) * GROUPS
        ahead, z_ahead = load_scales(w_scale_ptr, more_ptr, n, live, group, G, LAYOUT, ZEROS, GROUP, GROUPS)
        acc = add_product(acc, w, s, z, x, LAYOUT, BLOCK_N, GROUP, GROUPS, BYTES, PAIR, ZEROS, ASM)
        s, z = ahead, z_ahead
        if KIND >= 0:
            w = load_codes(up_at, high_up_at, live, b0, B, LAYOUT, BLOCK_N, BYTES, WHOLE)
            ahead, z_ahead = load_scales(w_scale_ptr, more_ptr, n + OUT, live, group, G, LAYOUT, ZEROS, GROUP, GROUPS)
            acc_up = add_product(acc_up, w, s_up, z_up, x, LAYOUT, BLOCK_N, GROUP, GROUPS, BYTES, PAIR, ZEROS, ASM)
            s_up, z_up = ahead, z_ahead
    acc *= factor_of(w_scale_ptr, more_ptr, n, live, LAYOUT, GROUP)[:, None]
    if KIND >= 0:
        acc_up *= factor_of(w_scale_ptr, more_ptr, n + OUT, live, LAYOUT, GROUP)[:, None]
    finish_rows(acc, acc_up if KIND >= 0 else acc, squares, n, m, y_ptr, part_ptr, squares_ptr, bias_ptr, residual_ptr,
                eps, rows, y_row, residual_row, OUT, K, SPLIT, NORM, BIAS, KIND, RESIDUAL)


def codes_gemv(x_TK: torch.Tensor, w: Coded, config: Config, *, norm: tuple[torch.Tensor, float] | None = None,
               bias_N: torch.Tensor | None = None, activation: str | None = None,
               residual_TO: torch.Tensor | None = None, out_TO: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``codes_gemv_reference`` in one launch (two where K is split), as ``kernels.gemv.gemv`` does.
    ``config.block_k`` counts inputs: a power of two, and whole groups."""
    (rows, width), num_rows = x_TK.shape, w.codes.shape[0]
    assert rows <= MAX_ROWS and w.num_inputs == width and x_TK.stride(1) == 1, "a few dense rows"
    outputs = num_rows if activation is None else num_rows // 2
    y_TO = result_of(x_TK, outputs, residual_TO, out_TO)
    if rows == 0:
        return y_TO
    norm_K, eps = (x_TK, 0.0) if norm is None else norm
    bias, planes = x_TK if bias_N is None else bias_N, w.pointers()
    size = config.block_k // w.pair
    fused = {"NORM": norm is not None, **ending(x_TK.device, bias_N, activation, residual_TO)}
    shape = {"OUT": outputs, "K": width, "BLOCK_N": config.block_n, **w.constants(config.block_k),
             "WHOLE": width % config.block_k == 0 and outputs % config.block_n == 0, "num_warps": config.warps}
    programs = cdiv(outputs, config.block_n)
    if config.block_n < 16:
        assert rows == 1 and config.splits == 1, "blocks below 16 are for one row, unsplit"
        assert x_TK.data_ptr() % 4 == 0, "the two inputs of a byte are one word"
        _one_row_codes[(programs,)](x_TK, *planes, y_TO, norm_K, bias, y_TO, eps, **shape, **fused)
        return y_TO
    share, splits = share_of(width // w.pair, size, config.splits)
    part, squares = room_for_splits(splits, num_rows, x_TK)
    _few_rows_codes[(programs, splits)](
        x_TK, *planes, y_TO, part, squares, norm_K, bias, y_TO, eps, rows, x_TK.stride(0),
        y_TO.stride(0), y_TO.stride(0), share, **shape, ROWS=max(16, next_power_of_2(rows)), STAGES=config.stages,
        SPLIT=splits > 1, **fused)
    if splits > 1:
        join(part, squares, y_TO, bias, eps, width, fused)
    return y_TO


@jit
def _write_matrix(w_ptr, high_ptr, w_scale_ptr, more_ptr, y_ptr, rows, B, G, BLOCK_N: tl.constexpr, BYTES: tl.constexpr,
                  GROUPS: tl.constexpr, GROUP: tl.constexpr, PAIR: tl.constexpr, LAYOUT: tl.constexpr,
                  ZEROS: tl.constexpr, ASM: tl.constexpr):
    """A block of the matrix itself."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    b0 = tl.program_id(1) * BYTES
    live = n < rows
    wide = n.to(tl.int64)[:, None]
    w = load_codes(w_ptr + wide * B, high_ptr + wide * (B // 2), live, b0, B, LAYOUT, BLOCK_N, BYTES, False)
    s, z = load_scales(w_scale_ptr, more_ptr, n, live, b0 // BYTES * GROUPS, G, LAYOUT, ZEROS, GROUP, GROUPS)
    s, z = scales_of(s, z, LAYOUT)
    factor = factor_of(w_scale_ptr, more_ptr, n, live, LAYOUT, GROUP)[:, None]
    y = tile_of(w, s, z, tl.float32, LAYOUT, BLOCK_N, GROUPS, BYTES, PAIR, ZEROS, GROUP != 0, ASM) * factor
    k = b0 * PAIR + tl.arange(0, PAIR * BYTES)
    at = y_ptr + n.to(tl.int64)[:, None] * (B * PAIR)
    tl.store(at + k[None, :], y.to(y_ptr.dtype.element_ty), mask=live[:, None] & (k < B * PAIR)[None, :])


def matrix_of(w: Coded, dtype: torch.dtype) -> torch.Tensor:
    """The matrix [..., N, K] in ``dtype``, by one kernel: scratch memory of a product of many rows."""
    shape = (*w.codes.shape[:-1], w.num_inputs)
    y = torch.empty(shape, dtype=dtype, device=w.codes.device)
    rows, block_k = w.codes[..., 0].numel(), 128 * w.pair
    _write_matrix[(cdiv(rows, 16), cdiv(w.num_inputs, block_k))](
        *w.pointers(), y, rows, BLOCK_N=16, **w.constants(block_k), num_warps=4)
    return y


# -------------------------------------------------------------------------------------------------------------- chooser


def choose(rows: int, num_rows: int, w: Coded, gated: bool = False) -> Config:
    """Config for ``num_rows`` rows of codes and ``rows`` rows of x, 1 to 64."""
    block_n, block_k, warps, stages, programs = tuned.look_up(tuned.CODES_GEMV.value, rows=rows, gated=gated)
    block_k = max(w.group or 1, 16 * w.pair, min(block_k, next_power_of_2(w.num_inputs)))
    if block_n < 16:
        return Config(block_n, block_k, warps)
    tiles = cdiv(num_rows // 2 if gated else num_rows, block_n)
    return Config(block_n, block_k, warps, stages, splits_for(tiles, w.num_inputs, programs))


@dataclass(frozen=True)
class Case:
    """One point of the test grid. ``outputs`` is O."""

    layout: str
    group: int
    rows: int
    outputs: int
    width: int
    config: Config
    zeros: bool = False
    norm: bool = False
    bias: bool = False
    activation: str | None = None
    residual: bool = False


def grid() -> Iterator[Case]:
    one, few = Config(4, 128, 4), Config(16, 128, 1, 2)
    for layout, group, zeros in (("i8", 0, False), ("i8", 32, False), ("u4", 32, False), ("u4", 64, True),
                                 ("mxfp4", 32, False), ("nvfp4", 16, False), ("fp6", 0, False), ("q6_k", 16, False),
                                 ("q4_k", 32, False)):
        width = 768 if layout.endswith("_k") else 320
        half = 256 if layout.endswith("_k") else 192
        yield Case(layout, group, 1, 33, width, one, zeros, norm=True, bias=True, residual=True)
        yield Case(layout, group, 3, 48, width, few, zeros)
        yield Case(layout, group, 33, 72, width, Config(64, 128, 4, 3), zeros, norm=True, residual=True)
        if layout in ("fp6", "q4_k"):  # the others have all that they add to the kernels
            continue
        yield Case(layout, group, 1, 40, width, one, zeros)
        yield Case(layout, group, 1, 40, half, one, zeros, norm=True, activation="silu")
        yield Case(layout, group, 5, 40, half, few, zeros, norm=True, bias=True, residual=True)
        yield Case(layout, group, 17, 48, 512, Config(32, 128, 4, 3, splits=3), zeros, norm=True, activation="silu",
                   bias=True)
        yield Case(layout, group, 1, 80, 512, Config(32, 128, 2, 4, splits=2), zeros, norm=True, activation="silu")
    yield Case("u4", 128, 1, 40, 512, Config(4, 128, 4), zeros=True, norm=True)
    yield Case("u4", 128, 20, 64, 512, Config(64, 128, 4, 3, splits=2), zeros=True)
    yield Case("mxfp4", 32, 64, 136, 512, Config(128, 128, 8, 3), activation="silu")
    yield Case("u4", 128, 2, 40, 512, few, activation="gelu_tanh", residual=True)
    yield Case("u4", 128, 0, 16, 256, one)
