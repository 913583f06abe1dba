"""The gated activation of a feed-forward block: activation(gate) * up.

Bytes: 2 F read and F written a row; as two torch calls it would be 3 F and 2 F.

Legend: T rows, F width of the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kvasir.kernels._triton import cdiv, jit, pdl, tl, use_triton

BLOCK = 1024  # outputs of a program


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


ALPHA, LIMIT = 1.702, 7.0  # of gpt-oss, the same in all its sizes


def _clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * ALPHA))


ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": _gelu_tanh, "clamped_swiglu": _clamped_swiglu}
# numbers by which ``activate`` knows them
KINDS = {F.silu: 0, F.gelu: 1, _gelu_tanh: 2, _clamped_swiglu: 3}


def gated_reference(gate_up: torch.Tensor, activation: Callable[..., torch.Tensor]) -> torch.Tensor:
    """gate_up [T, 2F] (gate first) -> [T, F], same dtype. An activation is a function of the gate, or of both."""
    width = gate_up.shape[-1] // 2
    gate, up = gate_up.split_with_sizes((width, width), -1)
    if activation is _clamped_swiglu:
        return activation(gate, up)
    return activation(gate).mul_(up)


@jit
def activate(gate, up, KIND: tl.constexpr):
    """Apply activation ``KIND`` (see ``KINDS``) to fp32 blocks of any shape."""
    if KIND == 0:
        return gate / (1.0 + tl.exp(-gate)) * up
    elif KIND == 1:
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif KIND == 3:
        gate = tl.minimum(gate, 7.0)
        return gate / (1.0 + tl.exp(-1.702 * gate)) * (tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0)
    else:  # 0.5 (1 + tanh z) = 1 / (1 + exp(-2 z))
        return gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))) * up


@jit
def _gated(gate_up_ptr, y_ptr, in_row, F: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < F
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gate = tl.load(gate_up_ptr + row * in_row + f, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * in_row + F + f, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * F + f, activate(gate, up, KIND).to(y_ptr.dtype.element_ty), mask=inside)


def gated_triton(gate_up: torch.Tensor, activation: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The kernel for ``gated_reference``."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1, "dense rows"
    y = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if y.numel():
        early = pdl(gate_up.device)
        _gated[(rows, cdiv(width, BLOCK))](gate_up, y, gate_up.stride(0), F=width, KIND=KINDS[activation], BLOCK=BLOCK,
                                           PDL=early, num_warps=4, launch_pdl=early)
    return y


def gated(gate_up: torch.Tensor, activation: Callable[[torch.Tensor], torch.Tensor],
          exact: bool = False) -> torch.Tensor:
    """gate_up [T, 2F] (gate first) -> [T, F], same dtype.

    ``exact``: a row's bits do not depend on its batch. On a CPU the vectorised and the scalar exp differ in the last
    bit, and where one ends and the other begins depends on the tensor's size and on the threads; so rows go one by one.
    """
    if use_triton(gate_up) and activation in KINDS and gate_up.dim() == 2 and gate_up.stride(1) == 1:
        return gated_triton(gate_up, activation)  # element by element, so exact as well
    if exact and gate_up.shape[0] > 1:
        return torch.cat([gated(row, activation) for row in gate_up.split(1)])
    return gated_reference(gate_up, activation)


def sigmoid(x: torch.Tensor, exact: bool = False) -> torch.Tensor:
    """The sigmoid of every element of x [T, ...]. ``exact``: as for `gated`."""
    if exact and x.device.type == "cpu":
        return torch.cat([row.contiguous().sigmoid() for row in x.split(1)]) if len(x) else x
    return x.sigmoid()


@dataclass(frozen=True)
class Case:
    """One point of the test grid."""

    rows: int
    width: int
    activation: str = "silu"


def grid() -> Iterator[Case]:
    for rows in (0, 1, 3, 33):
        yield Case(rows, 96)
    for name in ACTIVATIONS:
        for width in (7, 1024, 2500):
            yield Case(2, width, name)
