"""Tool calls: parsers that find them in an answer, and grammars that force them.

A parser reads the answer one character at a time, so calls and content do not depend on how the stream is cut. A call
is announced once its name and the first character of its arguments are read; its arguments then stream as the model
writes them. Text that is not a well-formed call becomes content; it never raises and is never lost.
"""

from __future__ import annotations

import json
import re
import uuid
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvasir import technique
from kvasir.api.calls.choice import NAME, functions, validate
from kvasir.api.calls.json_scan import Malformed, ObjectRepair, ObjectScan
from kvasir.decoding.json_schema import served_schema, whitespace_options
from kvasir.errors import RequestError
from kvasir.models.tokenizer import Tokenizer
from kvasir.technique import Technique
from kvasir.types import Grammar

PACKAGE = "kvasir.api.calls.tool_parsers"
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
LARK = re.compile(r"[/~{}]")
LARK_TOKEN = re.compile(r"<[\w/|-]+>", re.ASCII)  # a token that Lark can name
START = re.compile(r"^start\s*:", re.MULTILINE)
PLAIN_KEYS = ("name", "type", "id")  # of a call as a JSON object, besides its arguments
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(slots=True)
class CallDelta:
    """The start (``name`` and ``id`` are set) or the continuation of call number ``index``.
    ``arguments``: JSON text."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class ToolParser(Technique):
    """A parser of one answer. ``schemas``: the offered functions by name, each with the JSON schema of its parameters;
    None when they are not known. A subclass reads characters in ``feed`` and ``finish`` and reports through ``say``
    (content), ``open_call`` and ``argue``.

    ``marks``: texts that identify this format in a chat template or among the special tokens (``auto``; the format with
    most of its marks there is chosen). ``shown``: further special tokens that the parser reads. ``also``: other names.
    ``from_start``: the grammar describes the answer from its first token, thinking included.
    """

    marks: ClassVar[tuple[str, ...]] = ()
    shown: ClassVar[tuple[str, ...]] = ()
    also: ClassVar[tuple[str, ...]] = ()
    arguments_key: ClassVar[str] = "arguments"
    from_start: ClassVar[bool] = False

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        super().__init__()
        self.schemas = schemas or {}
        self.names: Collection[str] | None = None if schemas is None else frozenset(schemas)
        self.num_calls = 0
        self.cut = False  # a call broke off, and its arguments were closed for it
        self._writer = ObjectRepair()  # of the last call's arguments
        self._out: list[str | CallDelta] = []

    def push(self, text: str, final: bool = False) -> list[str | CallDelta]:
        """Take text; return the pieces of content and of calls it adds, in order. ``final``: no more text comes."""
        self._out = []
        for char in text:
            self.feed(char)
        if final:
            self.finish()
        return self._out

    @abstractmethod
    def feed(self, char: str) -> None:
        """Read one character."""
        raise NotImplementedError

    @abstractmethod
    def finish(self) -> None:
        """Report everything that is held back, at the end of the answer."""
        raise NotImplementedError

    @classmethod
    @abstractmethod
    def grammar(cls, functions: Sequence[Mapping[str, Any]], parallel: bool, tokenizer: Tokenizer) -> str:
        """A Lark grammar (llguidance's dialect) of one call of ``functions``, or of one or more."""
        raise NotImplementedError

    def say(self, text: str) -> None:
        """Report content."""
        if text and self._out and isinstance(self._out[-1], str):
            self._out[-1] += text
        elif text:
            self._out.append(text)

    def open_call(self, name: str) -> None:
        """Report the start of a call."""
        self._out.append(CallDelta(self.num_calls, f"call_{uuid.uuid4().hex[:24]}", name))
        self.num_calls += 1
        self._writer = ObjectRepair()

    def argue(self, text: str) -> None:
        """Report more arguments of the last call."""
        self._add("".join(map(self._writer.feed, text)))

    def end_call(self) -> str:
        """End the last call, which broke off, so that its arguments are JSON; return the text that found no place."""
        closing = self._writer.close()
        self.cut |= bool(closing)
        self._add(closing)
        return self._writer.held

    def _add(self, text: str) -> None:
        last = self._out[-1] if self._out else None
        if isinstance(last, CallDelta) and last.index == self.num_calls - 1:
            last.arguments += text
        elif text:
            self._out.append(CallDelta(self.num_calls - 1, arguments=text))


class CallScan:
    """A reader of one JSON object ``{"name": ..., "arguments": {...}}`` for a parser, character by character. The key
    of the name may be ``function``, and the call may be an object that is the value of this key."""

    def __init__(
        self,
        parser: ToolParser,
        keys: tuple[str, ...],
        strict: bool = False,
        only: Collection[str] | None = None,
        nested: bool = False,
    ) -> None:
        self._parser = parser
        self._keys = keys
        self._strict = strict  # accept offered names only
        self._only = only  # keys that may come before the call is announced; None: any
        self._nested = nested  # this object is the value of "function" of another one
        self._scan = ObjectScan()
        self._name: str | None = None
        self._early = ""  # arguments that came before the name
        self._function = False  # the value of "function" that is read belongs to the call
        self._inner: CallScan | None = None  # of the value of "function" that is the call
        self._left = ""  # other members that came outside of ``_inner``
        self.opened = False
        self.done = False

    @property
    def in_string(self) -> bool:
        """Whether the next character belongs to a string or ends it."""
        return self._scan.in_string

    @property
    def left(self) -> str:
        """Members of the object that belong to no call: they are content."""
        return ", ".join(filter(None, (self._inner.left if self._inner is not None else "", self._left)))

    def feed(self, char: str) -> None:
        """Read one character. Raises Malformed when ``char`` cannot continue a call."""
        event = self._scan.feed(char)
        key = self._scan.key
        if key is not None and self._only is not None and not self.opened:
            plain = key in self._keys or event != "start" or char not in "{["
            if key not in self._only or not (plain or key == "function"):
                raise Malformed
        if key == "function" and event is not None and self._takes_function(event):
            self._take_function(char, event)
        elif key == "function" and self._only is not None and event == "start" and not self.opened:
            raise Malformed
        elif key == "name" and event == "value" and self._inner is None:
            self._take_name(self._scan.value())
        elif key in self._keys and self._inner is None:
            self._take_arguments(char, event)
        elif key is not None and event is not None and (key not in PLAIN_KEYS or (key == "name" and self._inner)):
            begun = f"{', ' * bool(self._left)}{json.dumps(key, ensure_ascii=False)}: " if event == "start" else ""
            self._left += begun + char
        if event == "end":
            self._close()

    def _takes_function(self, event: str) -> bool:
        """Whether the value of "function", of which a character was read, belongs to the call."""
        if event == "start":
            starts = ('"',) if self._nested or self._early else ('"', "{")
            self._function = self._name is None and self._inner is None and self._scan.text in starts
        return self._function

    def _take_function(self, char: str, event: str) -> None:
        if self._scan.text.startswith('"'):
            if event == "value":
                self._take_name(self._scan.value())
            return
        if self._inner is None:
            self._inner = CallScan(self._parser, self._keys, self._strict, self._only, nested=True)
        self._inner.feed(char)
        self.opened = self._inner.opened

    def _take_name(self, name: Any) -> None:
        offered = self._parser.names
        if self._name is not None or not isinstance(name, str) or not NAME.fullmatch(name):
            raise Malformed
        if self._strict and offered is not None and name not in offered:
            raise Malformed
        self._name = name
        if self._early:
            self._open(self._early)

    def _take_arguments(self, char: str, event: str | None) -> None:
        scan = self._scan
        if event == "start" and (scan.seen(self._keys) > 1 or char not in '{"n'):
            raise Malformed
        if scan.text == "n":  # null stands for no arguments
            self._arguments("{}" if event == "value" else "")
        elif scan.text.startswith('"'):  # some models write the arguments as a string of JSON
            if event == "value":
                self._arguments(_object_text(scan.value()))
        elif event in ("start", "part", "value"):
            self._arguments(char)

    def _arguments(self, text: str) -> None:
        if not text:
            return
        if self.opened:
            self._parser.argue(text)
        elif self._name is None:
            self._early += text
        else:
            self._open(text)

    def _open(self, arguments: str) -> None:
        assert self._name is not None
        self._parser.open_call(self._name)
        self._parser.argue(arguments)
        self.opened = True

    def _close(self) -> None:
        self.done = True
        if self.opened:
            return
        if self._name is None or (self._strict and self._parser.names is None):
            raise Malformed
        self._open("{}")  # a function without parameters


def _object_text(value: str) -> str:
    try:
        value.encode()  # a lone surrogate cannot be sent
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        raise Malformed from None
    if not isinstance(parsed, dict):
        raise Malformed
    return value


# ------------------------------------------------------------------------------------------------- which parser, checks


def choose(name: str, tokenizer: Tokenizer) -> type[ToolParser] | None:
    """The parser class for ``--tool-call-parser NAME``, or None when no format is known or ``none`` was asked for.

    ``auto`` looks for the formats' marks in the chat templates, then among the added tokens, and takes the format with
    most marks there: several formats share ``<tool_call>``. Raises ConfigError for an unknown name.
    """
    if name == "none":
        return None
    if name != "auto":
        return technique.find_also(PACKAGE, name, ToolParser)
    classes = technique.of_all(PACKAGE, lambda n: technique.find(PACKAGE, n, ToolParser)[0])
    literals = "\0".join(t.literals for t in tokenizer.templates.values())
    for found in (
        lambda mark: mark in literals,
        lambda mark: bool(tokenizer.templates) and tokenizer.token_to_id(mark) is not None,
    ):
        best = max(classes, key=lambda cls: sum(map(found, cls.marks)), default=None)
        if best is not None and any(map(found, best.marks)):
            return best
    return None


def parser(cls: type[ToolParser] | None, tools: Sequence[Mapping[str, Any]]) -> ToolParser | None:
    """A parser for one answer, given the request's ``tools``; None when this model has no known format."""
    return cls({f["name"]: f.get("parameters") or {} for f in functions(tools)}) if cls else None


def grammar(
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: Any,
    cls: type[ToolParser] | None,
    tokenizer: Tokenizer,
    parallel: bool = True,
    after: tuple[int, ...] = (),
    *,
    text_format: Grammar | None = None,
    dropped: list[str] | None = None,
) -> Grammar | None:
    """The grammar that makes the model call what ``tool_choice`` asks for: ``required`` one or more of the tools
    (exactly one if not ``parallel``), a named function exactly once, ``allowed_tools`` some of those that it names.

    ``text_format``: the grammar of JSON that text must follow. A forced call leaves no text. With ``auto`` the model
    either answers in that format or makes calls. Without it there is no grammar (None) for ``auto`` and ``none``, where
    the parser finds the calls that the model makes.

    ``dropped``: collects what the grammar leaves out of the schemas of functions with ``strict: false``. Raises
    RequestError when the model's format is not known, or when parameters are not a schema that we can use.
    """
    choice = validate(tools, tool_choice)
    if not tools or choice.mode == "none" or not (choice.forces or text_format):
        return None
    if cls is None:
        raise RequestError(
            "this model's tool-call format is not known; start the server with --tool-call-parser and one of "
            + ", ".join(technique.own(PACKAGE)),
            param="tool_choice",
            code="no_tool_parser",
        )
    from kvasir.decoding.grammar import MAX_TEXT_BYTES
    from kvasir.decoding.grammar_source import check_schema

    places = {f"tools[{i}].function.parameters": function for i, function in enumerate(functions(tools))}
    for place, function in places.items():
        check_schema(function.get("parameters"), place)
    wanted = {
        place: {**f, "parameters": _served(f, place, dropped)}
        for place, f in places.items()
        if choice.allows(f["name"])
    }
    text = cls.grammar(list(wanted.values()), parallel and choice.mode != "named", tokenizer)
    if not choice.forces:
        if cls.from_start:
            raise RequestError(
                "with this model's format, a response format cannot be combined with tools that it may call or not: "
                "force a call by tool_choice, or leave one of the two out",
                param="response_format",
                code="unsupported_parameter",
            )
        # The parser's rule to start becomes one of two ways to start.
        calls, answer = START.sub("only_calls:", text, count=1), _schema_in(text_format)
        text = f"start: only_calls | only_text\n{calls}\nonly_text: {embedded(answer, text_format.whitespace)}"
    if len(text) > MAX_TEXT_BYTES:
        raise RequestError(
            f"the schemas of {len(wanted)} tools make a grammar of {len(text)} bytes, more than {MAX_TEXT_BYTES}",
            param="tools" if len(wanted) > 1 else next(iter(wanted)),
            code="invalid_grammar",
        )
    # Whether it compiles is tried elsewhere: a schema may crash the library. An error then names the tool at fault.
    parts = tuple((place, json.dumps(schema_of(function))) for place, function in wanted.items())
    return Grammar("lark", text, () if cls.from_start else after, parts=parts)


def _served(function: Mapping[str, Any], place: str, dropped: list[str] | None) -> dict[str, Any] | None:
    """The function's parameters with the keywords that a grammar can hold."""
    if function.get("parameters") is None:
        return None
    found: list[str] | None = [] if function.get("strict") is False and dropped is not None else None
    schema = served_schema(function["parameters"], place, found)
    if found:
        dropped += [f"{place}{path.removeprefix('#')}" for path in found]
    return schema


def _schema_in(text_format: Grammar) -> Any:
    return {"type": "object"} if text_format.kind == "json_object" else json.loads(text_format.text)


def embedded(schema: Any, whitespace: str = "fixed") -> str:
    """A JSON schema as a term of a Lark grammar. ``whitespace``: see ``Grammar``."""
    if isinstance(schema, bool):
        schema = {}  # "false" is refused where the client's schema is read
    return "%json " + quoted({**schema, "x-guidance": whitespace_options(whitespace)})


def schema_of(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", **(function.get("parameters") or NO_ARGUMENTS)}


def mark(text: str, tokenizer: Tokenizer) -> str:
    """Write ``text`` (like <tool_call>) in a Lark grammar: as an added token if there is one, else as its characters.

    Lark has names for tokens in angle brackets only; others are written with their id."""
    if not tokenizer.is_added(text):
        return json.dumps(text)
    return text if LARK_TOKEN.fullmatch(text) else f"<[{tokenizer.token_to_id(text)}]>"


def call_rules(wanted: Sequence[Mapping[str, Any]], arguments_key: str) -> str:
    """Lark rules in which ``call`` is a JSON object that calls one of ``wanted``, with the name first."""
    lines = ["call: " + " | ".join(f"call_{i}" for i in range(len(wanted)))]
    for i, function in enumerate(wanted):
        # The brace is a term of its own: the library reads terms greedily, and other JSON may start with a brace, too.
        head = '"{" ' + json.dumps(f'"name": "{function["name"]}", "{arguments_key}": ')
        lines += [f'call_{i}: {head} arguments_{i} "}}"', f"arguments_{i}: {embedded(schema_of(function))}"]
    return "\n".join(lines)


def quoted(value: Any) -> str:
    """JSON text of a value, a string for example, in which nothing looks like Lark: no /regex/, {repeat} or ~range."""
    return STRING.sub(lambda m: LARK.sub(lambda c: f"\\u{ord(c[0]):04x}", m[0]), json.dumps(value, indent=0))
