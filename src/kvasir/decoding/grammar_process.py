"""A process that tries clients' grammars: ``python -m kvasir.decoding.grammar_process``.

The grammar library is native code: some inputs end its process, others take minutes or gigabytes. So a grammar is first
compiled and walked here, with limits on time and memory, and the process that steps the engine compiles only what came
through. ``GrammarProcess`` is the caller's side. The rest runs in the child, which ends with its caller.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
import os
import random
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from kvasir.errors import ConfigError, RequestError
from kvasir.types import Grammar

COMPILER = "kvasir.decoding.grammar:GrammarCompiler"
# Most memory that one grammar may take, in bytes. The most that a test of the limits on sizes takes is 40 MB.
MEMORY_BYTES = 256 << 20
# Longest start of the process in seconds: its imports and the tokenizer.
START_SECONDS = 60.0
# A process that kept this much memory of the grammars it tried ends, and the next grammar starts another.
KEPT_BYTES = MEMORY_BYTES // 4
# Stack of the thread that tries a grammar. The engine fills masks in threads with stacks of 2 MiB, so recursion that is
# too deep for those ends this process first.
STACK_BYTES = 1 << 20
# How far a compiled grammar is tried: most tokens a walk, and seconds for all walks.
WALK_TOKENS, WALK_SECONDS = 32, 0.03


class Hello(msgspec.Struct):
    """The settings of the process. ``seconds``: when it ends by itself in a grammar that its caller does not end."""

    tokenizer_file: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    seconds: float
    memory_bytes: int
    path: list[str]


class Try(msgspec.Struct):
    """A grammar to try. Its text is UTF-8 in which lone surrogates pass: the compiler refuses them."""

    kind: str
    text: bytes
    whitespace: str
    parts: tuple[tuple[str, bytes], ...]


class Verdict(msgspec.Struct):
    """The answer to ``Hello`` and ``Try``. ``status`` 0: all is well, else the fields of a RequestError. ``last``: the
    process ends."""

    status: int = 0
    message: str = ""
    param: str | None = None
    code: str | None = None
    last: bool = False


class Ended(Exception):
    """The process ended while it tried a grammar. ``signal``: what ended it, or 0."""

    def __init__(self, code: int) -> None:
        self.signal = max(-code, 0)
        name = signal.Signals(self.signal).name if self.signal else f"status {code}"
        super().__init__(name)


class GrammarProcess:
    """A running process. The constructor starts it and does not wait. One thread at a time may use it.

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
        self._seconds, self._ready = seconds, False
        command = [sys.executable, "-P", "-m", "kvasir.decoding.grammar_process", "--compiler", compiler]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        self._end = weakref.finalize(self, _end, self._process)
        self._started = time.monotonic()
        hello = Hello(str(tokenizer_file), vocab_size, tuple(eos_ids), seconds, memory_bytes, sys.path)
        self._send(hello)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._end.alive and self._process.poll() is None

    def try_out(self, grammar: Grammar) -> None:
        """Compile ``grammar`` and walk some of it, over there.

        Raises RequestError when it cannot be used or takes too long, ConfigError when the tokenizer cannot be read, and
        Ended when the process ended by itself."""
        if not self._ready:
            verdict = self._receive(self._started + START_SECONDS)
            if verdict is None:
                self.close()
                raise RequestError(
                    f"the process that tries grammars did not start within {START_SECONDS:g} s",
                    status=503,
                    param="grammar",
                    code="grammars_unavailable",
                )
            if verdict.status:
                raise ConfigError(verdict.message)
            self._ready = True
        parts = tuple((place, _bytes(text)) for place, text in grammar.parts)
        self._send(Try(grammar.kind, _bytes(grammar.text), grammar.whitespace, parts))
        verdict = self._receive(time.monotonic() + self._seconds)
        if verdict is None:
            self.close()
            message = f"the grammar did not compile within {self._seconds:g} s"
            raise RequestError(message, param="grammar", code="grammar_timeout")
        if verdict.last:
            self.close()
        if verdict.status:
            raise RequestError(verdict.message, status=verdict.status, param=verdict.param, code=verdict.code)

    def _send(self, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # the process is dead; who reads its answer finds out
            _write(self._process.stdin, message)

    def _receive(self, until: float) -> Verdict | None:
        """The next answer, or None when it did not come in time. Raises Ended."""
        stream, found, size = self._process.stdout, bytearray(), 4
        poll = select.poll()
        poll.register(stream, select.POLLIN)
        while True:
            if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                return None
            data = stream.read(size - len(found))
            if not data:
                code = self._process.wait()
                self.close()
                raise Ended(code)
            found += data
            if len(found) == 4 and size == 4:
                size += struct.unpack("<I", found)[0]
            if len(found) == size:
                return msgspec.msgpack.decode(memoryview(found)[4:], type=Verdict)

    def close(self) -> None:
        """End the process, whatever it does."""
        self._end()


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _write(stream: BinaryIO, message: Any) -> None:
    body = memoryview(msgspec.msgpack.encode(message))
    frame = memoryview(struct.pack("<I", len(body)) + body)
    while frame:
        frame = frame[stream.write(frame) :]


# ------------------------------------------------------------------------------------------------------- in the process


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


def _verdict(compiler: Any, ask: Try, found: list[Verdict]) -> None:
    found.append(_tried(compiler, ask))


def _tried(compiler: Any, ask: Try) -> Verdict:
    param = "grammar"
    try:
        parts = tuple((place, _text(text)) for place, text in ask.parts)
        try_out(compiler, Grammar(ask.kind, _text(ask.text), (), ask.whitespace, parts))  # type: ignore[arg-type]
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


def _serve(compiler_name: str, requests: BinaryIO, replies: BinaryIO) -> None:
    hello = _read(requests, Hello)
    if hello is None:
        return
    sys.path[:] = hello.path
    module, _, name = compiler_name.partition(":")
    try:
        make = getattr(importlib.import_module(module), name)
        compiler = make(Path(hello.tokenizer_file), hello.vocab_size, hello.eos_ids)
    except ConfigError as e:
        return _write(replies, Verdict(400, str(e)))
    threading.stack_size(STACK_BYTES)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    began = _data_bytes()
    if began:
        resource.setrlimit(resource.RLIMIT_DATA, (began + hello.memory_bytes,) * 2)
    # What the library prints about its own end may hold a client's text.
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 2)
    _write(replies, Verdict())
    while (ask := _read(requests, Try)) is not None:
        # The system's default ends the process even within the library, should the caller be gone.
        signal.alarm(math.ceil(hello.seconds) + 5)
        found: list[Verdict] = []
        thread = threading.Thread(target=_verdict, args=(compiler, ask, found))
        thread.start()
        thread.join()
        signal.alarm(0)
        verdict = found[0] if found else Verdict(400, "the grammar takes too much memory", "grammar", last=True)
        verdict.last = verdict.last or _data_bytes() > began + KEPT_BYTES
        _write(replies, verdict)
        if verdict.last:
            return


def _read(stream: BinaryIO, kind: type) -> Any | None:
    """The next message, or None when the caller is gone."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    return msgspec.msgpack.decode(stream.read(struct.unpack("<I", head)[0]), type=kind)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compiler", default=COMPILER)
    options = parser.parse_args()
    # Whatever is printed goes to the log, not between the answers.
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    _serve(options.compiler, os.fdopen(0, "rb"), replies)


if __name__ == "__main__":
    main()
