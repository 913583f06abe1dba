"""Translation for the messages API (Anthropic's): its turns and tools to those of chat, and a message to its content
blocks and events."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pydantic_core

from kvasir.api.http.generation import Usage
from kvasir.api.protocols.messages_protocol import ToolChoice
from kvasir.api.protocols.messages_results import USES, is_result, result_text
from kvasir.api.text.chat import Call, Piece
from kvasir.api.text.ignored import tell_ignored
from kvasir.errors import RequestError, nearest

ROLES = ("user", "assistant", "system")
# Claude Code begins its system prompt with a line of this name that holds a new hash in every request. It is meant for
# Anthropic's accounting, and would make every prefix in the cache useless.
ACCOUNTING = re.compile(r"x-anthropic-billing-header:[^\n]*(?:\n|$)")
# Fields of a tool that change nothing here: where to cache, and how to cut the stream.
NEUTRAL_TOOL_FIELDS = {"type", "cache_control", "eager_input_streaming"}
# Types of tools that the client describes itself.
OWN_TOOLS = (None, "custom")
# Blocks that are read or refused wherever they stand. Other blocks in a turn of the assistant are ignored: Anthropic's
# service wrote them.
READ = ("text", "document", "search_result", "image", "tool_result")
TOOL_FIELDS = {"name", "description", "input_schema", "strict"}


# ------------------------------------------------------------------------------------------------------------ coming in


def messages_of(
    turns: list[dict[str, Any]], system: str | list[dict[str, Any]] | None, ignored: list[str] | None = None
) -> list[dict[str, Any]]:
    """The chat messages of a conversation. Neighbouring turns of one role become one message, as in the original;
    results of tools become messages of their own.

    ``ignored``: collects the blocks of an assistant's turn that mean nothing here. Raises RequestError that names the
    place, like ``messages[2].content[0].text``.
    """
    messages: list[dict[str, Any]] = []
    if system is not None and (text := ACCOUNTING.sub("", _text(system, "system"))):
        messages.append({"role": "system", "content": text})
    names: dict[str, str] = {}  # of the tools that were used, by the id of the use
    for i, turn in enumerate(turns):
        where = f"messages[{i}]"
        role, content = turn.get("role"), turn.get("content")
        if role not in ROLES:
            raise RequestError(
                f"{where}.role must be one of {', '.join(ROLES)}.{nearest(str(role)[:40], ROLES)}",
                param=f"{where}.role",
            )
        for name in sorted(turn.keys() - {"role", "content", "cache_control"}):  # a whole reply may have come back
            tell_ignored(name)
        if role == "assistant" and content == []:  # a reply that says nothing has no blocks
            content = ""
        blocks = _blocks(content, f"{where}.content")
        if role == "assistant":
            _add_assistant(messages, names, blocks, f"{where}.content", [] if ignored is None else ignored)
        elif role == "user":
            _add_user(messages, names, blocks, f"{where}.content")
        else:
            messages.append({"role": "system", "content": _text(content, f"{where}.content")})
    return messages


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    """The blocks of a content that may be a text."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if content is None:
        raise RequestError(f"{where} is required", param=where, code="missing_parameter")
    if not isinstance(content, list) or not content:
        raise RequestError(f"{where} must be a string or a list of blocks", param=where)
    for i, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise RequestError(f"{where}[{i}] must be an object with a type", param=f"{where}[{i}].type")
    return content


def _add_user(messages: list[dict[str, Any]], names: dict[str, str], blocks: list[dict], where: str) -> None:
    for i, block in enumerate(blocks):
        place = f"{where}[{i}]"
        if block["type"] == "tool_result":
            use = _string(block, "tool_use_id", place)
            content = block.get("content")
            text = "" if content is None or content == [] else _text(content, f"{place}.content")
            if block.get("is_error"):  # chat templates have no other place for it
                text = f"Error: {text}"
            _add_result(messages, names, use, text)
        elif is_result(block["type"]):
            _add_result(messages, names, _string(block, "tool_use_id", place), result_text(block))
        else:
            text = _block_text(block, place)
            if messages and messages[-1]["role"] == "user":
                messages[-1]["content"] += "\n" + text
            else:
                messages.append({"role": "user", "content": text})


def _add_result(messages: list[dict[str, Any]], names: dict[str, str], use: str, text: str) -> None:
    name = {"name": names[use]} if use in names else {}
    messages.append({"role": "tool", "tool_call_id": use, "content": text, **name})


