"""<tool_call><function=name> with a <parameter=key> for each argument (Qwen3-Coder, Qwen3.5 and later)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvasir.api.call_grammars import keyed_rules
from kvasir.api.call_values import KeyedArguments
from kvasir.api.json_scan import Malformed
from kvasir.api.marked_calls import CallReader, MarkedCalls, NameScan, OneOf, Until
from kvasir.api.tools import ToolParser, mark, quoted
from kvasir.models.tokenizer import Tokenizer

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION, PARAMETER, END_PARAMETER = "<function=", "</function>", "<parameter=", "</parameter>"


class Qwen3Coder(MarkedCalls):
    """The parser of this format. Values are bare text between line breaks, typed by the tool's schema. The models
    sometimes leave out <tool_call>; then only the name of an offered function begins a call."""

    marks = (FUNCTION, PARAMETER)
    opens = (OPEN, FUNCTION)
    closes = (CLOSE,)
    shown = (OPEN, CLOSE)
    also = ("qwen3_xml",)

    def reader(self, mark: str) -> Call:
        return Call(self, bare=mark == FUNCTION)

    @classmethod
    def grammar(cls, functions: Sequence[Mapping[str, Any]], parallel: bool, tokenizer: Tokenizer) -> str:
        def before(key: str) -> str:
            return quoted(f"{PARAMETER}{key}>\n")

        more = ' ("\\n" call)*' if parallel else ""
        lines = [f"start: call{more}", "call: " + " | ".join(f"call_{i}" for i in range(len(functions)))]
        for i, function in enumerate(functions):
            name, end = quoted(f"\n{FUNCTION}{function['name']}>\n"), quoted(f"{END_FUNCTION}\n")
            lines.append(f"call_{i}: {mark(OPEN, tokenizer)} {name} arguments_{i} {end} {mark(CLOSE, tokenizer)}")
            lines += keyed_rules(f"arguments_{i}", function, before, f"\n{END_PARAMETER}", "\n", tokenizer)
        return "\n".join(lines)


class Call(CallReader):
    """A reader of one call, up to </function>."""

    def __init__(self, parser: ToolParser, bare: bool) -> None:
        self._parser = parser
        self._name = NameScan(parser, strict=bare)
        self._state = "name" if bare else "head"
        self._expected = OneOf(FUNCTION)
        self._until = Until(">")
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

    def feed(self, char: str) -> None:
        if self._state == "head":
            if self._expected.feed(char):
                self._state = "name"
        elif self._state == "name":
            if not self._name.feed(char):
                if char != ">":
                    raise Malformed
                self._arguments = KeyedArguments(self._parser, self._name.name)
                self._state, self._expected = "between", OneOf(PARAMETER, END_FUNCTION)
        else:
            assert self._arguments is not None
            self._in_arguments(self._arguments, char)

    def _in_arguments(self, arguments: KeyedArguments, char: str) -> None:
        if self._state == "between":
            found = self._expected.feed(char)
            if found == END_FUNCTION:
                arguments.close()
                self.done = True
            elif found:
                self._state, self._key, self._until = "key", "", Until(">")
            return
        if self._state == "begin":
            self._state = "value"
            if char == "\n":  # the line break after the key is not part of the value
                return
        text, ended = self._until.feed(char)
        if self._state == "key":
            self._key += text
            if ended:
                arguments.key(self._key.strip())
                self._state, self._until = "begin", Until(f"\n{END_PARAMETER}", END_PARAMETER)
            return
        arguments.value(text)
        if ended:
            arguments.end_value()
            self._state, self._expected = "between", OneOf(PARAMETER, END_FUNCTION)
