"""Answers of one or more {"name": ..., "parameters": {...}} after an optional <|python_tag|> (Llama 3). Between them
stand ";", "," or a line break, and text may stand before and behind them. A list of them on a line of its own
is read, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvasir.api.calls import call_openings
from kvasir.api.calls.growing import SPACE
from kvasir.api.calls.json_calls import JsonCalls
from kvasir.api.calls.json_scan import WHITESPACE, Malformed, ValueScan
from kvasir.api.calls.marked_calls import BRACKETS, NEXT_OBJECTS, CallReader, MarkedCalls, restarts
from kvasir.api.calls.tools import PLAIN_KEYS, CallScan, call_rules
from kvasir.models.tokenizer import Tokenizer

TAG = "<|python_tag|>"
SEPARATORS = ";,"
NEXT_LISTS = [[*before, r"\[", SPACE, *begun] for begun in call_openings.OBJECTS for before in ([], [*BRACKETS, SPACE])]


class Llama3Json(MarkedCalls):
    """The parser of Llama 3.1 to 3.3. A call is a JSON object that names an offered function and belongs to no other
    JSON value than a list of calls, which begins a line: those that do are content."""

    marks = (TAG, '"parameters": dictionary of argument name')
    opens = (TAG, "{", "[")
    also = ("llama4_json",)
    arguments_key = "parameters"
    restarts = restarts((), *NEXT_OBJECTS, *NEXT_LISTS, *call_openings.LLAMA3)

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        super().__init__(schemas)
        self._json: ValueScan | None = None  # of the JSON value that is being read as content
        self._last: JsonCalls | None = None  # the reader of the last calls
        self._line_begins = True  # nothing but white space has been said since the last line break

    def reader(self, mark: str) -> CallReader:
        if mark == "[" and not (self._after_call or self._line_begins or "\n" in self._space):
            return NoCalls()
        after = self._last if mark == "{" and self._after_call else None
        made = self._last = JsonCalls(self, self._scan, after=after)
        if mark != TAG:
            made.feed(mark)
        return made

    def _scan(self) -> CallScan:
        keys = (self.arguments_key, "arguments")
        return CallScan(self, keys, strict=True, only=(*PLAIN_KEYS, "function", *keys))

    def _step(self, text: str, at: int) -> int:
        if self._json is None:
            return super()._step(text, at)
        try:
            self._json.feed(text[at])
        except Malformed:
            self._json = None
            return at
        self.say(text[at])
        self._line_begins = text[at] == "\n" or (self._line_begins and text[at] in WHITESPACE)
        self._json = None if self._json.done else self._json
        return at + 1

    def _outside(self, char: str) -> None:
        separates = self._after_call and not self._mark and char in SEPARATORS
        if separates and not self._space.strip(WHITESPACE):
            self._space += char  # content unless a call follows
        else:
            super()._outside(char)

    def _plain(self, text: str) -> None:
        self.say(self._space + text)
        self._mark = self._space = ""
        self._after_call = self._line_begins = False

    def _give_up(self) -> None:
        if not self._raw.strip(WHITESPACE):  # a list ends without its bracket
            super()._give_up()
            return
        raw, self._raw, self._reader, self._after_call = self._raw, "", None, False
        self._line_begins = False
        self.say(raw)
        scan = ValueScan()
        try:
            for char in raw.lstrip(WHITESPACE + SEPARATORS).removeprefix(TAG):
                scan.feed(char)
        except Malformed:
            return
        self._json = scan

    def finish(self) -> None:
        super().finish()
        self._json = None

    @classmethod
    def grammar(cls, functions: Sequence[Mapping[str, Any]], parallel: bool, tokenizer: Tokenizer) -> str:
        more = ' ("; " call)*' if parallel else ""
        return f"start: call{more}\n{call_rules(functions, cls.arguments_key)}"


class NoCalls(CallReader):
    """A reader of JSON that holds no call: its first character makes it content."""

    opened = done = False

    def feed(self, char: str) -> None:
        raise Malformed
