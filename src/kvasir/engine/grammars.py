"""Compiles grammars in threads of their own, so that a large schema delays no step, and tries each one in another
process first (``decoding/grammar_process.py``), so that one that crashes or runs away hurts its own request only."""

from __future__ import annotations

import hashlib
import signal
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

from kvasir.decoding.grammar_process import COMPILER, MEMORY_BYTES, Ended, GrammarHost, GrammarProcess
from kvasir.errors import ConfigError, Failure, RequestError
from kvasir.fair_threads import FairThreads
from kvasir.logs import log
from kvasir.types import Grammar, Request

# Grammars that compile at a time, each in a process that is started when it is needed.
NUM_TURNS = 3
PATIENCE_SECONDS = 30.0  # longest wait for a turn
MAX_KNOWN = 512  # results that are remembered
HOST_SECONDS = 0.2  # longest wait for the end of a host whose process was killed
WAIT_SECONDS = 0.005  # the longest sleep of a step loop that has nothing to do but wait for a grammar


class Grammars:
    """Compiles the grammars of requests, after processes of their own have tried them: fair by key, and bounded.

    ``seconds``: most that a grammar may take; its wait for a turn does not count. ``tokenizer_file`` None: the engine
    has no tokenizer, and every grammar fails. ``compiler``: the class that the processes use.
    """

    def __init__(
        self,
        tokenizer_file: Path | None,
        vocab_size: int,
        eos_ids: tuple[int, ...],
        seconds: float,
        compiler: str = COMPILER,
    ) -> None:
        self._tokenizer_file = tokenizer_file
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._seconds, self._tried_by = seconds, compiler
        self._compiler: Any = None  # built for the first grammar: most processes never need the library
        self._building, self._starting = threading.Lock(), threading.Lock()
        self._lock = threading.Lock()  # guards everything below
        self._host: GrammarHost | None = None  # started for the first grammar
        self._idle: list[GrammarProcess] = []
        self._busy: set[GrammarProcess] = set()
        self._known: OrderedDict[bytes, RequestError | None] = OrderedDict()  # why grammars are refused, or None
        self._closed = False
        self._threads = FairThreads(NUM_TURNS, "grammar")

    def compile(self, request: Request) -> Future:
        """Put the grammar of ``request`` into the queue of its key. The result is a matcher; every branch needs a copy
        of it. ``cancel`` succeeds only while the grammar waits for its turn."""
        key = request.tenant.partition(":")[0]
        return self._threads.submit(key, partial(self._compile, request.params.grammar))

    def _compile(self, grammar: Grammar) -> Any:
        if self._tokenizer_file is None:
            raise RequestError(
                "structured output needs the model's tokenizer; this engine runs without one", param="grammar"
            )
        self._try(grammar)
        with self._building:
            if self._compiler is None:
                from kvasir.decoding.grammar import GrammarCompiler

                self._compiler = GrammarCompiler(self._tokenizer_file, self._vocab_size, self._eos_ids)
        return self._compiler.compile(grammar)

    def _try(self, grammar: Grammar) -> None:
        """Try ``grammar`` in a process, unless the same text was tried not long ago. Raises RequestError."""
        text = repr((grammar.kind, grammar.text, grammar.whitespace, grammar.parts))
        name = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32).digest()
        with self._lock:
            known, refusal = name in self._known, self._known.get(name)
            if known:
                self._known.move_to_end(name)
        if not known:
            try:
                self._try_out(grammar)
            except RequestError as e:
                if e.status != 400 or e.code == "grammar_timeout":  # may pass another time
                    raise
                refusal = e
            with self._lock:
                self._known[name] = refusal
                while len(self._known) > MAX_KNOWN:
                    self._known.popitem(last=False)
        if refusal is not None:
            raise RequestError(refusal.message, status=refusal.status, param=refusal.param, code=refusal.code)

    def _try_out(self, grammar: Grammar) -> None:
        for attempt in range(2):
            process = self._take()
            try:
                return process.try_out(grammar)
            except Ended as e:
                log.warning("the process that tries grammars was ended (%s) and is replaced", e)
                # Somebody ended it from outside, or the system that ran out of memory: not yet the grammar's fault.
                outside = e.signal in (signal.SIGKILL, signal.SIGTERM)
                if outside and not attempt:  # the host may end in a moment, too: then the next one is of another host
                    self._host.ends_within(HOST_SECONDS)
                elif outside:
                    raise RequestError(
                        "the process that tries grammars was ended from outside",
                        status=503,
                        param="grammar",
                        code="grammars_unavailable",
                    ) from e
                if not outside:
                    raise RequestError(
                        f"the grammar cannot be used: compiling it crashes ({e}) or takes more than "
                        f"{MEMORY_BYTES >> 20} MiB",
                        param="grammar",
                    ) from e
            finally:
                self._give_back(process)

    def _take(self) -> GrammarProcess:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.alive:
                    self._busy.add(process)
                    return process
        process = self._open()
        with self._lock:
            self._busy.add(process)
            closed = self._closed
        if closed:
            process.close()
        return process

    def _open(self) -> GrammarProcess:
        """Another process, of the host that runs or of a new one."""
        with self._starting:
            if self._host is None or not self._host.alive:
                self._host = GrammarHost(
                    self._tokenizer_file, self._vocab_size, self._eos_ids, self._seconds, self._tried_by
                )
            return self._host.open()

    def _give_back(self, process: GrammarProcess) -> None:
        with self._lock:
            self._busy.discard(process)
            keep = process.alive and not self._closed
            if keep:
                self._idle.append(process)
        if not keep:
            process.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            processes = [*self._idle, *self._busy]
        self._threads.close()
        for process in processes:
            process.close()
        with self._starting:
            if self._host is not None:
                self._host.close()


def failure(request_id: str, error: BaseException) -> Failure:
    """Describe an error of the compiling thread. Even a bug of the library fails one request only."""
    if isinstance(error, RequestError):
        return error.failure("invalid_grammar")
    if isinstance(error, ConfigError):  # the library cannot read the tokenizer: the server's fault, met by this request
        return Failure(status=400, code="no_grammars", message=str(error), param="grammar")
    log.error("the grammar of request %s cannot be compiled", request_id, exc_info=error)
    message = f"internal_error: {type(error).__name__} while compiling the grammar"
    return Failure(status=500, code="internal_error", message=message, param="grammar")


def waited() -> Failure:
    """Describe a grammar that waited too long for its turn."""
    message = f"the grammar waited {PATIENCE_SECONDS:g} s for others to compile; try again later"
    return Failure(status=503, code="grammars_busy", message=message, param="grammar")


def wait_for_one(pending: Iterable[Future]) -> None:
    """Sleep until a grammar is ready, a moment at most."""
    if pending := list(pending):
        wait(pending, timeout=WAIT_SECONDS, return_when="FIRST_COMPLETED")
