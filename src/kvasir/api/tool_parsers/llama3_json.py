"""Answers of one or more {"name": ..., "parameters": {...}} after an optional <|python_tag|> (Llama 3). Between them
stand ";", "," or a line break."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvasir.api.json_scan import WHITESPACE, Malformed
from kvasir.api.tools import CallScan, ToolParser, call_rules
from kvasir.models.tokenizer import Tokenizer

TAG = "<|python_tag|>"


class Llama3Json(ToolParser):
    """The parser of Llama 3.1 to 3.3. An answer holds calls from its first character on, or it is content; so is an
    object whose name is not an offered function."""

    marks = (TAG, '"parameters": dictionary of argument name')
    also = ("llama4_json",)
    arguments_key = "parameters"

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        super().__init__(schemas)
        self._call: CallScan | None = None
        self._between = ""  # text between calls, which is content if no call follows
        self._content = False

    def feed(self, char: str) -> None:
        if self._content:
            self.say(char)
        elif self._call is not None:
            self._in_call(self._call, char)
        elif char == "{" and self._may_start():
            self._call = CallScan(self, (self.arguments_key, "arguments"), strict=True)
            self._in_call(self._call, char)
        else:
            self._between += char
            if not self._may_continue():
                self._to_content(self._between)

    def _may_start(self) -> bool:
        """Whether a call may start after the text read: white space, the tag, or the separator."""
        read = self._between.strip(WHITESPACE)
        return read in ("", ";", ",") if self.num_calls else read in ("", TAG)

    def _may_continue(self) -> bool:
        read = self._between.strip(WHITESPACE)
        return read in ("", ";", ",") if self.num_calls else TAG.startswith(read)

    def _in_call(self, call: CallScan, char: str) -> None:
        try:
            call.feed(char)
        except Malformed:
            self._to_content(self.end_call() + char if call.opened else self._between + call.raw)
            return
        if call.done:
            self._call, self._between = None, ""

    def _to_content(self, text: str) -> None:
        self._call, self._content, self._between = None, True, ""
        self.say(text)

    def finish(self) -> None:
        if self._call is not None:
            self.say(self.end_call() if self._call.opened else self._between + self._call.raw)
        elif self._call is None and (self._between.strip(WHITESPACE) or not self.num_calls):
            self.say(self._between)
        self._call, self._between = None, ""

    @classmethod
    def grammar(cls, functions: Sequence[Mapping[str, Any]], parallel: bool, tokenizer: Tokenizer) -> str:
        more = ' ("; " call)*' if parallel else ""
        return f"start: call{more}\n{call_rules(functions, cls.arguments_key)}"
