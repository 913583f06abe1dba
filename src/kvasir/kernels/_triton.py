"""The one place that imports Triton, so that every kernel file imports without it and without a GPU.

Kernels write ``@jit`` and ``tl``. Without Triton, ``jit`` leaves the function alone (it is never launched). With
``TRITON_INTERPRET=1`` in the environment before Triton is imported (Triton's own switch, used by the kernel tests),
kernels run on the CPU, one program after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

if TYPE_CHECKING:
    import torch

AVAILABLE = triton is not None
INTERPRETED = AVAILABLE and bool(triton.knobs.runtime.interpret)


def jit(fn: Callable | None = None, **options: Any) -> Any:
    """``triton.jit``, or the function itself where Triton is missing."""
    if not AVAILABLE:
        return fn if fn is not None else lambda f: f
    return triton.jit(fn, **options)


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether a chooser takes the kernel for this tensor. Off a GPU only the interpreter can run one."""
    return AVAILABLE and (tensor.is_cuda or (INTERPRETED and tensor.device.type == "cpu"))


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
