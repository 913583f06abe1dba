"""Answers of one or more {"name": ..., "parameters": {...}} after an optional <|python_tag|> (Llama 3). Between them
stand ";", "," or a line break, and text may stand before and behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvasir.api import call_openings
from kvasir.api.json_scan import WHITESPACE, Malformed, ValueScan
from kvasir.api.marked_calls import NEXT_OBJECTS, CallReader, MarkedCalls, restarts
from kvasir.api.tools import PLAIN_KEYS, CallScan, ToolParser, call_rules
from kvasir.models.tokenizer import Tokenizer

TAG = "<|python_tag|>"
SEPARATORS = ";,"


class Llama3Json(MarkedCalls):
    """The parser of Llama 3.1 to 3.3. A call is a JSON object that names an offered function and belongs to no other
    JSON value: those that do are content."""

    marks = (TAG, '"parameters": dictionary of argument name')
    opens = (TAG, "{", "[")
    also = ("llama4_json",)
    arguments_key = "parameters"
    restarts = restarts((), *NEXT_OBJECTS, *call_openings.LLAMA3)

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        super().__init__(schemas)
        self._json: ValueScan | None = None  # of the JSON value that is being read as content

    def reader(self, mark: str) -> Call:
        return Call(self, mark)

    def _step(self, text: str, at: int) -> int:
        if self._json is None:
            return super()._step(text, at)
        try:
            self._json.feed(text[at])
        except Malformed:
            self._json = None
            return at
        self.say(text[at])
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
        self._after_call, self._begun = False, True

    def _give_up(self) -> None:
        raw, self._raw, self._reader, self._after_call = self._raw, "", None, False
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


class Call(CallReader):
    """A reader of one JSON object that is a call, from its brace or from the tag before it."""

    def __init__(self, parser: ToolParser, mark: str) -> None:
        keys = (parser.arguments_key, "arguments")
        self._scan = CallScan(parser, keys, strict=True, only=(*PLAIN_KEYS, *keys))
        self._list = mark == "["
        self.opened = self.done = False
        if mark == "{":
            self.feed(mark)

    @property
    def inside(self) -> bool:
        return self._scan.in_string

    def rest(self) -> str:
        return self._scan.left

    end = rest

    def feed(self, char: str) -> None:
        if self._list:
            raise Malformed  # objects in it are no calls
        if self._scan.started or char not in WHITESPACE:
            self._scan.feed(char)
        self.done = self._scan.done
        self.opened = self._scan.opened and not self.done
