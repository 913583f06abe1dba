"""Any number of <tool_call>{"name": ..., "arguments": {...}}</tool_call> within content (Hermes 2 and 3, Qwen 2.5 and
3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvasir.api.json_scan import WHITESPACE, Malformed
from kvasir.api.tools import CallScan, ToolParser, call_rules, mark
from kvasir.models.tokenizer import Tokenizer

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes(ToolParser):
    """The parser of this format. White space around a call belongs to the format and not to the content."""

    marks = (OPEN,)

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        super().__init__(schemas)
        self._call: CallScan | None = None  # the call being read
        self._awaited = OPEN  # the mark that may come next; CLOSE after a call's JSON
        self._mark = ""  # the part of it that was read
        self._space = ""  # white space before the mark: content only if content follows
        self._beside_call = False  # only white space has come since a call

    def feed(self, char: str) -> None:
        if self._call is not None:
            self._in_call(self._call, char)
        elif self._awaited.startswith(self._mark + char):
            self._mark += char
            if self._mark == self._awaited:
                self._marked()
        elif self._mark:
            self._plain(self._mark)
            self._mark = ""
            self.feed(char)
        elif char in WHITESPACE:
            self._space += char
        else:
            self._plain(char)

    def _marked(self) -> None:
        if self._awaited == OPEN:
            self._call = CallScan(self, (self.arguments_key, "parameters"))
            self._call.raw = self._space + OPEN
        self._awaited, self._mark, self._space = OPEN, "", ""

    def _plain(self, text: str) -> None:
        self.say(text if self._beside_call else self._space + text)
        self._awaited, self._space, self._beside_call = OPEN, "", False

    def _in_call(self, call: CallScan, char: str) -> None:
        if char in WHITESPACE and call.raw.endswith((OPEN, *WHITESPACE)) and not call.started:
            call.raw += char
            return
        try:
            call.feed(char)
        except Malformed:
            # After an announced call only the rest is content, otherwise everything read.
            self._call = None
            self.say("" if call.opened else call.raw[:-1])
            self._beside_call = False
            self.feed(char)
            return
        if call.done:
            self._call, self._awaited, self._beside_call = None, CLOSE, True

    def finish(self) -> None:
        if self._call is not None and not self._call.opened:
            self.say(self._call.raw)
        elif self._mark and self._awaited == OPEN:
            self._plain(self._mark)
        elif self._call is None and not self._beside_call:
            self.say(self._space)
        self._call, self._mark, self._space = None, "", ""

    @classmethod
    def grammar(cls, functions: Sequence[Mapping[str, Any]], parallel: bool, tokenizer: Tokenizer) -> str:
        more = ' ("\\n" one)*' if parallel else ""
        one = f'{mark(OPEN, tokenizer)} "\\n" call "\\n" {mark(CLOSE, tokenizer)}'
        return f"start: one{more}\none: {one}\n{call_rules(functions, cls.arguments_key)}"
