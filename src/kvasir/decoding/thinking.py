"""Follow an answer's thinking by its tokens, and find the tokens of words. Shared by logit processors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from kvasir.decoding.processor import Encode
from kvasir.errors import ConfigError
from kvasir.types import Thinking

# Largest bias in logits, as in OpenAI's logit_bias: more would rule out everything else, or overflow.
MAX_BIAS = 100.0


class Thought(NamedTuple):
    """The place of an answer in its thinking. ``length``: tokens of thinking, those of an unfinished end mark included.
    ``opening``, ``closing``: tokens of the start mark and of the end mark that the last tokens are."""

    phase: Literal["before", "inside", "after"]
    length: int = 0
    opening: int = 0
    closing: int = 0


def begin(thinking: Thinking | None) -> Thought:
    """The thought before the first output token. Without marks it is "inside" for ever."""
    return Thought("inside" if thinking is None else thinking.prompt_ends)


def follow(thinking: Thinking | None, thought: Thought, tokens: Iterable[int]) -> Thought:
    """The thought after ``tokens``."""
    for token in tokens:
        if thinking is None or thought.phase == "after":
            return thought
        closing = _progress(thinking.end, thought.closing, token)
        if closing == len(thinking.end):
            thought = Thought("after", thought.length + 1 - closing)
        elif thought.phase == "inside":
            thought = Thought("inside", thought.length + 1, 0, closing)
        else:
            opening = _progress(thinking.start, thought.opening, token)
            opened = opening == len(thinking.start)
            thought = Thought("inside") if opened else Thought("before", 0, opening, closing)
    return thought


def _progress(mark: tuple[int, ...], done: int, token: int) -> int:
    """Number of tokens at the beginning of ``mark`` that the last ones are, after ``done`` of them and ``token``."""
    seen = (*mark[:done], token)
    return next(n for n in range(len(seen), -1, -1) if seen[len(seen) - n :] == mark[:n])


def ends_on(thinking: Thinking | None, thought: Thought) -> int:
    """The token that ends the thinking if it comes next; -1: none does."""
    if thinking is None or thought.phase == "after" or thought.closing + 1 < len(thinking.end):
        return -1
    return thinking.end[-1]


def check_bias(option: str, value: float) -> None:
    """Raise ConfigError for a bias that ``logit_bias`` would not take."""
    if not abs(value) <= MAX_BIAS:
        raise ConfigError(f"{option}={value:g} is out of range: -{MAX_BIAS:g} to {MAX_BIAS:g}")


def word_ids(encode: Encode, words: str, ids: str) -> tuple[int, ...]:
    """Token ids of ``words``, separated by |, each with and without a space before it. ``ids``, token ids separated by
    |, take their place if there are any.

    A word of several tokens has none here: its first token begins other words, too. Raises ConfigError for words
    without any token, and for ids that are none."""
    if ids:
        if not all(text.isascii() and text.isdecimal() for text in ids.split("|")):
            raise ConfigError(f"ids={ids!r}: expected token ids separated by |")
        return tuple(dict.fromkeys(map(int, ids.split("|"))))
    texts = [space + word.strip() for word in words.split("|") if word.strip() for space in ("", " ")]
    found = [encoded[0] for text in texts if len(encoded := encode(text)) == 1]
    if not found:
        raise ConfigError(f"words={words!r}: none of them is a single token of this model; name other words, or ids")
    return tuple(dict.fromkeys(found))
