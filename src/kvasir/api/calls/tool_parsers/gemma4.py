"""<|tool_call>call:name{key:<|"|>text<|"|>,count:5}<tool_call|>: bare keys and marked strings (Gemma 4)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvasir.api.calls import call_openings
from kvasir.api.calls.call_grammars import Bare
from kvasir.api.calls.call_values import typed
from kvasir.api.calls.json_scan import MAX_DEPTH, WHITESPACE, Malformed
from kvasir.api.calls.marked_calls import CallReader, MarkedCalls, NameScan, OneOf, Until, restarts
from kvasir.api.calls.tools import ToolParser, mark, quoted
from kvasir.models.tokenizer import Tokenizer

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'


class Gemma4(MarkedCalls):
    """The parser of this format. It becomes JSON character by character, so arguments stream."""

    marks = opens = (OPEN,)
    closes = (CLOSE,)
    shown = (CLOSE, QUOTE)
    restarts = restarts(closes, call_openings.GEMMA4)

    def reader(self, mark: str) -> Call:
        return Call(self)

    @classmethod
    def grammar(cls, functions: Sequence[Mapping[str, Any]], parallel: bool, tokenizer: Tokenizer) -> str:
        lines = [
            f"start: call{'+' if parallel else ''}",
            "call: " + " | ".join(f"call_{i}" for i in range(len(functions))),
        ]
        bare = Bare(QUOTE, tokenizer)
        for i, function in enumerate(functions):
            name = quoted(f"call:{function['name']}")
            lines.append(
                f"call_{i}: {mark(OPEN, tokenizer)} {name} {bare.arguments(function)} {mark(CLOSE, tokenizer)}"
            )
        return "\n".join([*lines, *bare.rules])


class Call(CallReader):
    """A reader of one call, up to the brace that closes its arguments."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser
        self._head = OneOf("call:")
        self._name = NameScan(parser)
        self._state = "head"
        self._stack: list[str] = []  # open brackets, innermost last
        self._string = Until(QUOTE)
        self._string_is_key = False
        self._text = ""  # a key or a bare value so far
        self.opened = self.done = False

    @property
    def inside(self) -> bool:
        return self._state == "string"

    def take(self, text: str, start: int) -> int:
        if self._state != "string":
            return start
        end = self._string.skip(text, start, "]}")
        self._parser.argue(json.dumps(text[start:end], ensure_ascii=False)[1:-1])
        return end

    def feed(self, char: str) -> None:
        if self._state == "head":
            if self._head.feed(char):
                self._state = "name"
        elif self._state == "name":
            if not self._name.feed(char):
                if char != "{":
                    raise Malformed
                self._parser.open_call(self._name.name)
                self.opened = True
                self._push(char)
        elif self._state == "string":
            self._in_string(char)
        elif self._state == "key":
            self._in_key(char)
        elif self._state == "bare":
            self._in_bare(char)
        else:
            self._between(char)

    def end(self) -> str:
        if self._state == "bare":
            self._parser.argue(typed(self._text.strip(), None))
        return self._text if self._state == "key" else ""

    def rest(self) -> str:
        return self._text if self._state == "key" else ""

    def _push(self, char: str) -> None:
        if len(self._stack) >= MAX_DEPTH:
            raise Malformed
        self._stack.append(char)
        self._parser.argue(char)
        self._state = "first key" if char == "{" else "first value"

    def _pop(self, char: str) -> None:
        if not self._stack or char != {"{": "}", "[": "]"}[self._stack[-1]]:
            raise Malformed
        self._stack.pop()
        self._parser.argue(char)
        self._state = "after"
        if not self._stack:
            self.opened, self.done = False, True

    def _between(self, char: str) -> None:
        if char in WHITESPACE:
            return
        if self._state == "after":
            if char == ",":
                self._parser.argue(", ")
                self._state = "key start" if self._stack[-1] == "{" else "value"
            else:
                self._pop(char)
        elif self._state == "colon":
            if char != ":":
                raise Malformed
            self._parser.argue(": ")
            self._state = "value"
        elif (self._state == "first key" and char == "}") or (self._state == "first value" and char == "]"):
            self._pop(char)
        elif self._state in ("first key", "key start"):
            self._state, self._text = "key", ""
            self._in_key(char)
        elif char in "{[":
            self._push(char)
        else:
            self._state, self._text = "bare", ""
            self._in_bare(char)

    def _in_key(self, char: str) -> None:
        if char == ":":
            key = self._text.strip().strip('"')
            if not key:
                raise Malformed
            self._parser.argue(f"{json.dumps(key, ensure_ascii=False)}: ")
            self._state = "value"
            return
        if char in "{}[],":
            raise Malformed
        self._text += char
        if self._text == QUOTE:
            self._begin_string(True)
        elif self._ended_early():
            self._close_early()

    def _ended_early(self) -> bool:
        """Whether a mark has ended the key or the bare value, because the brackets before it are missing."""
        self.over = next((mark for mark in (OPEN, CLOSE) if self._text.endswith(mark)), "")
        self._text = self._text.removesuffix(self.over)
        return bool(self.over)

    def _close_early(self) -> None:
        self._parser.end_call()
        self.opened, self.done = False, True

    def _begin_string(self, is_key: bool) -> None:
        self._parser.argue('"')
        self._state, self._string, self._string_is_key = "string", Until(QUOTE), is_key

    def _in_string(self, char: str) -> None:
        text, ended = self._string.feed(char)
        self._parser.argue(json.dumps(text, ensure_ascii=False)[1:-1] + ('"' if ended else ""))
        if ended:
            self._state = "colon" if self._string_is_key else "after"

    def _in_bare(self, char: str) -> None:
        """Read a number, a word, or the mark of a string. A string without marks is taken as it is."""
        quoted = self._text.startswith('"') and not (len(self._text) > 1 and self._text.endswith('"'))
        if char in ",}]" and not quoted:
            if not self._text.strip():
                raise Malformed
            self._parser.argue(typed(self._text.strip(), None))
            self._state = "after"
            self._between(char)
            return
        self._text += char
        if self._text == QUOTE:
            self._begin_string(False)
        elif self._ended_early():
            self._parser.argue(typed(self._text.strip(), None))
            self._close_early()
