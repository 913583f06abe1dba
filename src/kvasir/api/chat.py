"""Chat messages: checks of those that come in, and assembly of replies from text into reasoning, content and tool
calls."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvasir.api.protocol import tell_ignored
from kvasir.api.reasoning import ReasoningParser
from kvasir.api.tools import CallDelta, ToolParser
from kvasir.errors import RequestError, nearest

ROLES = ("system", "developer", "user", "assistant", "tool")
KEYS = {
    "assistant": {"role", "content", "name", "tool_calls", "reasoning_content", "reasoning"},
    "tool": {"role", "content", "name", "tool_call_id"},
}
# Keys that clients send back with empty values, which are dropped.
EMPTY = {"refusal", "annotations", "audio", "function_call", "tool_calls"}
# Keys of an assistant message that would change the answer and are not served; all others that are unknown are ignored.
MEANT = {"function_call", "prefix", "partial"}
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
    unknown = message.keys() - KEYS.get(role, {"role", "content", "name"})
    if role == "assistant":  # answers of other services come back with fields of theirs
        for name in sorted(unknown - MEANT):
            tell_ignored(name)
            del message[name]
        unknown &= MEANT
    if unknown:
        name = min(unknown)
        raise RequestError(
            f"{where}: '{name[:80]}' is not supported in a message of the role {role}",
            param=f"{where}.{name[:80]}",
            code="unsupported_parameter",
        )
    for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        if name in message and not isinstance(message[name], str):
            raise RequestError(f"{where}.{name} must be a string", param=f"{where}.{name}")
    content = message.get("content")
    if content is None and "tool_calls" not in message:
        raise RequestError(f"{where}.content is required", param=f"{where}.content", code="missing_parameter")
    if content is not None and not isinstance(content, str) and not (isinstance(content, list) and content):
        raise RequestError(f"{where}.content must be a string or a list of parts", param=f"{where}.content")
    if role == "tool" and not message.get("tool_call_id"):
        raise RequestError(
            f"{where}.tool_call_id is required: it names the call that this message answers",
            param=f"{where}.tool_call_id",
            code="missing_parameter",
        )
    if "reasoning" in message:
        message.setdefault("reasoning_content", message.pop("reasoning"))
    if "tool_calls" in message:
        _check_calls(message["tool_calls"], f"{where}.tool_calls")
    # Templates do not know the role developer, which is OpenAI's newer word for system.
    return {**message, "role": "system"} if role == "developer" else message


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


def _check_calls(calls: Any, where: str) -> None:
    if not isinstance(calls, list):
        raise RequestError(f"{where} must be a list", param=where)
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if (
            not isinstance(function, dict)
            or call.get("type", "function") != "function"
            or not isinstance(call.get("id", ""), str)
        ):
            raise RequestError(
                f"{where}[{i}] must be {{id, type: 'function', function: {{name, arguments}}}}", param=f"{where}[{i}]"
            )
        for name in ("name", "arguments"):
            if not isinstance(function.get(name), str):
                raise RequestError(
                    f"{where}[{i}].function.{name} must be a string", param=f"{where}[{i}].function.{name}"
                )


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
