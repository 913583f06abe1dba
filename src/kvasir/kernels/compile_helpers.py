"""Processes that compile kernels. One process compiles few at a time, however many threads it has: much of Triton's
work holds Python's lock, and of sixteen threads most wait for it (a kernel of 0.08 s of work was compiled after 2.5 s).

The processes are forked where a start begins, before it has a context on the device, and never touch the device. At
first one is forked, and waits. It forks the others when the first kernel is not in Triton's cache, so that a start
which finds all of them there pays for one fork. Their results go to that cache. If a helper fails, the start compiles
the kernel itself. (``multiprocessing``'s fork server would import torch again, which takes three seconds; its pools
fork when they get their first job, when there is a context.)
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import os
import queue
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

from kvasir.kernels._triton import triton
from kvasir.logs import log

PATIENCE_SECONDS = 120.0  # seconds to wait for one kernel; the slowest so far takes three
FAREWELL_SECONDS = 2.0
PRCTL = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None  # found before any fork
PR_SET_PDEATHSIG = 1
Work = Callable[[bytes], None]


class Helpers:
    """``count`` processes. ``prepare``: run once by the first of them, for all. ``work``: run by each on a job."""

    def __init__(self, count: int, prepare: Callable[[], None], work: Work | None = None) -> None:
        (self._wake, wake), *pairs = (Pipe() for _ in range(count + 1))
        self._ends = [mine for mine, _ in pairs]
        with warnings.catch_warnings():
            # Python 3.12 warns wherever there are threads. Here it is the one that waits for the client's messages, and
            # holds no lock that a child takes.
            warnings.simplefilter("ignore", DeprecationWarning)
            parent, self._pid = os.getpid(), os.fork()
        if not self._pid:
            _end_with(parent)
            _stand_by(wake, [theirs for _, theirs in pairs], prepare, work or compile_job)
        with contextlib.suppress(OSError):
            os.setpgid(self._pid, self._pid)  # both sides do so, since either may come first
        for end in (wake, *(theirs for _, theirs in pairs)):
            end.close()
        self._idle: queue.SimpleQueue[Connection | None] = queue.SimpleQueue()
        for end in self._ends:
            self._idle.put(end)
        self._awake, self._waking = False, threading.Lock()

    def do(self, job: bytes) -> bool:
        """Wait until one of them has done ``job``. False: it could not, or died over it. Any thread may call this."""
        with self._waking:
            if not self._awake:
                self._awake = True
                with contextlib.suppress(OSError):
                    self._wake.send_bytes(b"wake up")
        end = self._idle.get()
        if end is None:
            self._idle.put(None)  # as many as there are threads may wait for one that died
            return False
        try:
            end.send_bytes(job)
            if not end.poll(PATIENCE_SECONDS):
                raise TimeoutError
            error = end.recv_bytes().decode()
        except (EOFError, OSError) as e:
            log.warning("a process that compiles kernels is lost (%s): they are compiled here", type(e).__name__)
            self._idle.put(None)
            return False
        self._idle.put(end)
        if error:
            log.debug("not compiled in a process of its own: %s", error)
        return not error

    def close(self) -> None:
        """End the processes. Idle ones end by themselves, and the first of them reaps the others; one that still
        compiles is killed."""
        for end in (self._wake, *self._ends):
            end.close()
        until = time.monotonic() + FAREWELL_SECONDS * self._awake
        # whoever started this process may have had it ignore its children's ends
        with contextlib.suppress(ChildProcessError):
            while os.waitid(os.P_PID, self._pid,
                            os.WEXITED | os.WNOWAIT | os.WNOHANG) is None and time.monotonic() < until:
                time.sleep(0.002)
        with contextlib.suppress(OSError):
            os.killpg(self._pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


def _end_with(parent: int) -> None:
    """Have the system kill this process when its parent ends (on Linux, the thread that forked it, here the main one).
    A process that compiles does not look at the pipes, where the others notice that the start is gone."""
    if PRCTL is not None:
        PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)


def _stand_by(wake: Connection, ends: list[Connection], prepare: Callable[[], None], work: Work) -> NoReturn:
    """The process that was forked first. It ends when the start has ended, or is gone: no other process holds the
    start's ends of the pipes."""
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        _let_go(keep={0, 1, 2, wake.fileno(), *(end.fileno() for end in ends)})
        prepare()
        wake.recv_bytes()
        parent = os.getpid()
        for end in ends:
            if not os.fork():
                _end_with(parent)
                wake.close()
                for other in ends:
                    if other is not end:
                        other.close()
                _work(end, work)
        for end in ends:
            end.close()
        for _ in ends:
            os.wait()
    finally:
        os._exit(0)


def _let_go(keep: set[int]) -> None:
    """Let go of the start's files: a socket that stays open here hides its death from the client, an open device keeps
    its memory from the next start. The file numbers stay taken, so that no object which still has one closes another
    file."""
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in keep | {null}:
            with contextlib.suppress(OSError):  # the one that lists them is gone
                os.fstat(int(name))
                os.dup2(null, int(name))


def _work(end: Connection, work: Work) -> NoReturn:
    try:
        while True:
            job, error = end.recv_bytes(), ""
            try:
                work(job)
            except Exception as e:
                error = f"{type(e).__name__}: {e}"
            end.send_bytes(error.encode())
    finally:
        os._exit(0)


def compile_job(job: bytes) -> None:
    """Compile a kernel and its launcher into Triton's cache. Runs in a helper process."""
    src, target, options, env_vars, launcher = ForkingPickler.loads(job)
    kernel = triton.compile(src, target=target, options=options, _env_vars=env_vars)
    launcher(kernel.src, kernel.metadata)


def job_of(compile_kernel: Callable[[], Any]) -> bytes | None:
    """The job that does the work of ``compile_kernel`` of Triton's ``AsyncCompileMode``; None if its result is cached.
    With another version of Triton it may raise anything. A kernel that has no place in a module fails where it is
    unpacked."""
    made = dict(zip(compile_kernel.__code__.co_freevars,
                    (cell.cell_contents for cell in compile_kernel.__closure__ or ())))
    src, target, options, env_vars = (made[name] for name in ("src", "target", "options", "env_vars"))
    key = triton.runtime.cache.get_cache_key(src, triton.compiler.compiler.make_backend(target), options, env_vars)
    cache = triton.runtime.cache.get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    if cache.get_group(f"{src.name[:150]}.json"):
        return None
    return bytes(_Job.dumps((src, target, dict(options.__dict__), env_vars, triton.runtime.driver.active.launcher_cls)))


class _Job(ForkingPickler):
    """Pickles a job for a process that this one forked. Kernels go by name."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, triton.JITFunction):
            return _find, (value.fn.__module__, value.fn.__qualname__, value.cache_key)
        return NotImplemented


def _find(module: str, name: str, key: str) -> Any:
    kernel = getattr(importlib.import_module(module), name)
    if kernel.cache_key != key:
        raise LookupError(f"{module}.{name} is another kernel here")
    return kernel
