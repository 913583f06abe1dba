"""[f(a=1), g(b="x")] as the whole answer, in <|python_start|> or in a tool_code fence (Llama 3.2 and 4, Gemma 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvasir.api.calls import call_openings
from kvasir.api.calls.call_grammars import keyed_rules
from kvasir.api.calls.call_values import KeyedArguments, literal
from kvasir.api.calls.json_scan import WHITESPACE, Malformed
from kvasir.api.calls.marked_calls import CallReader, MarkedCalls, NameScan, restarts
from kvasir.api.calls.tools import ToolParser, quoted
from kvasir.models.tokenizer import Tokenizer

TAG, END_TAG, FENCE, END_FENCE = "<|python_start|>", "<|python_end|>", "```tool_code", "```"
CLOSING = {"(": ")", "[": "]", "{": "}"}


class Pythonic(MarkedCalls):
    """The parser of this format. Only offered functions are calls, and keyword arguments that are literals; arguments
    by position take the names of the schema in its order."""

    marks = ("[func_name1(params_name1=params_value1", "tool_code")
    opens = (TAG, FENCE)
    closes = (END_TAG, END_FENCE)
    shown = (TAG, END_TAG)
    also = ("llama4_pythonic",)
    restarts = restarts((END_TAG, END_FENCE), *call_openings.PYTHONIC)

    def awaited(self) -> Sequence[str]:
        return super().awaited() if self._begun else (*self.opens, "[")

    def reader(self, mark: str) -> Calls:
        return Calls(self, listed=mark == "[", fenced=mark == FENCE)

    @classmethod
    def grammar(cls, functions: Sequence[Mapping[str, Any]], parallel: bool, tokenizer: Tokenizer) -> str:
        def before(key: str) -> str:
            return quoted(f"{key}=")

        more = ' (", " call)*' if parallel else ""
        lines = [f'start: "[" call{more} "]"', "call: " + " | ".join(f"call_{i}" for i in range(len(functions)))]
        for i, function in enumerate(functions):
            lines.append(f'call_{i}: {quoted(function["name"] + "(")} arguments_{i} ")"')
            lines += keyed_rules(f"arguments_{i}", function, before, None, ", ", tokenizer)
        return "\n".join(lines)


class Calls(CallReader):
    """A reader of calls: a list of them (``listed``: its bracket was read), or one a line (``fenced``)."""

    def __init__(self, parser: ToolParser, listed: bool, fenced: bool) -> None:
        self._parser = parser
        self._listed = listed
        self._fenced = fenced
        self._printed = False  # the call stands within print(...)
        self._state = "name" if listed else "start"
        self._name = NameScan(parser)
        self._arguments: KeyedArguments | None = None
        self._text = ""  # the argument so far
        self._stack: list[str] = []  # brackets open in it
        self._quote = ""  # the quotes of the string that is open in it, one or three
        self._string = ""  # that string so far, its quotes included
        self._run = 0  # quotes that came one after another at its end
        self._escaped = False
        self._position = 0  # number of arguments read
        self.done = False

    @property
    def opened(self) -> bool:
        printed = self._printed and self._state == "after"  # the bracket of print belongs to the call
        return printed or (self._arguments is not None and self._arguments.opened)

    @property
    def inside(self) -> bool:
        return bool(self._quote)

    def rest(self) -> str:
        return self._text if self._state == "argument" else ""

    def end(self) -> str:
        return self.rest()

    def feed(self, char: str) -> None:
        if self._state == "start" and char not in WHITESPACE:
            self._state, self._listed = "name", char == "["
            if self._listed:
                return
        if self._state == "name":
            if not self._name.feed(char):
                self._named(char)
        elif self._state == "argument":
            self._in_argument(char)
        elif self._state == "after" and char not in WHITESPACE:
            self._after(char)

    def _named(self, char: str) -> None:
        offered, name = self._parser.names, self._name.name
        if char != "(":
            raise Malformed
        if self._fenced and name == "print" and not self._printed and name not in (offered or ()):
            self._printed, self._name = True, NameScan(self._parser)
            return
        if (offered is not None and name not in offered) or not name.isidentifier():
            raise Malformed
        self._arguments = KeyedArguments(self._parser, name)
        self._state, self._text, self._position = "argument", "", 0

    def _in_argument(self, char: str) -> None:
        if self._quote:
            self._in_string(char)
        elif char in "\"'":
            self._text += char
            self._quote, self._string, self._run = char, char, 0
        elif not self._stack and char in ",)":
            self._argument(char)
        elif char in (END_TAG[0], END_FENCE[0]):
            if self._stack:
                raise Malformed
            self._argument(")")  # it is missing
            self._after(char)
        else:
            if char in CLOSING:
                self._stack.append(CLOSING[char])
            elif char in ")]}" and (not self._stack or self._stack.pop() != char):
                raise Malformed
            self._text += char

    def _in_string(self, char: str) -> None:
        """Read a character of a string. Two quotes are an empty string unless a third one follows."""
        quote = self._quote[0]
        if self._string == quote * 2 and self._quote == quote:
            if char != quote:
                self._quote = ""
                self._in_argument(char)
                return
            self._quote, self._run = quote * 3, 0
        elif char == quote and not self._escaped:
            self._run += 1
        elif char == "\n" and len(self._quote) == 1 and not self._escaped:
            raise Malformed  # the quote that ends the string is missing
        else:
            self._run = 0
        self._text += char
        self._string += char
        if self._run == len(self._quote) and self._string != quote * 2:
            self._quote = ""
        self._escaped = char == "\\" and not self._escaped

    def _argument(self, char: str) -> None:
        assert self._arguments is not None
        text = self._text.strip()
        if text:
            key, equals, value = text.partition("=")
            if not equals or not key.strip().isidentifier():
                key, value = self._by_position(), text
            found = literal(value)
            if found is None:
                raise Malformed
            self._arguments.whole(key.strip(), found)
            self._position += 1
        elif char == ",":
            raise Malformed
        self._text = ""
        if char == ")":
            self._arguments.close()
            self._state = "after"

    def _by_position(self) -> str:
        properties = self._parser.schemas.get(self._name.name, {}).get("properties")
        names = list(properties) if isinstance(properties, Mapping) else []
        if self._position >= len(names):
            raise Malformed
        return names[self._position]

    def _after(self, char: str) -> None:
        if self._printed and char == ")":
            self._printed = False
        elif char == "]" and self._listed:
            self.done = True
        elif char == "," or (not self._listed and (char == ";" or char.isidentifier())):
            self._state, self._name = "name", NameScan(self._parser)
            if char not in ",;":
                self._name.feed(char)
        else:
            raise Malformed
