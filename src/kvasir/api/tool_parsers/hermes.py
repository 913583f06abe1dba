"""Any number of <tool_call>{"name": ..., "arguments": {...}}</tool_call> within content (Hermes 2 and 3, Qwen 2.5 and
3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvasir.api import call_openings
from kvasir.api.json_scan import WHITESPACE
from kvasir.api.marked_calls import NEXT_OBJECTS, CallReader, MarkedCalls, restarts
from kvasir.api.tools import CallScan, ToolParser, call_rules, mark
from kvasir.models.tokenizer import Tokenizer

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes(MarkedCalls):
    """The parser of this format. Some answers put several objects between the marks, or leave marks out between two."""

    marks = opens = (OPEN,)
    closes = (CLOSE,)
    restarts = restarts(closes, *NEXT_OBJECTS, *call_openings.HERMES)

    def awaited(self) -> Sequence[str]:
        marks = super().awaited()
        return (*marks, "{") if CLOSE in marks else marks

    def reader(self, mark: str) -> JsonCall:
        made = JsonCall(self, (self.arguments_key, "parameters"))
        if mark == "{":
            made.feed(mark)
        return made

    @classmethod
    def grammar(cls, functions: Sequence[Mapping[str, Any]], parallel: bool, tokenizer: Tokenizer) -> str:
        more = ' ("\\n" one)*' if parallel else ""
        one = f'{mark(OPEN, tokenizer)} "\\n" call "\\n" {mark(CLOSE, tokenizer)}'
        return f"start: one{more}\none: {one}\n{call_rules(functions, cls.arguments_key)}"


class JsonCall(CallReader):
    """A reader of one JSON object that is a call, after any white space."""

    def __init__(self, parser: ToolParser, keys: tuple[str, ...]) -> None:
        self._scan = CallScan(parser, keys)
        self.opened = self.done = False

    @property
    def inside(self) -> bool:
        return self._scan.in_string

    def rest(self) -> str:
        return self._scan.left

    end = rest

    def feed(self, char: str) -> None:
        if self._scan.started or char not in WHITESPACE:
            self._scan.feed(char)
        self.done = self._scan.done
        self.opened = self._scan.opened and not self.done
