"""The one place that imports Triton, so that every kernel file imports without it and without a GPU.

Kernels write ``@jit`` and ``tl``. Where none can run, Triton is not imported (that takes a tenth of a second) and ``jit``
leaves the function alone. With ``TRITON_INTERPRET=1`` in the environment before this module is imported (Triton's own
switch, used by the kernel tests), kernels run on the CPU, one program after the other.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

LIBRARY_END = 1 << 20  # bytes
AVAILABLE = importlib.util.find_spec("triton") is not None
INTERPRETED = AVAILABLE and os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
if AVAILABLE and (INTERPRETED or torch.cuda.is_available()):
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
else:
    triton = tl = libdevice = None
if triton is not None and not INTERPRETED and triton.__version__.startswith("3.6."):  # Gluon's names still change from version to version
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
else:
    gluon = gl = hopper = None


@functools.cache
def fingerprint() -> str:
    """Of this Triton, for the names of what it caches: its sources, and of its libraries the sizes and both ends (a linker's build id is in
    the first). Its own hashes all of a library of 400 MB, in every process: 0.8 s of a start."""
    root, digest = Path(triton.__file__).parent, hashlib.sha256()
    folders = [root / part for part in ("_C", "backends", "compiler", "experimental", "language", "runtime")]
    found = (Path(folder) / name for part in folders for folder, _, names in os.walk(part, followlinks=True) for name in names)
    for path in sorted(path for path in found if path.suffix in (".py", ".so") and path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(root)} {size} ".encode())
        with path.open("rb") as file:
            if path.suffix == ".py" or size <= 2 * LIBRARY_END:
                digest.update(file.read())
            else:
                digest.update(file.read(LIBRARY_END))
                file.seek(-LIBRARY_END, os.SEEK_END)
                digest.update(file.read())
    return f"{triton.__version__}-{digest.hexdigest()}"


def each_its_own(load: Callable[[str, str], Any]) -> Callable[[str, str], Any]:
    """``load(name, path)`` of extension modules for several threads. Triton's launchers all have one name, and whoever loads one of them
    again gets a module that all such loads share: before its function is read, it may be another launcher's. Here it is read at once."""
    loading = threading.Lock()

    def loaded(name: str, path: str) -> SimpleNamespace:
        with loading:
            return SimpleNamespace(**vars(load(name, path)))

    return loaded


LAUNCHERS = False  # whether they may be loaded by several threads
if triton is not None and not INTERPRETED:
    if hasattr(triton.runtime.cache, "triton_key"):
        triton.runtime.cache.triton_key = fingerprint
    if hasattr(triton.runtime.build, "_load_module_from_path"):
        triton.runtime.build._load_module_from_path = each_its_own(triton.runtime.build._load_module_from_path)
        LAUNCHERS = True


def jit(fn: Callable | None = None, **options: Any) -> Any:
    """``triton.jit``, or the function itself where no kernel can run."""
    if triton is None:
        return fn if fn is not None else lambda f: f
    return triton.jit(fn, **options)


def gluon_jit(fn: Callable | None = None, **options: Any) -> Any:
    """``gluon.jit``, for kernels that place warps, layouts and barriers by hand, or the function itself where no such kernel can run."""
    if gluon is None:
        return fn if fn is not None else lambda f: f
    return gluon.jit(fn, **options)


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether a chooser takes the kernel for this tensor. Off a GPU only the interpreter can run one."""
    return triton is not None and (tensor.is_cuda or (INTERPRETED and tensor.device.type == "cpu"))


@functools.cache
def pdl(device: torch.device) -> bool:
    """Whether kernels are launched with programmatic dependence: a kernel then starts, and fetches what no other kernel
    writes, while the one before it still runs, and waits for its end (``gdc_wait``) before it touches anything else.
    Needs compute capability 9.0."""
    return device.type == "cuda" and not INTERPRETED and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def by_hand(device: torch.device) -> bool:
    """Whether kernels run whose warps and barriers are placed by hand for Hopper."""
    return gluon is not None and device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


class Launches:
    """Launches that the layers of a step repeat: the same kernels and grids, with the same numbers, on other tensors of the same layout.

    Triton binds and specialises all arguments anew each time, which takes the host several times the launch itself. Here a kernel's first
    launch does, and the later ones, whose tensors must be aligned as that one's were, go to the compiled kernel. For one step.
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


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Kernels met within are compiled beside each other, on all cores: a launch waits for its own only, and the end for all. What cannot
    be compiled says so where it is launched. Tritons that cannot do this compile one after the other, as ever."""
    if not hasattr(triton, "AsyncCompileMode"):
        yield
        return
    pool = _Compilers if LAUNCHERS else ThreadPoolExecutor
    with pool(min(32, os.cpu_count() or 1)) as threads, triton.AsyncCompileMode(threads, ignore_errors=True):
        yield


class _Compilers(ThreadPoolExecutor):
    """Each compiles a kernel and then its launcher. Up to 3.6 Triton has a C compiler make one for every signature, which takes a quarter of a
    second, and would have it made where the kernel is first launched, while everybody waits."""

    def submit(self, compile_kernel: Callable[[], Any], /) -> Future:  # type: ignore[override]
        return super().submit(self._with_launcher, compile_kernel)

    @staticmethod
    def _with_launcher(compile_kernel: Callable[[], Any]) -> Any:
        kernel = compile_kernel()
        with contextlib.suppress(Exception):  # then it is made, or says why not, where it is launched
            triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)  # found in Triton's cache from then on
        return kernel


@contextlib.contextmanager
def rehearsing() -> Iterator[None]:
    """No kernel that this thread launches within runs; those not compiled yet are. What they would have written is not."""
    run, mine = triton.JITFunction.run, threading.get_ident()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        if threading.get_ident() != mine:
            return run(self, *args, grid=grid, warmup=warmup, **named)
        run(self, *args, grid=grid, warmup=True, **named)
        return None  # nothing that ``Launches`` would go on to launch

    triton.JITFunction.run = compile_only  # the only place that all launches go through
    try:
        yield
    finally:
        triton.JITFunction.run = run


def launch(kernel: Any, grid: tuple[int, int, int], *args: Any, **named: Any) -> None:
    """By itself, as Triton does it."""
    kernel[grid](*args, **named)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