def _add_assistant(
    messages: list[dict[str, Any]], names: dict[str, str], blocks: list[dict], where: str, ignored: list[str]
) -> None:
    """Add a turn of the assistant. The results of tools that the service ran stand within it, and end a message."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    for i, block in enumerate(blocks):
        kind, place = block["type"], f"{where}[{i}]"
        if is_result(kind):
            _add_result(messages, names, _string(block, "tool_use_id", place), result_text(block))
            continue
        if messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        message = messages[-1]
        if kind == "thinking":
            thought = _string(block, "thinking", place)
            message["reasoning_content"] = message.get("reasoning_content", "") + thought
        elif kind in USES:
            use, name = _string(block, "id", place), _string(block, "name", place)
            given = {} if block.get("input") is None else block["input"]
            if not isinstance(given, dict):
                raise RequestError(f"{place}.input must be an object", param=f"{place}.input")
            names[use] = name
            function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
            message.setdefault("tool_calls", []).append({"id": use, "type": "function", "function": function})
        elif kind == "compaction" and isinstance(block.get("content"), str):  # the service's summary of earlier turns
            message["content"] += block["content"]
        elif kind in READ:
            message["content"] += _block_text(block, place)
        elif kind != "redacted_thinking":  # which nobody but Anthropic can read
            tell_ignored(f"a block of the type {kind}")
            ignored.append(f"{place}.{kind[:40]}")


def _text(content: Any, where: str) -> str:
    """The text of a content of text blocks, one a line."""
    return "\n".join(_block_text(block, f"{where}[{i}]") for i, block in enumerate(_blocks(content, where)))


def _block_text(block: dict[str, Any], where: str) -> str:
    """The text of a text block, or of a document or search result that holds text. Raises RequestError for others."""
    kind = block["type"]
    if kind == "text":
        if not isinstance(block.get("text"), str):
            raise RequestError(f"{where}.text must be a string", param=f"{where}.text")
        return block["text"]
    source = block.get("source")
    if kind == "document" and isinstance(source, dict) and source.get("type") in ("text", "content"):
        plain = source["type"] == "text"
        text = _string(source, "data", f"{where}.source") if plain else _text(source.get("content"), f"{where}.source")
        return "\n".join(t for t in (block.get("title"), block.get("context"), text) if isinstance(t, str))
    if kind == "tool_reference" and isinstance(block.get("tool_name"), str):
        return block["tool_name"]
    if kind == "search_result":
        text = _text(block.get("content"), f"{where}.content")
        return "\n".join(t for t in (block.get("title"), source, text) if isinstance(t, str))
    raise RequestError(
        f"{where} is of type '{kind[:80]}'; this server's models read text only (blocks of the types text, thinking, "
        "tool_use and tool_result; documents and search results that hold text)",
        param=f"{where}.type",
        code="unsupported_content",
    )


def _string(block: dict[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str) or not (value or name in ("thinking", "data")):
        raise RequestError(f"{where}.{name} must be a non-empty string", param=f"{where}.{name}")
    return value


def tools_of(tools: list[dict[str, Any]] | None) -> tuple[list[dict[str, Any]] | None, list[str]]:
    """The tools in chat's form, and what of them was ignored: tools that only Anthropic runs or trained its models for
    (web search, a text editor), and fields that mean something to its service alone. Raises RequestError."""
    out, ignored = [], []
    for i, tool in enumerate(tools or []):
        where = f"tools[{i}]"
        if tool.get("type") not in OWN_TOOLS:
            ignored.append(f"{where}.{str(tool['type'])[:40]}")
            continue
        if not isinstance(tool.get("input_schema"), dict):
            raise RequestError(f"{where}.input_schema must be a JSON schema", param=f"{where}.input_schema")
        given = {name for name, value in tool.items() if value is not None}
        ignored += [f"{where}.{name}" for name in sorted(given - NEUTRAL_TOOL_FIELDS - TOOL_FIELDS)]
        function = {name: tool[name] for name in ("name", "description", "strict") if name in given}
        out.append({"type": "function", "function": {**function, "parameters": tool["input_schema"]}})
    return out or None, ignored


def choice_of(choice: ToolChoice | None) -> tuple[Any, bool]:
    """The tool choice in chat's form, and whether several calls may be made. Raises RequestError."""
    if choice is None:
        return None, True
    if choice.type == "tool" and choice.name is None:
        raise RequestError("'tool_choice.name' is required", param="tool_choice.name", code="missing_parameter")
    if choice.type != "tool" and choice.name is not None:
        raise RequestError("'tool_choice.name' needs the type 'tool'", param="tool_choice.name")
    named = {"type": "function", "function": {"name": choice.name}}
    word = {"auto": "auto", "any": "required", "tool": named, "none": "none"}[choice.type]
    return word, not choice.disable_parallel_tool_use


# The checks of chat name places in its form.
PLACES = (
    (re.compile(r"\b(tools\[\d+\])\.function\.parameters\b"), r"\1.input_schema"),
    (re.compile(r"\b(tools\[\d+\]|tool_choice)\.function\b"), r"\1"),
)


