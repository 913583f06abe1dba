"""Translation for the responses API: its input items to chat messages, and a message to its output items and events.

An earlier response is continued from its items, which stand before the new ones as if the client had sent them again.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from kvasir.api.http.generation import Usage
from kvasir.api.text.chat import Piece, arguments_text, check_message, texts, whole
from kvasir.errors import RequestError


def items_of(input: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items of an input; a text is one message of the user."""
    return [{"type": "message", "role": "user", "content": input}] if isinstance(input, str) else list(input)


def references(items: Sequence[dict[str, Any]]) -> Iterator[tuple[int, str]]:
    """Yield the places of items that only name another one, and its id. Raises RequestError."""
    for i, item in enumerate(items):
        bare = {k for k, v in item.items() if v is not None} == {"id"}
        if item.get("type") == "item_reference" or bare:
            yield i, _text(item, "id", f"input[{i}]")


def messages_of(
    input: str | list[dict[str, Any]], instructions: str | None, earlier: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """The chat messages of an input. Reasoning and the text and calls after it become one assistant message.

    ``earlier``: items of the conversation so far. Raises RequestError that names the item.
    """
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions is not None else []
    for i, item in enumerate([*earlier, *items_of(input)]):
        _add_item(messages, item, f"input[{i - len(earlier)}]")
    if not messages:
        raise RequestError("'input' holds no message", param="input")
    return messages


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    kind = item.get("type") or "message"
    if kind == "message":
        content = _content(item.get("content"), f"{where}.content", refusals=item.get("role") == "assistant")
        check_message({"role": item.get("role"), "content": content}, where)
        if (
            item.get("role") == "assistant"
            and messages
            and messages[-1].keys() == {"role", "content", "reasoning_content"}
        ):
            messages[-1]["content"] = content  # the answer to the reasoning just before it
        else:
            messages.append({"role": item.get("role"), "content": content})
    elif kind == "function_call":
        arguments = arguments_text(item.get("arguments"), f"{where}.arguments")
        function = {"name": _text(item, "name", where), "arguments": arguments}
        call = {"id": item.get("call_id") or "", "type": "function", "function": function}
        if messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind == "function_call_output":
        messages.append(
            {
                "role": "tool",
                "tool_call_id": _text(item, "call_id", where),
                "content": _content(item.get("output"), f"{where}.output"),
            }
        )
    elif kind == "reasoning":
        if thought := "".join(texts([item])):  # items of other engines may be encrypted, and have no text
            messages.append({"role": "assistant", "content": "", "reasoning_content": thought})
    else:
        raise RequestError(
            f"{where} is of type '{str(kind)[:80]}'; served are message, function_call, function_call_output and "
            "reasoning",
            param=f"{where}.type",
            code="unsupported_content",
        )


def _text(item: dict[str, Any], name: str, where: str) -> str:
    if not isinstance(item.get(name), str):
        raise RequestError(f"{where}.{name} must be a string", param=f"{where}.{name}")
    return item[name]


def _content(content: Any, where: str, refusals: bool = False) -> Any:
    kinds = ("input_text", "output_text", "text", *(("refusal",) if refusals else ()))
    if isinstance(content, list):
        for i, part in enumerate(content):
            if not isinstance(part, dict) or part.get("type") not in kinds:
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise RequestError(
                    f"{where}[{i}] is of type '{str(kind)[:80]}'; text parts only",
                    param=f"{where}[{i}].type",
                    code="unsupported_content",
                )
    return content


def tools_of(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Turn flat function tools into chat's form."""
    return [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type" and v is not None}}
        for tool in tools or []
    ] or None


@contextlib.contextmanager
def flat_places() -> Iterator[None]:
    """Make errors name places in tools without chat's additional level ``function``."""
    try:
        yield
    except RequestError as e:
        place = re.compile(r"\b(tools\[\d+\]|tool_choice)\.function\b")
        e.param, e.message = (
            e.param and place.sub(r"\1", e.param).replace("tool_choice.allowed_tools", "tool_choice"),
            place.sub(r"\1", e.message).replace("function: {name}", "name"),
        )
        raise


def choice_of(tool_choice: Any) -> Any:
    """Turn ``{type: "function", name}`` and ``{type: "allowed_tools", mode, tools}`` into chat's form."""
    if not isinstance(tool_choice, dict):
        return tool_choice
    if tool_choice.get("type") == "allowed_tools" and "allowed_tools" not in tool_choice:
        listed = tool_choice.get("tools")
        inner = {"mode": tool_choice.get("mode"), "tools": listed}
        if isinstance(listed, list):
            inner["tools"] = [choice_of(tool) for tool in listed]
        return {"type": "allowed_tools", "allowed_tools": inner}
    if "name" in tool_choice:
        return {"type": tool_choice.get("type"), "function": {"name": tool_choice["name"]}}
    return tool_choice


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }


class Output:
    """The output items as they grow, and the events for a stream: pairs of name and fields.

    One item is open at a time: a reasoning item, a message with one text part, or a function call. ``name``: of the
    response, from which the items' ids follow, so that a response that is generated again has the same.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.items: list[dict[str, Any]] = []
        self._open: tuple[str, int] | None = None  # kind of the open item, and its call number

    def add(self, piece: Piece, logprobs: list[dict[str, Any]] | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
        key = (piece.kind, piece.call)
        if self._open != key or piece.started is not None:
            yield from self.close()
            yield from self._begin(piece)
            self._open = key
        item = self.items[-1]
        place = {"item_id": item["id"], "output_index": len(self.items) - 1}
        if piece.kind == "call":
            item["arguments"] += piece.text
            if piece.text:
                yield "response.function_call_arguments.delta", {**place, "delta": piece.text}
            return
        item["content"][0]["text"] += piece.text
        if logprobs and piece.kind == "content":
            item["content"][0]["logprobs"] += logprobs
        if piece.kind == "reasoning":
            yield "response.reasoning_text.delta", {**place, "content_index": 0, "delta": piece.text}
        else:
            yield (
                "response.output_text.delta",
                {**place, "content_index": 0, "delta": piece.text, "logprobs": logprobs or []},
            )

    def _begin(self, piece: Piece) -> Iterator[tuple[str, dict[str, Any]]]:
        hex = hashlib.blake2b(f"{self._name} {len(self.items)}".encode(), digest_size=16).hexdigest()
        if piece.kind == "call":
            assert piece.started is not None
            item: dict[str, Any] = {
                "type": "function_call",
                "id": f"fc_{hex}",
                "call_id": piece.started.id,
                "name": piece.started.name,
                "arguments": "",
                "status": "in_progress",
            }
        elif piece.kind == "reasoning":
            item = {"type": "reasoning", "id": f"rs_{hex}", "summary": [], "content": [], "status": "in_progress"}
        else:
            item = {"type": "message", "id": f"msg_{hex}", "role": "assistant", "content": [], "status": "in_progress"}
        self.items.append(item)
        yield "response.output_item.added", {"output_index": len(self.items) - 1, "item": _copy(item)}
        if piece.kind != "call":
            part = (
                {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                if piece.kind == "content"
                else {"type": "reasoning_text", "text": ""}
            )
            item["content"].append(part)
            yield "response.content_part.added", {**self._place(), "content_index": 0, "part": _copy(part)}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def close(self, status: str = "completed") -> Iterator[tuple[str, dict[str, Any]]]:
        """End the open item, if there is one."""
        if self._open is None:
            return
        kind, item = self._open[0], self.items[-1]
        self._open = None
        item["status"] = status if kind != "call" or whole(item["arguments"]) else "incomplete"
        if kind == "call":
            yield (
                "response.function_call_arguments.done",
                {**self._place(), "name": item["name"], "arguments": item["arguments"]},
            )
        else:
            part = item["content"][0]
            name = "response.output_text.done" if kind == "content" else "response.reasoning_text.done"
            yield (
                name,
                {
                    **self._place(),
                    "content_index": 0,
                    "text": part["text"],
                    **({"logprobs": part["logprobs"]} if kind == "content" else {}),
                },
            )
            yield "response.content_part.done", {**self._place(), "content_index": 0, "part": _copy(part)}
        yield "response.output_item.done", {"output_index": len(self.items) - 1, "item": _copy(item)}

    def finish(self, status: str, cut: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
        """End the output. An answer without any text still gets a message. ``cut``: a call broke off."""
        if not self.items:
            yield from self.add(Piece("content", ""))
        broken = cut and self._open is not None and self._open[0] == "call"
        yield from self.close("incomplete" if broken else status)


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    return {k: [dict(p) for p in v] if isinstance(v, list) else v for k, v in item.items()}
