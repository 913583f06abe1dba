"""Structured output: a grammar becomes a mask over the next token. A thin layer over ``llguidance``.

Compiling takes milliseconds, so there is no cache. It is bounded: sizes are checked before the library sees the text,
and the library's own fuel bounds the rest. ``GrammarCompiler.compile`` may run in a worker thread. A compiled
``Matcher`` is never advanced itself: every branch, and every return from preemption, takes a ``copy`` (microseconds)
and replays its output.

This module handles the end of a sequence, not the library: EOS is allowed exactly in accepting states, and after EOS
nothing else is. No failure here raises or asserts in the step loop; ``Matcher.error`` says what happened to that one
request.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Any

import llguidance
import numpy as np

from kvasir.decoding.grammar_source import library_source, schema_source
from kvasir.decoding.grammar_tokenizer import library_text
from kvasir.errors import ConfigError, RequestError
from kvasir.types import Grammar

MAX_TEXT_BYTES = 64 << 10
# Masks that are worth waking threads for, and the most threads: 64 masks take 2 ms on one, a third of a large step.
LEAST_FOR_THREADS, MAX_THREADS = 4, 8
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2000,
    "max_lexer_states": 200_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
_SHOWN_REGEX = r'invalid regex ".*" \(in regex\): '


class Matcher:
    """The state of one branch under one grammar. ``fill`` gives the next mask, ``accept`` advances, ``rollback``
    undoes.

    With ``after`` (ids that end the reasoning) the output is free until those ids were generated, except that it cannot
    end: a finished output always satisfies the grammar.
    """

    def __init__(
        self, inner: llguidance.LLMatcher, vocab_size: int, eos_ids: tuple[int, ...], after: tuple[int, ...] = ()
    ) -> None:
        self._inner = inner
        self._words = -(-vocab_size // 32)
        self._eos_ids = eos_ids
        self._after = after
        self._free: list[int] = []  # tokens of the free part, up to and including ``after``
        self._fed = 0  # tokens that the library has consumed
        self._ended = 0  # EOS tokens seen since the grammar was satisfied
        self.error = ""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self._eos_ids

    @property
    def constrained(self) -> bool:
        """False while the output is still free text before ``after``."""
        return not self._after or tuple(self._free[-len(self._after) :]) == self._after

    def is_stopped(self) -> bool:
        """Whether nothing but EOS can follow."""
        return bool(self.error) or self._ended > 0 or (self.constrained and self._inner.is_stopped())

    def is_accepting(self) -> bool:
        """Whether the output so far satisfies the grammar."""
        return not self.error and self.constrained and self._inner.is_accepting()

    def fill(self, mask: np.ndarray) -> bool:
        """Write the allowed next tokens into ``mask``, int32 [ceil(V / 32)]: bit i % 32 of word i // 32 stands for
        token i.

        Returns False, with ``error`` set and nothing allowed, when the library gave up."""
        assert mask.shape == (self._words,) and mask.dtype == np.int32 and mask.flags.c_contiguous
        if self._asks_library():
            self._inner.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return self._complete(mask)

    def _asks_library(self) -> bool:
        return not self.failed() and not self._ended and self.constrained

    def _complete(self, mask: np.ndarray) -> bool:
        """Turn the library's mask, if it was asked, into what ``fill`` writes."""
        if self.failed():
            mask[:] = 0
            return False
        if self._ended:
            mask[:] = 0
            self._set_eos(mask, True)
        elif not self.constrained:
            mask[:] = -1
            self._set_eos(mask, False)
        else:
            self._set_eos(mask, self._inner.is_accepting())
        return True

    def forced(self) -> list[int]:
        """Return the tokens that must follow, one after the other: at each of them the mask has exactly that token.

        EOS is never among them. The library tokenises forced bytes as the tokenizer does and gives the first token as
        the only one of its mask, so that this is what the masks would force one by one."""
        if self.failed() or self._ended or not self.constrained:
            return []
        return self._inner.compute_ff_tokens()

    def accept(self, tokens: list[int]) -> bool:
        """Advance by ``tokens``. False when one of them is not allowed; then only those before it count."""
        return self.try_accept(tokens) == len(tokens)

    def try_accept(self, tokens: list[int]) -> int:
        """Advance by the longest legal prefix of ``tokens`` and return its length. An illegal token changes nothing."""
        for i, token in enumerate(tokens):
            if not self._accept_one(token):
                return i
        return len(tokens)

    def _accept_one(self, token: int) -> bool:
        if self.failed():
            return False
        if token in self._eos_ids:
            if not (self._ended or self.is_accepting()):
                return False
            self._ended += 1
        elif self._ended:
            return False
        elif not self.constrained:
            self._free.append(token)
        elif self._inner.is_stopped() or self._inner.try_consume_tokens([token]) != 1:
            return False
        else:
            self._fed += 1
        return True

    def rollback(self, count: int) -> None:
        """Undo the last ``count`` accepted tokens."""
        assert 0 <= count <= self._ended + self._fed + len(self._free), "rollback past the beginning"
        ended = min(count, self._ended)
        fed = min(count - ended, self._fed)
        free = count - ended - fed
        self._ended -= ended
        self._fed -= fed
        if fed and not self._inner.rollback(fed):
            self.error = self.error or f"rollback failed: {self._inner.get_error()}"
        if free:
            del self._free[-free:]

    def copy(self) -> Matcher:
        """Return an independent matcher in the same state."""
        twin = Matcher(self._inner.deep_copy(), self._words * 32, self._eos_ids, self._after)
        twin._free, twin._fed, twin._ended, twin.error = list(self._free), self._fed, self._ended, self.error
        return twin

    def failed(self) -> bool:
        """Whether the library gave up for good; ``error`` then says why."""
        if not self.error and self._inner.is_error():
            self.error = _reason(self._inner.get_error()) or "the grammar engine gave up"
        return bool(self.error)

    def _set_eos(self, mask: np.ndarray, allowed: bool) -> None:
        words = mask.view(np.uint32)
        for token in self._eos_ids:
            bit = np.uint32(1 << (token % 32))
            words[token // 32] = words[token // 32] | bit if allowed else words[token // 32] & ~bit


def fill_all(matchers: list[Matcher], masks: np.ndarray) -> list[bool]:
    """Fill ``masks`` [matchers, ceil(V / 32)] int32 as ``Matcher.fill`` does, several at a time where there are
    threads. The matchers must differ."""
    threads = _threads() if len(matchers) >= LEAST_FOR_THREADS else None
    if threads is None:
        return [matcher.fill(mask) for matcher, mask in zip(matchers, masks)]
    assert masks.shape == (len(matchers), matchers[0]._words) and masks.dtype == np.int32 and masks.flags.c_contiguous
    asked = [(matcher._inner, i) for i, matcher in enumerate(matchers) if matcher._asks_library()]
    threads.unsafe_compute_mask_ptr(asked, masks.ctypes.data, masks.strides[0], len(masks))
    return [matcher._complete(mask) for matcher, mask in zip(matchers, masks)]


@functools.cache
def _threads() -> llguidance.LLExecutor | None:
    """The library's threads, at most half of the cores; None: a core or two are left alone."""
    count = min(MAX_THREADS, (os.cpu_count() or 1) // 2)
    return llguidance.LLExecutor(count) if count > 1 else None


class GrammarCompiler:
    """Compiles grammars for one tokenizer. ``vocab_size``: width of the logits; ``tokenizer_file``: tokenizer.json."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        """Raises ConfigError when the library cannot read the tokenizer."""
        self.vocab_size = vocab_size
        self.eos_ids = tuple(eos_ids)
        try:
            text, self._added = library_text(Path(tokenizer_file).read_text(encoding="utf-8"))
            self._tokenizer = llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_ids) or None)
        except (OSError, ValueError) as e:
            raise ConfigError(f"structured output cannot read the tokenizer {tokenizer_file}: {e}") from e

    def compile(self, grammar: Grammar) -> Matcher:
        """Return a matcher at the start of ``grammar``. Blocks for milliseconds.

        Raises RequestError (400) when the grammar is malformed, exceeds the limits above, uses something that the
        library does not support, or allows no output at all."""
        param = "grammar"  # the name in SamplingParams; a route knows by which of its names the client sent it
        if not self.eos_ids:
            raise RequestError("structured output needs a model with an end-of-sequence token", param=param)
        try:
            size = len(grammar.text.encode())
        except UnicodeEncodeError as e:
            raise RequestError("the grammar is not valid Unicode", param=param) from e
        if size > MAX_TEXT_BYTES:
            raise RequestError(f"the grammar is larger than {MAX_TEXT_BYTES} bytes", param=param)
        source = library_source(grammar, self._added, param)
        inner = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=llguidance.LLParserLimits(**_LIMITS))
        matcher = Matcher(inner, self.vocab_size, self.eos_ids)
        mask = np.zeros(-(-self.vocab_size // 32), np.int32)
        if not matcher.fill(mask):
            # Other kinds were translated: a place in the translation tells the user nothing.
            why = matcher.error if grammar.kind == "lark" else re.sub(r"^at \d+\(\d+\): ", "", matcher.error)
            raise RequestError(f"the grammar cannot be used: {why}", param=param)
        if not mask.any():
            raise RequestError("the grammar allows no output at all", param=param)
        return Matcher(inner, self.vocab_size, self.eos_ids, grammar.after)


def _reason(text: str) -> str:
    """Return the library's reason in one line. For a regex it repeats the pattern first, and gives the reason in a
    later line."""
    text = text.partition("; following special tokens are available")[0]
    lines = text.strip().splitlines() or [""]
    reason = next((line.removeprefix("error: ") for line in reversed(lines) if line.startswith("error: ")), "")
    return f"{re.sub(_SHOWN_REGEX, '', lines[0])} {reason}" if reason else lines[0]


def try_schema(schema: dict[str, Any], param: str) -> None:
    """Refuse a schema, checked before, that does not compile. Needs no tokenizer: a tenth of a millisecond for the
    schema of a function."""
    try:
        source = schema_source(schema, param)
        why = _reason(llguidance.LLMatcher.validate_grammar(source, limits=llguidance.LLParserLimits(**_LIMITS)))
    except ValueError as e:
        why = str(e)
    if why:
        raise RequestError(f"the schema cannot be used: {why}", param=param, code="invalid_grammar")
