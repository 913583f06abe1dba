"""Calls that are JSON objects: alone, in a list or in a code fence, behind a mark or without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from kvasir.api.calls.growing import Growing
from kvasir.api.calls.json_scan import WHITESPACE, Malformed
from kvasir.api.calls.marked_calls import CallReader, MarkedCalls
from kvasir.api.calls.tools import CallScan, ToolParser

FENCE, LIST_END = "```", "]"
STARTS = "{[`"  # a call, a list of calls, a code fence
MAX_LANGUAGE = 20  # characters of the word behind the fence's mark, like "json"


class JsonCalls(CallReader):
    """A reader of one call, or of a list of them. ``scan`` makes the reader of each object; ``fenced``: a code fence
    may stand around them. ``after``: the reader whose last call broke off, in a list or a fence that goes on here."""

    def __init__(
        self,
        parser: ToolParser,
        scan: Callable[[], CallScan],
        fenced: bool = False,
        after: JsonCalls | None = None,
        restarts: Growing | None = None,
    ) -> None:
        self._parser = parser
        self._scan = scan
        self._fenced = fenced
        self._call: CallScan | None = None
        self._ends = list(after._ends) if after is not None else []  # what is still open, the list last
        self._state = "start"  # start, fence, first (in a list), between (calls), next (behind a comma) or fence end
        self._num_ticks = self._num_language = 0
        self.restarts = restarts
        self.opened = self.done = False

    @property
    def inside(self) -> bool:
        return self._call is not None and self._call.in_string

    def rest(self) -> str:
        return self._call.left if self._call is not None else ""

    end = rest

    def feed(self, char: str) -> None:
        if self._call is not None:
            self._in_call(self._call, char)
        elif self._state == "fence":
            self._in_fence(char)
        elif self._state == "fence end":
            self._in_fence_end(char)
        elif char in WHITESPACE:
            pass
        elif char == "{":  # a missing comma is no matter
            self._call = self._scan()
            self._in_call(self._call, char)
        elif self._state == "start":
            self._start(char)
        else:
            self._between(char)

    def _start(self, char: str) -> None:
        if char == "[" and LIST_END not in self._ends:
            self._ends.append(LIST_END)
            self._state = "first"
        elif char == "`" and self._fenced and not self._ends:
            self._state, self._num_ticks = "fence", 1
        else:
            raise Malformed

    def _in_fence(self, char: str) -> None:
        if self._num_ticks < len(FENCE):
            if char != "`":
                raise Malformed
            self._num_ticks += 1
        elif char.isalnum() or char == "_":
            self._num_language += 1
            if self._num_language > MAX_LANGUAGE:
                raise Malformed
        else:
            self._ends, self._state = [FENCE], "start"
            self.feed(char)

    def _in_fence_end(self, char: str) -> None:
        if char != "`":
            raise Malformed
        self._num_ticks += 1
        if self._num_ticks == len(FENCE):
            self._ends.clear()
            self.done = True

    def _between(self, char: str) -> None:
        if self._state == "between" and char == "," and self._ends[-1] == LIST_END:
            self._state = "next"
        elif self._state == "between" and char == self._ends[-1] == LIST_END:
            self._ends.pop()
            self.done = not self._ends
        elif self._state == "between" and char == "`" and FENCE in self._ends:
            self._state, self._num_ticks = "fence end", 1
        else:
            raise Malformed

    def _in_call(self, call: CallScan, char: str) -> None:
        call.feed(char)
        self.opened = call.opened and not call.done
        if call.done:
            self._parser.say(call.left)
            self._call, self._state = None, "between"
            self.done = not self._ends


class JsonBetweenMarks(MarkedCalls):
    """A parser of a format whose calls may be JSON between a mark of ``opens`` and one of ``closes``. Some answers put
    several objects between the marks, or leave marks out between two. ``json_restarts``: ``restarts`` within JSON."""

    json_restarts: ClassVar[Growing | None] = None
    _last_json: JsonCalls | None = None  # the reader of the last calls, if they were JSON

    def awaited(self) -> Sequence[str]:
        marks = super().awaited()
        return (*marks, "{") if self._last_json is not None and self.closes[0] in marks else marks

    def json_reader(self, mark: str, after: JsonCalls | None = None) -> JsonCalls:
        """Return a reader of the calls behind ``mark``, or of the call that begins with the brace ``mark``, which
        stands in a list or a fence if those ``after`` which it comes are in one."""
        made = self._last_json = JsonCalls(self, self._scan, True, after, self.json_restarts)
        if mark == "{":
            made.feed(mark)
        return made

    def _scan(self) -> CallScan:
        return CallScan(self, (self.arguments_key, "parameters"))


class Chosen(CallReader):
    """A reader that is chosen by the first character that is no white space: JSON, or the format's own."""

    def __init__(self, json: Callable[[], CallReader], own: Callable[[], CallReader]) -> None:
        self._json, self._own = json, own
        self._reader: CallReader | None = None

    @property
    def opened(self) -> bool:  # type: ignore[override]
        return self._reader is not None and self._reader.opened

    @property
    def done(self) -> bool:  # type: ignore[override]
        return self._reader is not None and self._reader.done

    @property
    def over(self) -> str:  # type: ignore[override]
        return self._reader.over if self._reader is not None else ""

    @property
    def inside(self) -> bool:  # type: ignore[override]
        return self._reader is not None and self._reader.inside

    @property
    def restarts(self) -> Growing | None:  # type: ignore[override]
        return self._reader.restarts if self._reader is not None else None

    def feed(self, char: str) -> None:
        if self._reader is None:
            if char in WHITESPACE:
                return
            self._reader = self._json() if char in STARTS else self._own()
        self._reader.feed(char)

    def take(self, text: str, start: int) -> int:
        return self._reader.take(text, start) if self._reader is not None else start

    def end(self) -> str:
        return self._reader.end() if self._reader is not None else ""

    def completes(self) -> bool:
        return self._reader is not None and self._reader.completes()

    def rest(self) -> str:
        return self._reader.rest() if self._reader is not None else ""
