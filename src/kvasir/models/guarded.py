"""The ``tokenizers`` library with its panics and errors as errors of one request, and a try of its expressions.

The library gives up (a panic, which is no Exception) when an expression of tokenizer.json takes too many steps back.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

from kvasir.errors import ConfigError, RequestError, is_bug

# Lengths of the runs that expressions are tried on, and seconds of CPU time for one: usual ones take a millisecond.
RUNS, RUN_SECONDS = (16, 64, 256, 1024), 0.5
# Most characters of expressions that are tried, besides the usual ones.
MAX_TRIED = 64
USUAL = "a 1!é中\n"


class Guarded:
    """A tokenizer of the library. What it cannot do is a RequestError that names tokenizer.json."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def encode(self, text: str, add_special_tokens: bool = True) -> Encoding:
        """The encoding of a text. Raises RequestError, also for a lone surrogate.

        A batch of one, because the library lets other threads run only while it encodes a batch: a million characters
        take about a second."""
        try:
            return self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        except (UnicodeEncodeError, TypeError) as e:
            raise RequestError(
                "the text holds a lone surrogate, which is not valid Unicode", param="prompt", code="invalid_unicode"
            ) from e
        except BaseException as e:
            raise _refusal(e, "encode this text", 400) from e

    def post_process(self, encoding: Encoding, pair: Encoding | None, add_special_tokens: bool) -> Encoding:
        """The encoding of a text, or a pair of texts, with what the tokenizer puts around it. Raises RequestError."""
        try:
            return self._backend.post_process(encoding, pair, add_special_tokens)
        except BaseException as e:
            raise _refusal(e, "encode this text", 400) from e

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids. Raises RequestError."""
        try:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except BaseException as e:
            raise _refusal(e, "decode this answer", 500) from e


def _refusal(error: BaseException, what: str, status: int) -> BaseException:
    """The error of a request for one of the library, and any other error itself."""
    if not is_bug(error):
        return error
    return RequestError(
        f"tokenizer.json cannot {what}: {str(error)[:300]}",
        status=status,
        param="prompt" if status == 400 else None,
        code="tokenizer_error",
    )


def try_expressions(file: Path, backend: Backend, expressions: Sequence[str]) -> None:
    """Let the steps of a tokenizer read runs of the characters that its expressions name. Raises ConfigError, which
    names the file, where the library gives up or a short run takes long."""
    if not expressions:
        return
    steps: dict[str, Callable[[str], Any]] = {}
    if backend.normalizer is not None:
        steps["normalizer"] = backend.normalizer.normalize_str
    if backend.pre_tokenizer is not None:
        steps["pre_tokenizer"] = backend.pre_tokenizer.pre_tokenize_str
    if backend.decoder is not None:
        decoder = backend.decoder
        steps["decoder"] = lambda text: decoder.decode([text])
    named = "".join(expressions)
    words = re.findall(r"\w+", named)
    for unit in dict.fromkeys([*USUAL, *dict.fromkeys(named), *words][:MAX_TRIED]):
        for length in RUNS:
            text = unit * (length // len(unit)) + "\x01"
            for field, step in steps.items():
                began = time.thread_time()
                try:
                    step(text)
                except BaseException as e:
                    if not is_bug(e):
                        raise
                    raise ConfigError(f"{file}: {field} gives up on {length} characters {unit[:20]!r}: {e}") from e
                if time.thread_time() - began > RUN_SECONDS:
                    raise ConfigError(f"{file}: {field} takes more than {RUN_SECONDS:g} s for {length} characters")
