"""The one place that imports Triton, so that every kernel file imports without it and without a GPU.

Kernels write ``@jit`` and ``tl``. Where none can run, Triton is not imported (that takes a tenth of a second) and
``jit`` leaves the function alone. With ``TRITON_INTERPRET=1`` in the environment before this module is imported
(Triton's own switch, used by the kernel tests), kernels run on the CPU, one program after the other.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

AVAILABLE = importlib.util.find_spec("triton") is not None
INTERPRETED = AVAILABLE and os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
if AVAILABLE and (INTERPRETED or torch.cuda.is_available()):
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
else:
    triton = tl = libdevice = None
# Gluon's names still change from version to version
if triton is not None and not INTERPRETED and triton.__version__.startswith("3.6."):
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
else:
    gluon = gl = hopper = None


def jit(fn: Callable | None = None, **options: Any) -> Any:
    """``triton.jit``, or the function itself where no kernel can run."""
    if triton is None:
        return fn if fn is not None else lambda f: f
    return triton.jit(fn, **options)


def gluon_jit(fn: Callable | None = None, **options: Any) -> Any:
    """``gluon.jit``, for kernels that place warps, layouts and barriers by hand, or the function itself where no such
    kernel can run."""
    if gluon is None:
        return fn if fn is not None else lambda f: f
    return gluon.jit(fn, **options)


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether a chooser takes the kernel for this tensor. Off a GPU only the interpreter can run one."""
    return triton is not None and (tensor.is_cuda or (INTERPRETED and tensor.device.type == "cpu"))


@functools.cache
def pdl(device: torch.device) -> bool:
    """Whether kernels are launched with programmatic dependence (needs compute capability 9.0).

    Such a kernel starts while the one before it still runs, and fetches what no other kernel writes. It waits for that
    one's end (``gdc_wait``) before it touches anything else.
    """
    return device.type == "cuda" and not INTERPRETED and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def by_hand(device: torch.device) -> bool:
    """Whether kernels can run whose warps and barriers are placed by hand for Hopper."""
    return gluon is not None and device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


class Launches:
    """Launches that the layers of a step repeat: the same kernels and grids, with the same numbers, on other tensors of
    the same layout. One object serves one step.

    Triton binds and specialises all arguments at every launch, which takes the host several times as long as the launch
    itself. Here only a kernel's first launch does; later ones, whose tensors must be aligned like the first one's, go
    to the compiled kernel directly.
    """

    def __init__(self) -> None:
        self._compiled: dict[tuple, tuple[Any, tuple]] = {}

    def __call__(self, kernel: Any, grid: tuple[int, int, int], *args: Any, **named: Any) -> None:
        key = kernel, grid, *named.values()
        known = self._compiled.get(key)
        if known is not None:
            compiled, constants = known
            compiled[grid](*args, *constants)
            return
        compiled = kernel[grid](*args, **named)
        if compiled is not None:  # in the interpreter there is none
            rest = kernel.params[len(args):]
            self._compiled[key] = compiled, tuple(named.get(p.name, p.default) for p in rest)


def launch(kernel: Any, grid: tuple[int, int, int], *args: Any, **named: Any) -> None:
    """Launch a kernel the way Triton does it."""
    kernel[grid](*args, **named)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()
