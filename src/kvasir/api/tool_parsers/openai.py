"""Messages of harmony's commentary channel that go to=functions.name, with JSON arguments (gpt-oss)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvasir.api.harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, START, Header
from kvasir.api.json_scan import Malformed
from kvasir.api.marked_calls import CallReader, MarkedCalls, ObjectArguments
from kvasir.api.tools import NAME, ToolParser, embedded, mark, quoted, schema_of
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
        self.opened = self.done = False

    def feed(self, char: str) -> None:
        if self._arguments is None:
            if self._header.feed(char):
                to = self._header.recipient
                name = to.removeprefix(FUNCTIONS)
                if name == to or self._header.channel == "final" or not NAME.fullmatch(name):
                    raise Malformed
                self._arguments = ObjectArguments(self._parser, name)
            elif len(self._header.text) > 300 or "\n" in self._header.text or self._header.restart:
                raise Malformed
            return
        self._arguments.feed(char)
        self.opened, self.done = self._arguments.opened, self._arguments.done
