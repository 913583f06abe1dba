"""Messages of harmony's commentary channel that go to=functions.name, with JSON arguments (gpt-oss)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvasir.api.calls.growing import spelled
from kvasir.api.calls.harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, START, Header
from kvasir.api.calls.json_scan import WHITESPACE, Malformed
from kvasir.api.calls.marked_calls import CallReader, MarkedCalls, ObjectArguments, OneOf, Until, restarts
from kvasir.api.calls.tools import NAME, ToolParser, embedded, mark, quoted, schema_of
from kvasir.models.tokenizer import Tokenizer

FUNCTIONS = "functions."


class OpenAI(MarkedCalls):
    """The parser of this format. The recipient may come before the channel or after it. Other messages are the
    business of the reasoning parser of this format, and content to this one."""

    marks = ("<|channel|>commentary", "to=functions.")
    opens = (CHANNEL, START, "to=")
    closes = (CALL, END)
    shown = (CHANNEL, START, MESSAGE, END, CALL, CONSTRAIN)
    from_start = True
    restarts = restarts(
        closes, spelled(START + "assistant"), *(spelled(CHANNEL + c) for c in ("analysis", "commentary", "final"))
    )

    def reader(self, mark: str) -> Call:
        return Call(self, mark)

    @classmethod
    def grammar(cls, functions: Sequence[Mapping[str, Any]], parallel: bool, tokenizer: Tokenizer) -> str:
        """One call, after one message of thinking: a call ends the answer, so there are no parallel ones."""

        def written(text: str) -> str:
            return mark(text, tokenizer)

        thinking = (
            f'({written(CHANNEL)} "analysis" {written(MESSAGE)} /(?s:.*)/ {written(END)} {written(START)} "assistant")?'
        )
        lines = [f"start: {thinking} call", "call: " + " | ".join(f"call_{i}" for i in range(len(functions)))]
        for i, function in enumerate(functions):
            to = quoted(f"commentary to={FUNCTIONS}{function['name']} ")
            lines += [
                f'call_{i}: {written(CHANNEL)} {to} {written(CONSTRAIN)} "json" {written(MESSAGE)} arguments_{i}',
                f"arguments_{i}: {embedded(schema_of(function))}",
            ]
        return "\n".join(lines)


class Call(CallReader):
    """A reader of one message: its header, then the arguments."""

    def __init__(self, parser: ToolParser, mark: str) -> None:
        self._parser = parser
        self._header = Header(mark)
        self._arguments: ObjectArguments | None = None
        self._name = ""
        self._begun = False  # something other than white space came after the header
        self._empty = False  # the mark that ends the message began where arguments were expected
        self._end = OneOf(CALL, END)
        self._code: Until | None = None  # code of to=python, up to a mark
        self.opened = self.done = False

    @property
    def inside(self) -> bool:
        return self._arguments is not None and self._arguments.inside

    def feed(self, char: str) -> None:
        if self._arguments is None:
            if self._header.feed(char):
                self._name = self._header.recipient.removeprefix(FUNCTIONS)
                if not self._header.calls or not NAME.fullmatch(self._name):
                    raise Malformed
                self._arguments = ObjectArguments(self._parser, self._name)
                for more in self._header.body:
                    self.feed(more)
            elif not self._header.possible:
                raise Malformed
            return
        if self._code is not None:
            self._in_code(self._code, char)
            return
        if not self._begun and char not in WHITESPACE:
            self._begun = True
            if self._name == "python" and char not in "{<":
                self._parser.open_call(self._name)
                self._parser.argue('{"code": "')
                self.opened, self._code = True, Until(CALL, END, START)
                self._in_code(self._code, char)
                return
        if not self.opened and (char == "<" or self._empty):
            self._empty = True
            if self._end.feed(char):
                self.completes()
                self.opened, self.done = False, True
            return
        self._arguments.feed(char)
        self.opened, self.done = self._arguments.opened, self._arguments.done

    def _in_code(self, until: Until, char: str) -> None:
        text, ended = until.feed(char)
        self._parser.argue(json.dumps(text, ensure_ascii=False)[1:-1] + ('"}' if ended else ""))
        if ended:
            self.opened, self.done = False, True

    def completes(self) -> bool:
        """Announce a call without arguments."""
        if self._arguments is None or self.done or (self._begun and not self._empty):
            return False
        self._parser.open_call(self._name)
        self._parser.argue("{}")
        self.done = True
        return True
