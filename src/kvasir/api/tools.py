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
from kvasir.api.json_scan import Malformed, ObjectRepair, ObjectScan
from kvasir.decoding.json_schema import served_schema, whitespace_options
from kvasir.errors import RequestError, nearest
from kvasir.models.tokenizer import Tokenizer
from kvasir.technique import Technique
from kvasir.types import Grammar

PACKAGE = "kvasir.api.tool_parsers"
MAX_TOOLS = 512
NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
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
    """A reader of one JSON object ``{"name": ..., "arguments": {...}}`` for a parser, character by character.

    ``raw``: the text read before the call was announced, which becomes content if it turns out not to be a call.
    ``left``: members of the object that belong to no call, which are content as well.
    """

    def __init__(
        self, parser: ToolParser, keys: tuple[str, ...], strict: bool = False, only: Collection[str] | None = None
    ) -> None:
        self._parser = parser
        self._keys = keys
        self._strict = strict  # accept offered names only
        self._only = only  # keys that may come before the call is announced; None: any
        self._scan = ObjectScan()
        self._name: str | None = None
        self._early = ""  # arguments that came before the name
        self.raw = self.left = ""
        self.started = False
        self.opened = False
        self.done = False

    @property
    def in_string(self) -> bool:
        """Whether the next character belongs to a string or ends it."""
        return self._scan.in_string

    def feed(self, char: str) -> None:
        """Read one character. Raises Malformed when ``char`` cannot continue a call."""
        self.started = True
        self.raw += char if not self.opened else ""
        event = self._scan.feed(char)
        key = self._scan.key
        if key is not None and self._only is not None and not self.opened:
            plain = key in self._keys or event != "start" or char not in "{["
            if key not in self._only or not plain:
                raise Malformed
        if key == "name" and event == "value":
            self._take_name(self._scan.value())
        elif key in self._keys:
            self._take_arguments(char, event)
        elif key is not None and key not in PLAIN_KEYS and event is not None:
            begun = f"{', ' * bool(self.left)}{json.dumps(key, ensure_ascii=False)}: " if event == "start" else ""
            self.left += begun + char
        if event == "end":
            self._close()

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


def functions(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [tool["function"] for tool in tools]


def validate(tools: Any, tool_choice: Any = None) -> None:
    """Check ``tools`` and ``tool_choice`` of a chat request. Raises RequestError 400 that names the place."""
    if tools is not None:
        _check_tools(tools)
    named = _named(tool_choice)
    if (named or tool_choice == "required") and not tools:
        raise RequestError("tool_choice asks for a call, but there are no tools", param="tool_choice")
    if named:
        names = [f["name"] for f in functions(tools)]
        if named not in names:
            raise RequestError(
                f"tool_choice names '{named[:80]}', which is not among the tools.{nearest(named[:80], names)}",
                param="tool_choice.function.name",
            )


def _check_tools(tools: Any) -> None:
    if not isinstance(tools, (list, tuple)):
        raise RequestError("tools must be a list", param="tools")
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"{len(tools)} tools; at most {MAX_TOOLS} fit in a request", param="tools")
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping):
            raise RequestError(
                f"{where} must be {{type: 'function', function: {{name, description, parameters}}}}", param=where
            )
        if tool.get("type", "function") != "function":
            raise RequestError(
                f"{where}.type is '{str(tool['type'])[:40]}'; only 'function' is supported", param=f"{where}.type"
            )
        name = function.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise RequestError(
                f"{where}.function.name must be 1 to 128 of the characters A-Z a-z 0-9 _ . -",
                param=f"{where}.function.name",
            )
        if name in seen:
            raise RequestError(f"two tools are named '{name}'", param=f"{where}.function.name")
        seen.add(name)
        _check_function(function, f"{where}.function")


def _check_function(function: Mapping[str, Any], where: str) -> None:
    for key, kind in (("description", str), ("strict", bool), ("parameters", Mapping)):
        if function.get(key) is not None and not isinstance(function[key], kind):
            raise RequestError(
                f"{where}.{key} must be {'an object' if kind is Mapping else f'a {kind.__name__}'}",
                param=f"{where}.{key}",
            )
    if (function.get("parameters") or {}).get("type", "object") != "object":
        raise RequestError(f"{where}.parameters must be a JSON schema of type object", param=f"{where}.parameters")


def _named(tool_choice: Any) -> str | None:
    """The function that ``tool_choice`` names, or None for none, auto and required. Raises RequestError."""
    if tool_choice is None or tool_choice in ("none", "auto", "required"):
        return None
    function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or tool_choice.get("type") != "function":
        raise RequestError(
            "tool_choice must be none, auto, required or {type: 'function', function: {name}}", param="tool_choice"
        )
    return name


def forces(tool_choice: Any) -> bool:
    """Whether ``tool_choice`` asks for a call."""
    return tool_choice == "required" or _named(tool_choice) is not None


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
    (exactly one if not ``parallel``), a named function exactly once.

    ``text_format``: the grammar of JSON that text must follow. A forced call leaves no text. With ``auto`` the model
    either answers in that format or makes calls. Without it there is no grammar (None) for ``auto`` and ``none``, where
    the parser finds the calls that the model makes.

    ``dropped``: collects what the grammar leaves out of the schemas of functions with ``strict: false``. Raises
    RequestError when the model's format is not known, or when parameters are not a schema that we can use.
    """
    validate(tools, tool_choice)
    named = _named(tool_choice)
    forced = forces(tool_choice)
    if not tools or tool_choice == "none" or not (forced or text_format):
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
        if named in (None, f["name"])
    }
    text = cls.grammar(list(wanted.values()), parallel and not named, tokenizer)
    if not forced:
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
