"""<tool_call><function=name> with a <parameter=key> for each argument (Qwen3-Coder, Qwen3.5 and later). Quotes
around the name and the key are dropped."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvasir.api.calls import call_openings
from kvasir.api.calls.call_grammars import keyed_rules
from kvasir.api.calls.call_values import KeyedArguments
from kvasir.api.calls.growing import SPACE, Growing, spelled
from kvasir.api.calls.json_scan import WHITESPACE, Malformed
from kvasir.api.calls.marked_calls import CallReader, MarkedCalls, NameScan, OneOf
from kvasir.api.calls.tools import ToolParser, mark, quoted
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
    restarts = Growing([r"\n?", *call_openings.QWEN3_CODER], call_openings.QWEN3_CODER_BARE)
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
    """A reader of one call, up to </function> or </tool_call>.

    A value ends at a closing mark only where another mark of the format or the end of the answer follows, so that a
    mark inside a value is text; or at a <parameter=key> on a line of its own. A parameter without a name, or one that
    came before, is content behind the call (``left``).
    """

    def __init__(self, parser: ToolParser, bare: bool) -> None:
        self._parser = parser
        self._name = NameScan(parser, strict=bare, quotes=QUOTES)
        self._state = "name" if bare else "head"
        self._expected = OneOf(FUNCTION)
        self._held = ""  # the beginning of a mark, perhaps
        self._key = ""
        self._skip = False  # the present parameter is content
        self._begins = False  # ``_held`` begins with that line break
        self._first = False  # the line break after the key has not come; it is not part of the value
        self._arguments: KeyedArguments | None = None
        self.left = self.over = ""
        self.done = False

    @property
    def opened(self) -> bool:
        return self._arguments is not None and self._arguments.opened

    @property
    def inside(self) -> bool:
        return self._state == "value"

    def take(self, text: str, start: int) -> int:
        if self._state != "value" or self._held or self._first:
            return start
        found = [at for char in "<\n" if (at := text.find(char, start)) >= 0]
        end = min(found, default=len(text))
        self._value(text[start:end])
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
                self._state = "between"
        elif self._state == "between":
            self._between(char)
        elif self._state == "key":
            self._in_key(char)
        else:
            self._in_value(char)

    def _between(self, char: str) -> None:
        assert self._arguments is not None
        if not self._held and char in WHITESPACE:
            return
        held = self._held + char
        if held in (END_FUNCTION, CLOSE):
            self._arguments.close()
            self.done = True
        elif held == PARAMETER:
            self._state, self._key = "key", ""
        elif held != END_PARAMETER:
            if not any(mark.startswith(held) for mark in (PARAMETER, END_PARAMETER, END_FUNCTION, CLOSE)):
                raise Malformed  # ``held`` is given back by the parser
            self._held = held
            return
        self._held = ""

    def _in_key(self, char: str) -> None:
        assert self._arguments is not None
        key = self._key.strip().strip(QUOTES)
        self._skip = char != ">" or not key or self._arguments.has(key)
        if char not in ">\n<=":
            self._key += char
            return
        self._state, self._held, self._first, self._begins = "value", "", True, False
        if self._skip:
            self.left += PARAMETER + self._key
            self._first = False
            self._in_value(char)
        else:
            self._arguments.key(key)

    def _in_value(self, char: str) -> None:
        self._held += char
        if self._first:
            self._first, self._begins = False, char == "\n"
        self._release()

    def _release(self) -> None:
        """Give out the held text that cannot begin an end of the value; go on behind the value at its end."""
        while self._held and self._state == "value":
            if found := ENDS.fullmatch(self._held):
                self._end_value(found["mark"] or "", found["rest"] or found["alone"])
            elif MAY_END.may(self._held):
                return
            else:
                self._value("" if self._begins else self._held[0])
                self._held, self._begins = self._held[1:], False

    def _end_value(self, mark: str, rest: str) -> None:
        assert self._arguments is not None
        if self._skip:
            self.left += "\n" * self._held.startswith("\n") + mark
        else:
            self._arguments.end_value()
        self._state, self._held = "between", ""
        for i, char in enumerate(rest):
            if self.done:
                self.over = rest[i:]
                return
            try:
                self.feed(char)
            except Malformed:  # another call begins
                self._held = rest[i - len(self._held) : -1]
                raise

    def _value(self, text: str) -> None:
        assert self._arguments is not None
        if self._skip:
            self.left += text
        else:
            self._arguments.value(text)

    def rest(self) -> str:
        return self.left + self._held

    def end(self) -> str:
        """Read the end of the answer; return text that is no part of the call."""
        if self._state == "value":
            at = len(self._held) - len(self._held.lstrip("\n"))
            ended = [m for m in (END_PARAMETER, END_FUNCTION, CLOSE) if self._held[at:].startswith(m)]
            if ended:
                self._end_value(ended[0], "")
                assert self._arguments is not None
                if self._arguments.opened:
                    self._arguments.close()
            else:
                self._value(self._held[1:] if self._begins else self._held)
                if not self._skip and self._arguments is not None:
                    self._arguments.end_value()
        left = (PARAMETER + self._key) if self._state == "key" else ""
        return self.left + left


BEFORE = (PARAMETER, END_FUNCTION, CLOSE, OPEN, FUNCTION)
AFTER_FUNCTION = (CLOSE, OPEN, FUNCTION)
QUOTES = "\"'"
KEY = r"[^\s<>=]{1,80}"
ENDS = re.compile(
    rf"\n?(?P<mark>{END_PARAMETER})(?:{SPACE}{END_PARAMETER})?(?P<rest>{SPACE}(?:{'|'.join(BEFORE)}))"
    rf"|\n?(?P<alone>{END_FUNCTION}{SPACE}(?:{'|'.join(AFTER_FUNCTION)})|(?<=\n)(?:{CLOSE}|{PARAMETER}{KEY}>))"
)
MAY_END = Growing(
    *([r"\n?", *spelled(END_PARAMETER), SPACE, *spelled(END_PARAMETER), SPACE, *spelled(mark)] for mark in BEFORE),
    *([r"\n?", *spelled(END_PARAMETER), SPACE, *spelled(mark)] for mark in BEFORE),
    *([r"\n?", *spelled(END_FUNCTION), SPACE, *spelled(mark)] for mark in AFTER_FUNCTION),
    [r"\n", *spelled(CLOSE)],
    [r"\n", *spelled(PARAMETER), KEY, ">"],
)
