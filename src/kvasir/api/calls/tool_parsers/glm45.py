"""<tool_call>name with an <arg_key> and an <arg_value> for each argument, then </tool_call> (GLM-4.5 to GLM-4.7). Some
answers hold JSON between these marks, as in hermes' format."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kvasir.api.calls import call_openings
from kvasir.api.calls.call_grammars import keyed_rules
from kvasir.api.calls.call_values import KeyedArguments
from kvasir.api.calls.growing import SPACE, Growing, spelled
from kvasir.api.calls.json_calls import Chosen, JsonBetweenMarks
from kvasir.api.calls.json_scan import Malformed
from kvasir.api.calls.marked_calls import NEXT_OBJECTS, CallReader, NameScan, restarts
from kvasir.api.calls.tools import ToolParser, mark, quoted
from kvasir.models.tokenizer import Tokenizer

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, END_KEY, VALUE, END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


class Glm45(JsonBetweenMarks):
    """The parser of this format. Values are bare text, typed by the tool's schema."""

    marks = (KEY, VALUE)
    opens = (OPEN,)
    shown = (OPEN, CLOSE, END_KEY, END_VALUE)
    also = ("glm47",)
    closes = (CLOSE,)
    json_restarts = restarts(closes, *NEXT_OBJECTS, *call_openings.HERMES, *call_openings.GLM45, fenced=True)
    restarts = Growing(*call_openings.GLM45, *([*spelled(CLOSE), SPACE, *begun] for begun in call_openings.GLM45))
    fenced = True

    def reader(self, mark: str) -> CallReader:
        self._last_json, last = None, self._last_json
        if mark == "{":
            return self.json_reader(mark, last)
        return Chosen(partial(self.json_reader, mark), partial(Call, self))

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
    """A reader of one call, up to its closing mark.

    A doubled mark is dropped, and for a missing one the next one counts. A value ends at the last </arg_value> before
    the next argument, so one within the value is text. An argument that has no key or no value, or that came before,
    is content behind the call (``left``).
    """

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser
        self._name = NameScan(parser)
        self._state = "name"  # name, between, key, before value or value
        self._arguments: KeyedArguments | None = None
        self._held = ""  # the beginning of a mark, perhaps
        self._text = ""  # what came since the last mark, unless it is a value
        self._key = ""
        self._skip = False  # the present argument is content
        self._empty = False  # nothing of the value has come
        self._ending = False  # the mark that ends the value has come, unless another one follows
        self.left = self.over = ""
        self.done = False

    @property
    def opened(self) -> bool:
        return self._arguments is not None and self._arguments.opened

    @property
    def inside(self) -> bool:
        return self._state == "value"

    def take(self, text: str, start: int) -> int:
        found = QUIET.match(text, start) if self._state == "value" and not self._held else None
        if found:
            self._value(found[0])
        return found.end() if found else start

    def feed(self, char: str) -> None:
        if self._state == "name":
            if self._name.feed(char):
                return
            self._arguments, self._state = KeyedArguments(self._parser, self._name.name), "between"
        self._held += char
        while self._held and not self.done:
            if not (self._in_value() if self._state == "value" else self._between()):
                return

    def _in_value(self) -> bool:
        """Read the held text, within a value; return whether it has become shorter."""
        held = self._held
        if self._empty and VALUE.startswith(held):
            self._held = "" if held == VALUE else held
        elif held == END_VALUE:
            self._held, self._state, self._ending = "", "between", True
        elif found := ENDS.match(held):
            self._held, self._state = "", "between"
            self._end_value()
            if key := found.groupdict().get("key"):
                self._state, self._text = "key", key
            self._marked(found["mark"])
        elif not (END_VALUE.startswith(held) or ENDS.may(held)):
            self._held = held[1:]
            self._value(held[0])
        return self._held != held

    def _between(self) -> bool:
        """Read the held text, outside a value; return whether it has become shorter."""
        held = self._held
        if held in MARKS:
            self._held = ""
            self._marked(held)
        elif not any(mark.startswith(held) for mark in MARKS):
            self._text, self._held = self._text + held[0], held[1:]
            if not self.opened and not POSSIBLE_KEY.fullmatch(self._text):
                raise Malformed
        return self._held != held

    def _marked(self, mark: str) -> None:
        """Read a mark outside a value, and the text before it."""
        raw, text, self._text = self._text, self._text.strip(), ""
        if self._state == "between" and self._ending:
            if mark == END_VALUE:
                self._value(END_VALUE + raw if text else "")
                return
            self._end_value()
        if mark in (CLOSE, OPEN):
            self._drop(text, "")
            self._close(OPEN if mark == OPEN else "")
        elif mark == END_KEY and text and self._state in ("key", "between"):
            self._key, self._state = text, "before value"
        elif mark == VALUE and (text if self._state == "key" else self._state == "before value" and not text):
            self._key = self._key if self._state == "before value" else text
            self._begin_value()
        elif mark == END_VALUE and text and self._state == "before value":
            self._begin_value()
            self._value(text)
            self._state, self._ending = "between", True
        elif mark == KEY:
            self._drop(text, "")
            self._state = "key"
        elif text or mark == VALUE or (mark == END_VALUE and self._state != "between"):
            self._drop(text, mark)

    def _drop(self, text: str, mark: str) -> None:
        """Take the text and the mark as content, with the key before them."""
        key = f"{KEY}{self._key}{END_KEY}" if self._state == "before value" else ""
        begun = KEY if self._state == "key" and (text or mark) else ""
        self.left += f"{key}{begun}{text}{mark}"
        self._state = "between"

    def _begin_value(self) -> None:
        assert self._arguments is not None
        self._skip = self._arguments.has(self._key)
        if self._skip:
            self.left += f"{KEY}{self._key}{END_KEY}{VALUE}"
        else:
            self._arguments.key(self._key)
        self._state, self._empty = "value", True

    def _value(self, text: str) -> None:
        assert self._arguments is not None
        self._empty &= not text
        if self._skip:
            self.left += text
        else:
            self._arguments.value(text)

    def _end_value(self) -> None:
        assert self._arguments is not None
        if self._skip:
            self.left += END_VALUE
        else:
            self._arguments.end_value()
        self._skip = self._ending = False

    def _close(self, over: str) -> None:
        assert self._arguments is not None
        if self.left and not self.opened:
            raise Malformed  # nothing of it is a call
        self._arguments.close()
        self.done, self.over = True, over

    def end(self) -> str:
        if self._state == "value":
            self._value(self._held)
            self._held = ""
        if self._state == "value" or self._ending:
            self._end_value()
        self._drop((self._text + self._held).strip(), "")
        return self.left

    def rest(self) -> str:
        return self.left


MARKS = (KEY, END_KEY, VALUE, END_VALUE, OPEN, CLOSE)
QUIET = re.compile(r"[^<\n]+")
POSSIBLE_KEY = re.compile(r"\s*[^\s<>]{0,80}\s*")
# What ends a value that has no mark for it.
ENDS = Growing(
    *(
        [*spelled(KEY), "(?P<key>", r"\s{0,2}", r"[^\s<>]{1,80}", r"\s{0,2}", ")", "(?P<mark>", *spelled(end), ")"]
        for end in (END_KEY, VALUE)
    ),
    [r"\n", "(?P<mark>", *spelled(CLOSE), ")"],
)
