"""Compiles grammars in threads of their own, so that a large schema delays no step."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypedDict

from kvasir.errors import ConfigError, RequestError
from kvasir.logs import log
from kvasir.types import Request

NUM_THREADS = 2
WAIT_SECONDS = 0.005  # the longest sleep of a step loop that has nothing to do but wait for a grammar


class Failure(TypedDict):
    """Why a request fails, as the fields of its error event."""

    status: int
    code: str
    message: str
    param: str | None


class Grammars:
    """Compiles the grammars of requests. ``tokenizer_file`` None: the engine has no tokenizer, and every grammar
    fails."""

    def __init__(self, tokenizer_file: Path | None, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._tokenizer_file = tokenizer_file
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._compiler: Any = None  # built for the first grammar: most processes never need the library
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")

    def compile(self, request: Request) -> Future:
        """Start to compile the grammar of ``request``. The result is a matcher; every branch needs a copy of it."""
        return self._threads.submit(self._compile, request)

    def _compile(self, request: Request) -> Any:
        if self._compiler is None:
            from kvasir.decoding.grammar import GrammarCompiler

            if self._tokenizer_file is None:
                raise RequestError(
                    "structured output needs the model's tokenizer; this engine runs without one", param="grammar"
                )
            self._compiler = GrammarCompiler(self._tokenizer_file, self._vocab_size, self._eos_ids)
        return self._compiler.compile(request.params.grammar)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def failure(request_id: str, error: BaseException) -> Failure:
    """Describe an error of the compiling thread. Even a bug of the library fails one request only."""
    if isinstance(error, RequestError):
        code = error.code or "invalid_grammar"
        return Failure(status=error.status, code=code, message=error.message, param=error.param)
    if isinstance(error, ConfigError):  # the library cannot read the tokenizer: the server's fault, met by this request
        return Failure(status=400, code="no_grammars", message=str(error), param="grammar")
    log.error("the grammar of request %s cannot be compiled", request_id, exc_info=error)
    message = f"internal_error: {type(error).__name__} while compiling the grammar"
    return Failure(status=500, code="internal_error", message=message, param="grammar")


def timeout(seconds: float) -> Failure:
    """Describe a grammar that took too long."""
    message = f"the grammar did not compile within {seconds:g} s"
    return Failure(status=400, code="grammar_timeout", message=message, param="grammar")


def wait_for_one(pending: Iterable[Future]) -> None:
    """Sleep until a grammar is ready, a moment at most."""
    if pending := list(pending):
        wait(pending, timeout=WAIT_SECONDS, return_when="FIRST_COMPLETED")
