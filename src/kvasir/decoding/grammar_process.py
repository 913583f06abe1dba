"""Processes that try clients' grammars, as their caller sees them. ``grammar_worker`` is the other side.

The grammar library is native code: some inputs end its process, others take minutes or gigabytes. So a grammar is first
compiled and walked in a process apart, with limits on time and memory, and the process that steps the engine compiles
only what came through.

A tokenizer of 150,000 tokens takes seconds to read and more than 100 MB. One process (``GrammarHost``) reads it and
forks those that try grammars, which share its memory and start in milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

from kvasir.decoding.grammar_messages import Closed, Hello, Try, Verdict, receive, send, to_bytes
from kvasir.errors import ConfigError, RequestError
from kvasir.types import Grammar

COMPILER = "kvasir.decoding.grammar:GrammarCompiler"
# Most memory that one grammar may take, in bytes. The most that a test of the limits on sizes takes is 40 MB.
MEMORY_BYTES = 256 << 20
# Longest start in seconds: the host's imports and the tokenizer.
START_SECONDS = 60.0
# A fork copies one thread only, so the host must have no other: libraries start none.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}


class Ended(Exception):
    """The process ended while it tried a grammar. ``signal``: what ended it, or 0."""

    def __init__(self, code: int) -> None:
        self.signal = max(-code, 0)
        name = signal.Signals(self.signal).name if self.signal else f"status {code}"
        super().__init__(name)


class GrammarHost:
    """The process that holds the tokenizer. The constructor starts it and does not wait.

    ``seconds`` and ``memory_bytes``: most time and memory for one grammar. ``compiler``: module and name of the class
    that compiles. Raises OSError when no process can be started.
    """

    def __init__(
        self,
        tokenizer_file: Path,
        vocab_size: int,
        eos_ids: Sequence[int],
        seconds: float,
        compiler: str = COMPILER,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        self._seconds, self._started = seconds, time.monotonic()
        self._control, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "kvasir.decoding.grammar_worker"]
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                env={**os.environ, **ONE_THREAD},
                start_new_session=True,
            )
        self._end = weakref.finalize(self, _end, self._process, self._control)
        with contextlib.suppress(OSError):  # it is dead already; who reads an answer finds out
            eos = tuple(eos_ids)
            send(self._control, Hello(compiler, str(tokenizer_file), vocab_size, eos, seconds, memory_bytes, sys.path))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._end.alive and self._process.poll() is None

    def ends_within(self, seconds: float) -> bool:
        """Wait for the end of a host that may have been killed with what it forked."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def open(self) -> GrammarProcess:
        """Have a process forked. Does not wait."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(OSError):  # the host is dead; who reads an answer finds out
            socket.send_fds(self._control, [b"+"], [theirs.fileno()])
        return GrammarProcess(ours, self._seconds, max(self._started, time.monotonic()) + START_SECONDS)

    def close(self) -> None:
        """End the host and all that it forked, whatever they do."""
        self._end()


def _end(process: subprocess.Popen, control: socket.socket) -> None:
    control.close()
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class GrammarProcess:
    """A process that tries grammars, one at a time. One thread at a time may use it."""

    def __init__(self, channel: socket.socket, seconds: float, start_until: float) -> None:
        self._channel, self._seconds, self._until = channel, seconds, start_until
        self._closed = False
        self.pid = 0  # until it is ready

    @property
    def alive(self) -> bool:
        """Whether it can be used: it says nothing unasked, but that it ended."""
        return not self._closed and not select.select([self._channel], [], [], 0)[0]

    def try_out(self, grammar: Grammar) -> None:
        """Compile ``grammar`` and walk some of it, over there.

        Raises RequestError when it cannot be used or takes too long, ConfigError when the tokenizer cannot be read, and
        Ended when the process ended by itself."""
        if not self.pid:
            verdict = self._receive(self._until)
            if verdict is None:
                self.close()
                raise RequestError(
                    f"the process that tries grammars did not start within {START_SECONDS:g} s",
                    status=503,
                    param="grammar",
                    code="grammars_unavailable",
                )
            if verdict.status:
                self.close()
                raise ConfigError(verdict.message)
            self.pid = verdict.pid
        parts = tuple((place, to_bytes(text)) for place, text in grammar.parts)
        with contextlib.suppress(OSError):  # it is dead; the answer says so
            send(self._channel, Try(grammar.kind, to_bytes(grammar.text), grammar.whitespace, parts))
        verdict = self._receive(time.monotonic() + self._seconds)
        if verdict is None:
            self.close()
            message = f"the grammar did not compile within {self._seconds:g} s"
            raise RequestError(message, param="grammar", code="grammar_timeout")
        if verdict.last:
            self.close()
        if verdict.status:
            raise RequestError(verdict.message, status=verdict.status, param=verdict.param, code=verdict.code)

    def _receive(self, until: float) -> Verdict | None:
        """The next answer, or None when it did not come in time. Raises Ended."""
        try:
            verdict = receive(self._channel, Verdict, until)
        except Closed as e:  # its host is gone, too, which grammars do not reach
            self.close()
            raise Ended(-signal.SIGKILL) from e
        if verdict is not None and verdict.ended is not None:
            self.close()
            raise Ended(verdict.ended)
        return verdict

    def close(self) -> None:
        """Have the process ended, whatever it does."""
        self._closed = True
        self._channel.close()
