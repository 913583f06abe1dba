"""Compiling kernels while nobody waits: several at once within ``compiling``, and before they run within
``rehearsing``.

Compiling is not all that Triton 3.6 takes time for at a first start. It hashes all of itself to name what it caches,
and has a C compiler build a launcher for every signature where a kernel is first launched. ``compiling`` avoids both,
for the process. Versions of Triton without these names stay as they are.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvasir.kernels._triton import INTERPRETED, triton
from kvasir.kernels.compile_helpers import Helpers, job_of
from kvasir.logs import log

LIBRARY_END = 1 << 20  # bytes of a library that are hashed at either end
FEW_CORES, MANY_HELPERS = 4, 16

_helpers: ContextVar[Helpers | None] = ContextVar("helpers", default=None)


@contextlib.contextmanager
def helping() -> Iterator[None]:
    """Compile what is met within ``compiling`` in other processes (``compile_helpers``). It is for an engine's own
    process: it forks, which must happen before there is a context on the device, and which a library must not do to a
    program that uses it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if triton is None or INTERPRETED or cores < FEW_CORES or not hasattr(triton, "AsyncCompileMode"):
        yield
        return
    try:
        helpers = Helpers(min(MANY_HELPERS, cores), _prepare)
    except OSError as error:  # a limit of processes or files
        log.warning("kernels are compiled by this process alone: %s", error)
        yield
        return
    token = _helpers.set(helpers)
    try:
        yield
    finally:
        _helpers.reset(token)
        helpers.close()


def _prepare() -> None:
    """Prepare helpers, and the start before its first kernel: cache names like the start's, and the library that loads
    kernels, which a C compiler builds."""
    quicken()
    fingerprint()
    with contextlib.suppress(Exception):  # then the start builds it, or says why it cannot
        importlib.import_module("triton.backends.nvidia.driver").CudaUtils()


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Compile the kernels met within at the same time, on all cores. A launch waits for its own kernel only, and the
    end waits for all. A kernel that cannot be compiled reports it where it is launched. Versions of Triton that cannot
    do this compile one kernel after the other."""
    several = quicken()
    if not hasattr(triton, "AsyncCompileMode"):
        yield
        return
    workers = min(32, os.cpu_count() or 1)
    pool = _Compilers(workers, _helpers.get()) if several else ThreadPoolExecutor(workers)
    with pool as threads, triton.AsyncCompileMode(threads, ignore_errors=True):
        yield


@contextlib.contextmanager
def rehearsing() -> Iterator[None]:
    """Compile the kernels that this thread launches within, without running them. Nothing is written to their
    outputs."""
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


class _Compilers(ThreadPoolExecutor):
    """Threads that each compile a kernel, or have a helper do it, and then its launcher, which takes a quarter of a
    second for every signature."""

    def __init__(self, workers: int, helpers: Helpers | None) -> None:
        super().__init__(workers)
        self._helpers = helpers

    def submit(self, compile_kernel: Callable[[], Any], /) -> Future:  # type: ignore[override]
        return super().submit(self._with_launcher, compile_kernel)

    def _with_launcher(self, compile_kernel: Callable[[], Any]) -> Any:
        if self._helpers is not None:
            try:
                job = job_of(compile_kernel)
                if job is not None:
                    self._helpers.do(job)
            # of another Triton, or of a kernel that cannot be sent: then it is compiled here
            except Exception as error:
                log.debug("not compiled in a process of its own: %s: %s", type(error).__name__, error)
        kernel = compile_kernel()  # found in Triton's cache where a helper was
        with contextlib.suppress(Exception):  # then it is made, or says why not, where it is launched
            # found in Triton's cache from then on
            triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
        return kernel


def quicken() -> bool:
    """Make Triton name what it caches by ``fingerprint``. Returns whether several threads may load launchers."""
    runtime = getattr(triton, "runtime", None)
    cache, build = getattr(runtime, "cache", None), getattr(runtime, "build", None)
    if hasattr(cache, "triton_key"):
        cache.triton_key = fingerprint
    load = getattr(build, "_load_module_from_path", None)
    if load is not None and not isinstance(load, EachItsOwn):
        build._load_module_from_path = EachItsOwn(load)
    return load is not None


class EachItsOwn:
    """``load(name, path)`` of extension modules, for several threads. All of Triton's launchers have one name, and
    loading one again returns a module that all such loads share: before its function is read, it may be another
    launcher's. Here the function is read at once."""

    def __init__(self, load: Callable[[str, str], Any]) -> None:
        self._load, self._loading = load, threading.Lock()

    def __call__(self, name: str, path: str) -> SimpleNamespace:
        with self._loading:
            return SimpleNamespace(**vars(self._load(name, path)))


@functools.cache
def fingerprint() -> str:
    """Identify this Triton by its sources, and by the sizes and both ends of its libraries (a linker's build id is in
    the first part). Triton's own hash reads a library of 400 MB to its end, in every process: 0.8 s of a start."""
    root, digest = Path(triton.__file__).parent, hashlib.sha256()
    folders = [root / part for part in ("_C", "backends", "compiler", "experimental", "language", "runtime")]
    found = (Path(folder) / name for part in folders for folder, _,
             names in os.walk(part, followlinks=True) for name in names)
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
