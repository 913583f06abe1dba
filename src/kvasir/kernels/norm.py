"""RMS norm: x / rms(x) * weight, in fp32, rounded once; also fused with the residual add before it.

A sublayer's result x joins the residual stream h, and the next sublayer needs the norm of the sum. Separately that is
five reads and writes of [T, E]; in one kernel it is four. With sandwiched norms (Gemma) x is itself normalised first,
and seven become four.

Legend: T rows, E (or D) the normalised, last dimension. Leading dimensions are free unless stated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kvasir.kernels._triton import jit, next_power_of_2, pdl, tl, use_triton

MAX_WIDTH = 16384  # a row lies in the registers of one program


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., E] float, weight [E] or broadcastable to x. Returns x's shape and dtype.

    A row's bits do not depend on the other rows: one reduction per row, then only correctly rounded operations.
    """
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    scale = scale.mul_(scale).mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    normed = (x * scale).mul_(weight)
    return normed if normed.dtype == x.dtype else normed.to(x.dtype)


def add_rms_norm_reference(x: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, eps: float,
                           post: tuple[torch.Tensor, float] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of the sum, and the sum, of a residual stream h [T, E] and x [T, E]; with ``post`` (weight and eps) of h
    and norm(x)."""
    if post is not None:
        x = rms_norm_reference(x, *post)
    h = x + h
    return rms_norm_reference(h, weight, eps), h


# --------------------------------------------------------------------------------------------------------------- kernel


@jit
def _add_rms_norm(x_ptr, h_ptr, y_ptr, weight_ptr, post_ptr, x_row, h_row, y_row, eps, post_eps,
                  E: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, POST: tl.constexpr, NORM: tl.constexpr,
                  PDL: tl.constexpr):
    """One row: x = norm(x) if POST; h = x + h if ADD, in place; y = norm(h or x) if NORM."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    inside = e < E
    if PDL:  # what no kernel before this one writes is loaded while that one still runs
        tl.extra.cuda.gdc_launch_dependents()
    if NORM:
        weight = tl.load(weight_ptr + e, mask=inside, other=0.0).to(tl.float32)
    if POST:
        post = tl.load(post_ptr + e, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * x_row + e, mask=inside, other=0.0).to(tl.float32)
    if POST:
        x = x * tl.rsqrt(tl.sum(x * x, 0) / E + post_eps) * post
    if ADD:
        x += tl.load(h_ptr + row * h_row + e, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + row * h_row + e, rounded, mask=inside)
        x = rounded.to(tl.float32)  # the norm of what the stream holds
    if NORM:
        y = x * tl.rsqrt(tl.sum(x * x, 0) / E + eps) * weight
        tl.store(y_ptr + row * y_row + e, y.to(y_ptr.dtype.element_ty), mask=inside)


def _launch(x: torch.Tensor, h: torch.Tensor | None, weight: torch.Tensor | None, eps: float,
            post: tuple[torch.Tensor, float] | None) -> torch.Tensor | None:
    rows, width = x.shape
    assert x.stride(1) == 1 and width <= MAX_WIDTH and (h is None or (h.shape == x.shape and h.stride(1) == 1)), \
        "dense rows"
    y = None if weight is None else torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows == 0:
        return y
    block, early = next_power_of_2(width), pdl(x.device)
    post_weight, post_eps = (x, 0.0) if post is None else post
    out = x if y is None else y
    stream = x if h is None else h
    _add_rms_norm[(rows,)](
        x, stream, out, x if weight is None else weight, post_weight, x.stride(0), stream.stride(0), out.stride(0), eps,
        post_eps, E=width,
        BLOCK=block, ADD=h is not None, POST=post is not None, NORM=y is not None, PDL=early,
        num_warps=min(16, max(1, block // 512)),
        launch_pdl=early)
    return y


def fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel takes these rows."""
    return use_triton(x) and x.dim() == 2 and weight.dim() == 1 and x.stride(1) == 1 and x.shape[1] <= MAX_WIDTH


# ------------------------------------------------------------------------------------------------------------- choosers


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, eps_1: torch.Tensor | None = None,
             fused: bool = True) -> torch.Tensor:
    """RMS norm in the fastest form for the device; arguments as ``rms_norm_reference``.

    ``eps_1``: eps as an fp32 tensor [1] on x's device. It saves a CPU two calls, but a row's last bit may then depend
    on its batch; without it, it never does. ``fused`` False: torch's own form.
    """
    if fused and fits(x, weight):
        return _launch(x, None, weight, eps, None)
    # torch's reductions look at the number of rows
    if fused and eps_1 is None and use_triton(x) and x.shape[-1] <= MAX_WIDTH:
        return _launch(x.reshape(-1, x.shape[-1]), None, x.new_ones(x.shape[-1]), eps, None).view(x.shape).mul_(weight)
    if x.is_cuda and weight.dtype == x.dtype:
        if weight.dim() == 1:
            return F.rms_norm(x, weight.shape, weight, eps)
        return F.rms_norm(x, x.shape[-1:], eps=eps).mul_(weight)
    if eps_1 is None:
        return rms_norm_reference(x, weight, eps)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    normed = (x * torch.addcmul(eps_1, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()).mul_(weight)
    return normed if normed.dtype == x.dtype else normed.to(x.dtype)


def add_rms_norm(x: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, eps: float,
                 post: tuple[torch.Tensor, float] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel for ``add_rms_norm_reference``, where ``fits`` says so. h is overwritten with the sum."""
    return _launch(x, h, weight, eps, post), h


def add_normed(x: torch.Tensor, h: torch.Tensor, post: tuple[torch.Tensor, float]) -> torch.Tensor:
    """Add norm(x) to h in one kernel, where ``fits`` says so; overwrites h."""
    _launch(x, h, None, 0.0, post)
    return h


@dataclass(frozen=True)
class Case:
    """One point of the test grid. ``wide``: the scales are fp32 whatever the rows are (shifted scales, as in Gemma)."""

    rows: int
    width: int
    post: bool = False
    wide: bool = False


def grid() -> Iterator[Case]:
    for rows in (0, 1, 3, 16, 65):
        yield Case(rows, 256)
    for width in (8, 33, 1024, 2560, 4096, 5376):
        yield Case(2, width)
        yield Case(3, width, post=True, wide=width % 2 == 0)
