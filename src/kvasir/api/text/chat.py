"""Chat messages: checks of those that come in, and assembly of replies from text into reasoning, content and tool
calls."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvasir.api.calls.reasoning import ReasoningParser
from kvasir.api.calls.tools import CallDelta, ToolParser
from kvasir.api.text.ignored import tell_ignored
from kvasir.errors import RequestError, nearest

ROLES = ("system", "developer", "user", "assistant", "tool")
KEYS = {
    "assistant": {"role", "content", "name", "tool_calls", "reasoning_content", "reasoning", "refusal"},
    "tool": {"role", "content", "name", "tool_call_id"},
}
# Keys that clients send back with empty values, which are dropped.
EMPTY = {"refusal", "annotations", "audio", "function_call", "tool_calls", "prefix", "partial"}
# Keys that would change the answer and are not served, and keys of another role. All other unknown keys are ignored.
MEANT = {
    "assistant": {"function_call", "prefix", "partial"},
    "tool": {"function_call", "prefix", "partial", "tool_calls", "reasoning_content", "reasoning"},
}
# Parts of an assistant's content that hold its thinking, and the fields with the text. Nobody but the service that sent
# it can read a redacted one.
THOUGHTS: dict[str, tuple[str, ...]] = {
    "thinking": ("thinking",),
    "reasoning": ("text", "reasoning", "summary"),
    "redacted_thinking": (),
}
# Keys that ask for caching, which happens anyway.
HINTS = {"cache_control"}


def check_messages(messages: list[dict[str, Any]], where: str = "messages") -> list[dict[str, Any]]:
    """Return messages in the form that chat templates take.

    Raises RequestError that names the place, like ``messages[2].tool_call_id``.
    """
    return [check_message(m, f"{where}[{i}]") for i, m in enumerate(messages)]


def texts(messages: list[dict[str, Any]]) -> Iterator[str]:
    """Yield every text in the content of the messages."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                yield text


def check_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Check one message, which stands at the place ``where`` of the body; see ``check_messages``."""
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ROLES:
        raise RequestError(
            f"{where}.role must be one of {', '.join(ROLES)}.{nearest(str(role)[:40], ROLES)}", param=f"{where}.role"
        )
    message = {k: v for k, v in message.items() if v is not None and k not in HINTS and not (k in EMPTY and not v)}
    _without_unknown(message, role, where)
    for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        if name in message and not isinstance(message[name], str):
            raise RequestError(f"{where}.{name} must be a string", param=f"{where}.{name}")
    if role == "assistant" and (thoughts := _thoughts(message.get("content"), where)):
        message.setdefault("reasoning_content", message.get("reasoning") or thoughts)
    message["content"] = _checked_content(message.get("content"), role, where)
    if role == "tool" and not message.get("tool_call_id"):
        raise RequestError(
            f"{where}.tool_call_id is required: it names the call that this message answers",
            param=f"{where}.tool_call_id",
            code="missing_parameter",
        )
    if role == "assistant" and isinstance(refusal := message.pop("refusal", None), str) and not message["content"]:
        message["content"] = refusal  # what the model of another service said in place of an answer
    if "reasoning" in message:
        message.setdefault("reasoning_content", message.pop("reasoning"))
    if "tool_calls" in message:
        message["tool_calls"] = _checked_calls(message["tool_calls"], f"{where}.tool_calls")
    # Templates do not know the role developer, which is OpenAI's newer word for system.
    return {**message, "role": "system"} if role == "developer" else message


def _without_unknown(message: dict[str, Any], role: str, where: str) -> None:
    """Remove keys that mean nothing here from ``message``: histories come back with fields of other services and of
    the clients themselves. Raises RequestError for a key that would change the answer."""
    meant = MEANT.get(role, MEANT["tool"])
    for name in sorted(message.keys() - KEYS.get(role, {"role", "content", "name"})):
        if name in meant:
            raise RequestError(
                f"{where}: '{name}' is not supported in a message of the role {role}",
                param=f"{where}.{name}",
                code="unsupported_parameter",
            )
        tell_ignored(name)
        del message[name]


def _checked_content(content: Any, role: str, where: str) -> str | list[Any]:
    """The content as text or parts. Assistants and tools may have said nothing. Raises RequestError."""
    if content is None or content == []:
        if role in ("assistant", "tool"):
            return ""
        raise RequestError(f"{where}.content is required", param=f"{where}.content", code="missing_parameter")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where}.content must be a string or a list of parts", param=f"{where}.content")
    if role != "assistant":
        return content
    return [_refusal_as_text(part) for part in content if _kind(part) not in THOUGHTS] or ""


def _kind(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if isinstance(kind, str) else None


def _thoughts(content: Any, where: str) -> str:
    """The thinking that stands in parts of an assistant's content, as some services send it back. Raises
    RequestError."""
    found = []
    for i, part in enumerate(content if isinstance(content, list) else ()):
        if _kind(part) not in THOUGHTS:
            continue
        for name in THOUGHTS[part["type"]]:
            inner = part.get(name)
            for text in inner if isinstance(inner, list) else [inner]:
                text = text.get("text") if isinstance(text, dict) else text
                if text is not None and not isinstance(text, str):
                    raise RequestError(
                        f"{where}.content[{i}].{name} must be text", param=f"{where}.content[{i}].{name}"
                    )
                found.append(text or "")
    return "".join(found)


def _refusal_as_text(part: Any) -> Any:
    if isinstance(part, dict) and part.get("type") == "refusal" and isinstance(part.get("refusal"), str):
        return {"type": "text", "text": part["refusal"]}
    return part


@contextlib.contextmanager
def only_functions(tools: list[dict[str, Any]] | None, warnings: list[str]) -> Iterator[list[dict[str, Any]] | None]:
    """Yield the function tools of a request. Tools that a provider would run itself (web search, MCP) are dropped,
    which adds to ``warnings``: the model answers without them. Errors inside the block name the client's places."""
    kept, places = [], []
    for i, tool in enumerate(tools or []):
        kind = tool.get("type", "function")
        if not isinstance(kind, str):
            raise RequestError(f"tools[{i}].type must be a string", param=f"tools[{i}].type")
        if kind == "function":
            kept.append({k: v for k, v in tool.items() if k not in HINTS})
            places.append(str(i))
        else:
            warnings.append(f"tools[{i}] of type '{kind[:40]}' was dropped: only functions are served")
    try:
        yield kept or None
    except RequestError as e:
        if len(kept) < len(tools or []):
            e.param, e.message = (
                text and re.sub(r"\btools\[(\d+)\]", lambda m: f"tools[{places[int(m[1])]}]", text)
                for text in (e.param, e.message)
            )
        raise


