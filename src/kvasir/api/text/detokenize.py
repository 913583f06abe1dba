"""Streaming text of one branch: whole characters only, with stop strings found across the borders of tokens.

Text that could be the beginning of a stop string is held back until it is clear whether it is one. The joined texts of
all deltas do not depend on how the tokens were grouped.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from kvasir.models.tokenizer import Tokenizer
from kvasir.types import SamplingParams


@dataclass(slots=True)
class TextDelta:
    """The text that one push added.

    ``stop``: the stop string that ended the text. ``num_tokens``: number of pushed tokens that belong to the output, up
    to and including the one that completed the stop string. ``offsets``: for each of these, the number of characters of
    the output before its own text (``text_offset`` of completions). ``ends``: for each, the length of ``text`` once it
    was taken.
    """

    text: str = ""
    stop: str | None = None
    num_tokens: int = 0
    offsets: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


class Detokenizer:
    """The text of one branch.

    ``prompt_ids``: the prompt that the text continues, so that a space or half a character at the border comes out
    right; leave it empty for an answer that is a text of its own (chat). ``keep_ids``: special ids to show although
    special tokens are skipped, because a parser looks for their marks.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams, keep_ids: Collection[int] = ()
    ) -> None:
        skip = tokenizer.special_ids.difference(keep_ids) if params.skip_special_tokens else ()
        self._stream = tokenizer.stream(prompt_ids, skip) if params.detokenize else None
        self._stops = params.stop
        self._include = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._held = ""  # decoded but held back: it may be the beginning of a stop string
        self._num_chars = 0  # characters decoded in all, held text included
        self._num_tokens = 0
        self._ended = False

    def push(self, token_ids: Sequence[int], finished: bool = False, stopped: bool = False) -> TextDelta:
        """Take tokens; return the text they add. After a stop string was found, further tokens add nothing.

        ``finished``: the branch has ended, so nothing is held back. ``stopped``: the last token ended it, and shows
        only if stop strings are included. The engine says which tokens end a branch, because a checkpoint may name more
        of them than its tokenizer does.
        """
        delta = TextDelta()
        if self._ended:
            return delta
        if self._stream is None:
            return TextDelta(num_tokens=len(token_ids), offsets=[0] * len(token_ids), ends=[0] * len(token_ids))
        for place, token in enumerate(token_ids):
            hidden = stopped and not self._include and place == len(token_ids) - 1
            delta.num_tokens += 1
            delta.offsets.append(self._num_chars)
            self._num_tokens += 1
            found = self._add("" if hidden else self._stream.push(token), delta)
            delta.ends.append(len(delta.text))
            if found:
                return delta
        if finished:
            if not self._add(self._stream.flush(), delta):
                delta.text += self._held
            self._held, self._ended = "", True
            delta.ends[-1:] = [len(delta.text)] * bool(delta.ends)
        return delta

    def _add(self, text: str, delta: TextDelta) -> bool:
        """Take decoded text; return True when it completed a stop string."""
        self._num_chars += len(text)
        if not self._stops or self._num_tokens < self._min_tokens:
            delta.text += text
            return False
        self._held += text
        found = [(at, len(stop), stop) for stop in self._stops if text and (at := self._held.find(stop)) >= 0]
        if found:
            at, length, delta.stop = min(found)
            delta.text += self._held[: at + length * self._include]
            self._held, self._ended = "", True
            return True
        keep = self._possible_stop()
        delta.text += self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return False

    def _possible_stop(self) -> int:
        """Length of the longest suffix of the held text that begins a stop string."""
        longest = max(len(stop) for stop in self._stops) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
