"""The processes that try grammars, from inside: ``python -m kvasir.decoding.grammar_worker``.

The host reads the tokenizer and forks a process for every socket that its caller sends. It has one thread and runs no
grammar itself. It ends a process when the caller closes its socket, tells the caller when one ended by itself, and ends
with its caller.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import math
import os
import random
import resource
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvasir.decoding.grammar_messages import Closed, Hello, Try, Verdict, receive, send, to_text
from kvasir.errors import ConfigError, RequestError
from kvasir.types import Grammar

# A process that kept this share of its memory for grammars after it tried one ends, and another is forked.
KEPT_SHARE = 0.25
# Stack of the thread that tries a grammar. The engine fills masks in threads with stacks of 2 MiB, so recursion that is
# too deep for those ends this process first.
STACK_BYTES = 1 << 20
# How far a compiled grammar is tried: most tokens a walk, and seconds for all walks.
WALK_TOKENS, WALK_SECONDS = 32, 0.03


def try_out(compiler: Any, grammar: Grammar) -> None:
    """Compile ``grammar`` and walk it as an engine does: masks, forced tokens, drawn tokens, and back.

    A walk that ends in an error is no reason to refuse it: the library's fuel runs out on some outputs only, and fails
    those. A panic is one. Raises RequestError."""
    began = compiler.compile(grammar)
    draw = random.Random(len(grammar.text))
    until = time.monotonic() + WALK_SECONDS
    mask = np.zeros(-(-compiler.vocab_size // 32), np.int32)
    for among in (compiler.vocab_size, 256):  # any token; one of the lowest ids, which are short in most vocabularies
        matcher = began.copy()
        for _ in range(WALK_TOKENS):
            forced = matcher.forced()
            if not matcher.fill(mask):
                break
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            drawn = [token for token in allowed[:among].tolist() if token not in compiler.eos_ids]
            if not drawn:
                break
            tokens = forced or [draw.choice(drawn)]
            count = matcher.try_accept(tokens)
            matcher.rollback(count)
            if not count or matcher.try_accept(tokens) != count or time.monotonic() > until:
                break
        if matcher.panicked:
            raise RequestError(f"the grammar cannot be used: {matcher.error}", param="grammar")


def _tried(compiler: Any, ask: Try) -> Verdict:
    param = "grammar"
    try:
        parts = tuple((place, to_text(text)) for place, text in ask.parts)
        try_out(compiler, Grammar(ask.kind, to_text(ask.text), (), ask.whitespace, parts))  # type: ignore[arg-type]
        return Verdict()
    except RequestError as e:
        message = e.message.encode("utf-8", "backslashreplace").decode()
        return Verdict(e.status, message, e.param, e.code)
    except MemoryError:
        return Verdict(400, "the grammar takes too much memory", param, last=True)
    except Exception as e:
        what = f"internal_error: {type(e).__name__} while compiling the grammar"
        return Verdict(500, what, param, "internal_error")
    except BaseException as e:  # a panic of the library is no Exception
        return Verdict(400, f"the grammar cannot be used: the library gave up ({type(e).__name__})", param, last=True)


def _data_bytes() -> int:
    """Private writable memory of this process: what RLIMIT_DATA counts. 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _work(hello: Hello, compiler: Any, channel: socket.socket) -> None:
    """Try grammars until the caller is gone, or one took too much."""
    threading.stack_size(STACK_BYTES)
    began = _data_bytes()
    if began:
        resource.setrlimit(resource.RLIMIT_DATA, (began + hello.memory_bytes,) * 2)
    send(channel, Verdict(pid=os.getpid()))
    while (ask := receive(channel, Try)) is not None:
        # The system's default ends the process even within the library, should the caller be gone.
        signal.alarm(math.ceil(hello.seconds) + 5)
        found: list[Verdict] = []
        thread = threading.Thread(target=lambda ask=ask, found=found: found.append(_tried(compiler, ask)))
        thread.start()
        thread.join()
        signal.alarm(0)
        verdict = found[0] if found else Verdict(400, "the grammar takes too much memory", "grammar", last=True)
        verdict.last = verdict.last or _data_bytes() > began + hello.memory_bytes * KEPT_SHARE
        send(channel, verdict)
        if verdict.last:
            return


class Host:
    """The loop of the host. ``compiler``: what the processes share, or the reason why there is none."""

    def __init__(self, hello: Hello, control: socket.socket, compiler: Any) -> None:
        self._hello, self._control, self._compiler = hello, control, compiler
        self._channels: dict[int, socket.socket] = {}  # the processes' ends of their sockets, by pid
        self._wakes, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)

    def run(self) -> None:
        """Fork what the caller asks for, until it is gone."""
        try:
            while self._turn():
                pass
        finally:
            for pid in self._channels:
                os.kill(pid, signal.SIGKILL)

    def _turn(self) -> bool:
        poll = select.poll()
        for file in (self._control.fileno(), self._wakes):
            poll.register(file, select.POLLIN)
        by_file = {channel.fileno(): pid for pid, channel in self._channels.items()}
        for file in by_file:
            poll.register(file, 0)  # tells when the caller closed its end
        ready = dict(poll.poll())
        for file, pid in by_file.items():
            if file in ready:
                os.kill(pid, signal.SIGKILL)
        self._reap()
        if self._control.fileno() not in ready:
            return True
        data, files, _, _ = socket.recv_fds(self._control, 1, 1)
        for file in files:
            self._fork(socket.socket(fileno=file))
        return bool(data)

    def _fork(self, channel: socket.socket) -> None:
        if isinstance(self._compiler, Verdict):
            with contextlib.suppress(OSError), channel:
                send(channel, self._compiler)
            return
        try:
            pid = os.fork()
        except OSError:  # too many processes, or too little memory: an end that is no grammar's fault
            return self._tell(channel, -signal.SIGKILL)
        if pid:
            self._channels[pid] = channel
            return
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            for other in self._channels.values():
                other.close()
            with contextlib.suppress(Closed, OSError):
                _work(self._hello, self._compiler, channel)
            code = 0
        finally:
            os._exit(code)

    def _reap(self) -> None:
        """Tell the callers of processes that have ended. One that ended in order has nobody who listens."""
        with contextlib.suppress(BlockingIOError):
            os.set_blocking(self._wakes, False)
            os.read(self._wakes, 4096)
        for pid in list(self._channels):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self._tell(self._channels.pop(pid), os.waitstatus_to_exitcode(status))

    def _tell(self, channel: socket.socket, code: int) -> None:
        with contextlib.suppress(OSError), channel:
            channel.setblocking(False)
            send(channel, Verdict(ended=code))


def main() -> None:
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        hello = receive(control, Hello)
    except Closed:
        return
    sys.path[:] = hello.path
    module, _, name = hello.compiler.partition(":")
    try:
        make = getattr(importlib.import_module(module), name)
        compiler = make(Path(hello.tokenizer_file), hello.vocab_size, hello.eos_ids)
    except ConfigError as e:
        compiler = Verdict(400, str(e))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # What the library prints about its own end may hold a client's text.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    gc.collect()
    gc.freeze()  # a collection would write to, and so copy, every page with objects
    Host(hello, control, compiler).run()


if __name__ == "__main__":
    main()