@contextlib.contextmanager
def own_places(tools: list[dict[str, Any]] | None) -> Iterator[None]:
    """Make errors about the tools in chat's form name places in ``tools``, from which they were made."""
    try:
        yield
    except RequestError as e:
        kept = [i for i, tool in enumerate(tools or []) if tool.get("type") in OWN_TOOLS]

        def own(text: str) -> str:
            text = re.sub(r"\btools\[(\d+)\]", lambda m: f"tools[{kept[int(m[1])]}]", text)
            for pattern, place in PLACES:
                text = pattern.sub(place, text)
            return text

        e.param, e.message = e.param and own(e.param), own(e.message)
        raise


# ------------------------------------------------------------------------------------------------------------ going out


def usage_object(usage: Usage) -> dict[str, Any]:
    """The ``usage`` of a message: ``input_tokens`` are those that were not in the cache."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
        "service_tier": "standard",
    }


def stop_fields(reason: str, stop: int | str | None) -> dict[str, Any]:
    """``stop_reason`` and ``stop_sequence`` for a finish reason of chat and what stopped it."""
    if reason == "stop" and isinstance(stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    word = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}.get(reason, "end_turn")
    return {"stop_reason": word, "stop_sequence": None}


def signature(thinking: str) -> str:
    """The signature of a thinking block: clients keep only blocks that have one. It is never checked."""
    return hashlib.blake2b(thinking.encode(), digest_size=16).hexdigest()


class Content:
    """The content blocks as they grow, and the events for a stream. One block is open at a time.

    White space is held back until something of a text follows it: models put line breaks around calls, and clients
    cannot send back a text block that is blank. ``hide_thinking``: thinking blocks keep their place, without text.
    """

    def __init__(self, hide_thinking: bool = False) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._hide = hide_thinking
        self._open: tuple[str, int] | None = None  # kind of the open block, and its call number
        self._blank = ""  # white space at the start of a text block that is not open yet
        self._thinking = ""  # of the open block
        self._arguments = ""  # likewise

    def add(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """Add a piece; yield the events."""
        text = piece.text
        if piece.kind == "content" and (self._open or ("", 0))[0] != "content":
            self._blank += text
            if not self._blank.strip():
                return
            text = self._blank
        self._blank = ""
        key = (piece.kind, piece.call)
        if self._open != key or piece.started is not None:
            yield from self.close()
            yield self._begin(piece.kind, piece.started)
            self._open = key
        if event := self._grow(piece.kind, text):
            yield event

    def _begin(self, kind: str, call: Call | None) -> dict[str, Any]:
        if kind == "call":
            assert call is not None
            use = "toolu_" + call.id.removeprefix("call_")
            block = {"type": "tool_use", "id": use, "name": call.name, "input": {}}
        elif kind == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            block = {"type": "text", "text": ""}
        self._thinking = self._arguments = ""
        self.blocks.append(block)
        return {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}

    def _grow(self, kind: str, text: str) -> dict[str, Any] | None:
        block = self.blocks[-1]
        if kind == "call":
            self._arguments += text
            return self._delta({"type": "input_json_delta", "partial_json": text}) if text else None
        if kind == "content":
            block["text"] += text
            return self._delta({"type": "text_delta", "text": text}) if text else None
        self._thinking += text
        if self._hide:
            return None
        block["thinking"] += text
        return self._delta({"type": "thinking_delta", "thinking": text})

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}

    def close(self) -> Iterator[dict[str, Any]]:
        """End the open block, if there is one."""
        if self._open is None:
            return
        kind, block = self._open[0], self.blocks[-1]
        self._open = None
        if kind == "call":
            block["input"] = _input(self._arguments)
        elif kind == "reasoning":
            block["signature"] = signature(self._thinking)
            yield self._delta({"type": "signature_delta", "signature": block["signature"]})
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def finish(self) -> Iterator[dict[str, Any]]:
        """End the content. A message without any block gets an empty text, which clients expect to find."""
        yield from self.close()
        if not self.blocks:
            yield self._begin("content", None)
            self._open = ("content", 0)
            if event := self._grow("content", self._blank):
                yield event
            yield from self.close()


def _input(arguments: str) -> msgspec.Raw:
    """The input of a call, as JSON. Arguments that ``max_tokens`` or a stop sequence cut short give what is whole of
    them, as Anthropic's client makes of a stream."""
    try:
        if isinstance(msgspec.json.decode(arguments), dict):
            return msgspec.Raw(arguments.encode())
    except (ValueError, RecursionError):
        pass
    try:
        value = pydantic_core.from_json(arguments, allow_partial=True)
    except ValueError:
        value = {}
    return msgspec.Raw(pydantic_core.to_json(value if isinstance(value, dict) else {}, inf_nan_mode="null"))
