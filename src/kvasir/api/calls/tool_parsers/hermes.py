"""Any number of <tool_call>{"name": ..., "arguments": {...}}</tool_call> within content (Hermes 2 and 3, Qwen 2.5 and
3). A list of such calls may stand between the marks, and a code fence around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvasir.api.calls import call_openings
from kvasir.api.calls.json_calls import JsonBetweenMarks, JsonCalls
from kvasir.api.calls.marked_calls import NEXT_OBJECTS, restarts
from kvasir.api.calls.tools import call_rules, mark
from kvasir.models.tokenizer import Tokenizer

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes(JsonBetweenMarks):
    """The parser of this format."""

    marks = opens = (OPEN,)
    closes = (CLOSE,)
    fenced = True
    restarts = restarts(closes, *NEXT_OBJECTS, *call_openings.HERMES, fenced=True)

    def reader(self, mark: str) -> JsonCalls:
        return self.json_reader(mark, self._last_json if mark == "{" else None)

    @classmethod
    def grammar(cls, functions: Sequence[Mapping[str, Any]], parallel: bool, tokenizer: Tokenizer) -> str:
        more = ' ("\\n" one)*' if parallel else ""
        one = f'{mark(OPEN, tokenizer)} "\\n" call "\\n" {mark(CLOSE, tokenizer)}'
        return f"start: one{more}\none: {one}\n{call_rules(functions, cls.arguments_key)}"