def _checked_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return tool calls as templates take them: with a type and arguments as text. Raises RequestError."""
    if not isinstance(calls, list):
        raise RequestError(f"{where} must be a list", param=where)
    return [_checked_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _checked_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    given = {k: v for k, v in call.items() if v is not None} if isinstance(call, dict) else {}
    if (
        not isinstance(function, dict)
        or given.get("type", "function") != "function"
        or not isinstance(given.get("id", ""), str)
    ):
        raise RequestError(f"{where} must be {{id, type: 'function', function: {{name, arguments}}}}", param=where)
    if not isinstance(function.get("name"), str):
        raise RequestError(f"{where}.function.name must be a string", param=f"{where}.function.name")
    arguments = arguments_text(function.get("arguments"), f"{where}.function.arguments")
    return {**given, "type": "function", "function": {**function, "arguments": arguments}}


def arguments_text(arguments: Any, where: str) -> str:
    """The arguments of a call as JSON text: clients also send the object itself, or null for none. Raises
    RequestError."""
    if isinstance(arguments, str):
        return arguments
    if arguments is None or isinstance(arguments, dict):
        return json.dumps(arguments or {}, ensure_ascii=False)
    raise RequestError(f"{where} must be a string of JSON or an object", param=where)


@dataclass(slots=True)
class Call:
    """A tool call so far; ``arguments`` is JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Piece:
    """A piece of one message: some reasoning, some content, or the start
    (``started``) or continuation of call ``call``."""

    kind: Literal["reasoning", "content", "call"]
    text: str = ""
    call: int = 0
    started: Call | None = None


class Message:
    """One assistant message as it grows. Streams send its pieces, collected replies the whole message."""

    def __init__(
        self,
        reasoning_parser: ReasoningParser | None = None,
        tool_parser: ToolParser | None = None,
        parallel: bool = True,
        end_of_reasoning: tuple[int, ...] = (),
    ) -> None:
        self.reasoning = ""
        self.content = ""
        self.calls: list[Call] = []
        self._reasoning_parser = reasoning_parser
        self._tool_parser = tool_parser
        self._parallel = parallel
        self._end = list(end_of_reasoning)
        self._tokens: list[int] = []  # tokens that may be reasoning, up to the mark that ends it
        self._ended = not self._end

    def push(self, text: str, token_ids: list[int], final: bool) -> list[Piece]:
        """Take text and its tokens; return the pieces they make. ``final``:
        nothing follows, so nothing is held back."""
        self._count(token_ids)
        pieces, parser = [], self._reasoning_parser
        for thought, content in [("", text)] if parser is None else parser.push(text, final):
            if thought:
                self.reasoning += thought
                pieces.append(Piece("reasoning", thought))
            pieces += self._answer(content, False)
        return pieces + self._answer("", True) if final else pieces

    def _answer(self, text: str, final: bool) -> list[Piece]:
        """The pieces of text behind the reasoning: content and calls."""
        if self._tool_parser is not None:
            parts = self._tool_parser.push(text, final)
        else:
            parts = [text] if text else []
        return [self._piece(part) for part in parts if isinstance(part, str) or self._parallel or part.index == 0]

    def _piece(self, part: str | CallDelta) -> Piece:
        if isinstance(part, str):
            self.content += part
            return Piece("content", part)
        if part.name is None:
            self.calls[part.index].arguments += part.arguments
            return Piece("call", part.arguments, part.index)
        call = Call(part.id or "", part.name, part.arguments)
        self.calls.append(call)
        return Piece("call", part.arguments, part.index, call)

    def _count(self, token_ids: list[int]) -> None:
        for token in token_ids if not self._ended else ():
            self._tokens.append(token)
            if self._tokens[-len(self._end) :] == self._end:
                self._ended = True
                return

    @property
    def reasoning_tokens(self) -> int:
        """Number of tokens of the reasoning, its marks included; 0 for a message without reasoning."""
        return len(self._tokens) if self.reasoning else 0

    @property
    def cut(self) -> bool:
        """Whether a call broke off, so that its arguments were closed for it."""
        return self._tool_parser is not None and self._tool_parser.cut

    def finish_reason(self, reason: str) -> str:
        """The finish reason for clients: ``tool_calls`` when the message ended by itself and all its calls are complete
        (a stop string may have cut the last one)."""
        complete = self.calls and not self.cut and all(whole(call.arguments) for call in self.calls)
        return "tool_calls" if complete and reason == "stop" else reason


def whole(arguments: str) -> bool:
    """Whether a call's arguments are complete: JSON that was cut short cannot be parsed."""
    try:
        json.loads(arguments)
    except ValueError:
        return False
    return True
