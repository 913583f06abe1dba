"""[TOOL_CALLS] before a JSON list of calls, or before each name[ARGS]{...} (Mistral, Magistral, Devstral)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvasir.api.calls import call_openings
from kvasir.api.calls.json_calls import JsonCalls
from kvasir.api.calls.json_scan import WHITESPACE, Malformed
from kvasir.api.calls.marked_calls import (
    NEXT_OBJECTS,
    CallReader,
    MarkedCalls,
    NameScan,
    ObjectArguments,
    OneOf,
    restarts,
)
from kvasir.api.calls.tools import CallScan, ToolParser, call_rules, embedded, mark, quoted, schema_of
from kvasir.models.tokenizer import Tokenizer

OPEN, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class Mistral(MarkedCalls):
    """The parser of both forms. Tokenizers up to v7 have the list, later ones the token [ARGS]."""

    marks = opens = (OPEN,)
    shown = (ID, ARGS)
    restarts = restarts((), *NEXT_OBJECTS, *call_openings.MISTRAL)

    def awaited(self) -> Sequence[str]:
        return (OPEN, "{") if self._after_call else (OPEN,)

    def reader(self, mark: str) -> Calls:
        made = Calls(self)
        if mark == "{":  # in a list whose previous call broke off
            made.feed("[")
            made.feed(mark)
        return made

    @classmethod
    def grammar(cls, functions: Sequence[Mapping[str, Any]], parallel: bool, tokenizer: Tokenizer) -> str:
        start = mark(OPEN, tokenizer)
        if not tokenizer.is_added(ARGS):
            more = ' (", " call)*' if parallel else ""
            return f'start: {start} "[" call{more} "]"\n{call_rules(functions, cls.arguments_key)}'
        lines = [
            f"start: call{'+' if parallel else ''}",
            "call: " + " | ".join(f"call_{i}" for i in range(len(functions))),
        ]
        for i, function in enumerate(functions):
            lines += [
                f"call_{i}: {start} {quoted(function['name'])} {mark(ARGS, tokenizer)} arguments_{i}",
                f"arguments_{i}: {embedded(schema_of(function))}",
            ]
        return "\n".join(lines)


class Calls(CallReader):
    """A reader of what follows the mark: a list of JSON calls, one JSON call, or a name with its arguments."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser
        self._state = "start"
        self._json: JsonCalls | None = None  # of a list of calls, or of one alone
        self._name = NameScan(parser)
        self._mark = OneOf(ID, ARGS)
        self._arguments: ObjectArguments | None = None
        self.opened = self.done = False

    def rest(self) -> str:
        return self._json.rest() if self._json is not None else ""

    end = rest

    @property
    def inside(self) -> bool:
        in_json = self._json.inside if self._json is not None else False
        return self._arguments.inside if self._arguments is not None else in_json

    def feed(self, char: str) -> None:
        if self._arguments is not None:
            self._arguments.feed(char)
            self.opened, self.done = self._arguments.opened, self._arguments.done
        elif self._json is not None:
            self._in_json(self._json, char)
        elif self._state == "start":
            self._start(char)
        elif self._state == "name":
            if not self._name.feed(char):
                self._after_name(char)
        elif self._state == "id":
            if char == "[" or not (char.isalnum() or char in "_-"):
                self._mark = OneOf(ARGS)
                self._after_name(char)
        else:
            self._after_name(char)

    def _start(self, char: str) -> None:
        if char in "[{":
            self._json = JsonCalls(self._parser, self._scan)
            self._in_json(self._json, char)
        elif char not in WHITESPACE:
            self._state = "name"
            if not self._name.feed(char):
                raise Malformed

    def _scan(self) -> CallScan:
        return CallScan(self._parser, (self._parser.arguments_key, "parameters"))

    def _in_json(self, json: JsonCalls, char: str) -> None:
        json.feed(char)
        self.opened, self.done = json.opened, json.done

    def _after_name(self, char: str) -> None:
        """Read the marks between a name and its arguments, which some tokenizers leave out."""
        self._state = "marks"
        if char == "{":
            self._arguments = ObjectArguments(self._parser, self._name.name)
            self._arguments.feed(char)
            self.opened = self._arguments.opened
        elif found := self._mark.feed(char):
            self._state, self._mark = ("id" if found == ID else "marks"), OneOf(ARGS)
