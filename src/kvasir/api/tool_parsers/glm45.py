"""<tool_call>name with an <arg_key> and an <arg_value> for each argument, then </tool_call> (GLM-4.5 to GLM-4.7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvasir.api.call_grammars import keyed_rules
from kvasir.api.call_values import KeyedArguments
from kvasir.api.marked_calls import CallReader, MarkedCalls, NameScan, OneOf, Until
from kvasir.api.tools import ToolParser, mark, quoted
from kvasir.models.tokenizer import Tokenizer

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, END_KEY, VALUE, END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


class Glm45(MarkedCalls):
    """The parser of this format. Values are bare text, typed by the tool's schema."""

    marks = (KEY, VALUE)
    opens = (OPEN,)
    shown = (OPEN, CLOSE, END_KEY, END_VALUE)
    also = ("glm47",)

    def reader(self, mark: str) -> Call:
        return Call(self)

    @classmethod
    def grammar(cls, functions: Sequence[Mapping[str, Any]], parallel: bool, tokenizer: Tokenizer) -> str:
        def written(text: str) -> str:
            return mark(text, tokenizer)

        def before(key: str) -> str:
            return f'{written(KEY)} {quoted(key)} {written(END_KEY)} "\\n" {written(VALUE)}'

        more = ' ("\\n" call)*' if parallel else ""
        lines = [f"start: call{more}", "call: " + " | ".join(f"call_{i}" for i in range(len(functions)))]
        for i, function in enumerate(functions):
            name = quoted(function["name"] + "\n")
            lines.append(f"call_{i}: {written(OPEN)} {name} arguments_{i} {written(CLOSE)}")
            lines += keyed_rules(f"arguments_{i}", function, before, END_VALUE, "\n", tokenizer)
        return "\n".join(lines)


class Call(CallReader):
    """A reader of one call, up to its closing mark."""

    def __init__(self, parser: ToolParser) -> None:
        self._name = NameScan(parser)
        self._parser = parser
        self._state = "name"
        self._between = OneOf(KEY, CLOSE)
        self._until = Until(END_KEY)
        self._key = ""
        self._arguments: KeyedArguments | None = None
        self.done = False

    @property
    def opened(self) -> bool:
        return self._arguments is not None and self._arguments.opened

    def take(self, text: str, start: int) -> int:
        if self._state != "value" or self._arguments is None:
            return start
        end = self._until.skip(text, start)
        self._arguments.value(text[start:end])
        return end

    def end(self) -> str:
        if self._state == "value" and self._arguments is not None:
            self._arguments.end_value()
        return self._key if self._state in ("key", "before value") else ""

    def rest(self) -> str:
        """A repeated argument that cannot be taken, or a part that is missing, leaves its key."""
        return f"{KEY}{self._key}" if self._state in ("key", "before value") else ""

    def feed(self, char: str) -> None:
        if self._state == "name":
            if not self._name.feed(char):
                self._arguments = KeyedArguments(self._parser, self._name.name)
                self._state = "between"
                self.feed(char)
            return
        assert self._arguments is not None
        if self._state == "between":
            found = self._between.feed(char)
            if found == CLOSE:
                self._arguments.close()
                self.done = True
            elif found:
                self._state, self._key, self._until = "key", "", Until(END_KEY)
        elif self._state == "key":
            text, ended = self._until.feed(char)
            self._key += text
            if ended:
                self._state, self._between = "before value", OneOf(VALUE)
        elif self._state == "before value":
            if self._between.feed(char):
                self._arguments.key(self._key.strip())
                self._state, self._until = "value", Until(END_VALUE, OPEN, KEY)
        else:
            text, ended = self._until.feed(char)
            self._arguments.value(text)
            if ended:
                self._arguments.end_value()
                self._state, self._between = "between", OneOf(KEY, CLOSE)
                if self._until.mark == KEY:  # its end is missing
                    self._state, self._key, self._until = "key", "", Until(END_KEY)
                elif self._until.mark == OPEN:
                    self._arguments.close()
                    self.done, self.over = True, OPEN
