"""The state of one output under a grammar. A thin layer over ``llguidance``.

This module handles the end of a sequence, not the library: EOS is allowed exactly in accepting states, and after EOS
nothing else is. No failure here raises or asserts in the step loop; ``Matcher.error`` says what happened to that one
request.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from typing import Any

import llguidance
import numpy as np

from kvasir.errors import is_panic

# Masks that are worth waking threads for, and the most threads: 64 masks take 2 ms on one, a third of a large step.
LEAST_FOR_THREADS, MAX_THREADS = 4, 8
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
        self.panicked = False

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self._eos_ids

    @property
    def constrained(self) -> bool:
        """False while the output is still free text before ``after``."""
        return not self._after or tuple(self._free[-len(self._after) :]) == self._after

    def is_stopped(self) -> bool:
        """Whether nothing but EOS can follow."""
        return bool(self.error) or self._ended > 0 or (self.constrained and self._ask(self._inner.is_stopped))

    def is_accepting(self) -> bool:
        """Whether the output so far satisfies the grammar."""
        return not self.error and self.constrained and bool(self._ask(self._inner.is_accepting))

    def _ask(self, ask: Callable[..., Any], *args: Any) -> Any:
        """Ask the library. A panic of its Rust code is no Exception, and must fail this matcher only: it sets
        ``error``, after which the library is not asked again, and gives None."""
        try:
            return ask(*args)
        except BaseException as e:
            if not is_panic(e):
                raise
            self.error, self.panicked = self.error or "the grammar library panicked", True
            return None

    def fill(self, mask: np.ndarray) -> bool:
        """Write the allowed next tokens into ``mask``, int32 [ceil(V / 32)]: bit i % 32 of word i // 32 stands for
        token i.

        Returns False, with ``error`` set and nothing allowed, when the library gave up."""
        assert mask.shape == (self._words,) and mask.dtype == np.int32 and mask.flags.c_contiguous
        if self._asks_library():
            self._ask(self._inner.unsafe_compute_mask_ptr, mask.ctypes.data, mask.nbytes)
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
            self._set_eos(mask, bool(self._ask(self._inner.is_accepting)))
        return True

    def forced(self) -> list[int]:
        """Return the tokens that must follow, one after the other: at each of them the mask has exactly that token.

        EOS is never among them. The library tokenises forced bytes as the tokenizer does and gives the first token as
        the only one of its mask, so that this is what the masks would force one by one."""
        if self.failed() or self._ended or not self.constrained:
            return []
        return self._ask(self._inner.compute_ff_tokens) or []

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
        elif self.is_stopped() or self._ask(self._inner.try_consume_tokens, [token]) != 1:
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
        if fed and not self.panicked and not self._ask(self._inner.rollback, fed):
            self.error = self.error or f"rollback failed: {self._inner.get_error()}"
        if free:
            del self._free[-free:]

    def copy(self) -> Matcher:
        """Return an independent matcher in the same state."""
        inner = None if self.panicked else self._ask(self._inner.deep_copy)
        twin = Matcher(self._inner if inner is None else inner, self._words * 32, self._eos_ids, self._after)
        twin._free, twin._fed, twin._ended, twin.error = list(self._free), self._fed, self._ended, self.error
        twin.panicked = self.panicked
        return twin

    def failed(self) -> bool:
        """Whether the library gave up for good; ``error`` then says why."""
        if not self.error and self._ask(self._inner.is_error):
            self.error = reason(self._inner.get_error()) or "the grammar engine gave up"
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
    try:
        threads.unsafe_compute_mask_ptr(asked, masks.ctypes.data, masks.strides[0], len(masks))
    except BaseException as e:
        if not is_panic(e):
            raise
        return [matcher.fill(mask) for matcher, mask in zip(matchers, masks)]  # finds out whose it was
    return [matcher._complete(mask) for matcher, mask in zip(matchers, masks)]


@functools.cache
def _threads() -> llguidance.LLExecutor | None:
    """The library's threads, at most half of the cores; None: a core or two are left alone."""
    count = min(MAX_THREADS, (os.cpu_count() or 1) // 2)
    return llguidance.LLExecutor(count) if count > 1 else None


def reason(text: str) -> str:
    """Return the library's reason in one line. For a regex it repeats the pattern first, and gives the reason in a
    later line."""
    text = text.partition("; following special tokens are available")[0]
    lines = text.strip().splitlines() or [""]
    if lines[0] == "NoExtensionBias":  # the library's name for a start without a next byte
        return "it allows no output at all"
    reason = next((line.removeprefix("error: ") for line in reversed(lines) if line.startswith("error: ")), "")
    return f"{re.sub(_SHOWN_REGEX, '', lines[0])} {reason}" if reason else lines[0]
