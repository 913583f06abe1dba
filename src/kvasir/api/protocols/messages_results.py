"""Blocks of the messages API that Anthropic's service writes itself: the results of the tools that it runs, such as web
search, code execution and MCP servers. A history that holds them is served as any other history of calls."""

from __future__ import annotations

import json
from typing import Any

# Calls in an assistant's turn, by whoever runs them.
USES = ("tool_use", "server_tool_use", "mcp_tool_use")
# Parts of results that no model can read, or that say nothing to it.
UNREADABLE = {"encrypted_content", "encrypted_index", "encrypted_stdout", "signature", "cache_control", "citations"}


def is_result(kind: str) -> bool:
    """Whether blocks of this type are results of tools that the service ran, not those of the client."""
    return kind.endswith("_tool_result")


def result_text(block: dict[str, Any]) -> str:
    """The text of a result: its texts, one a line, or its readable parts as JSON."""
    content = block.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if parts is None or parts == []:
        text = ""
    elif isinstance(parts, list) and all(map(_is_text, parts)):
        text = "\n".join(part["text"] for part in parts)
    else:
        text = json.dumps(_readable(parts), ensure_ascii=False)
    return f"Error: {text}" if block.get("is_error") is True else text


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _readable(value: Any) -> Any:
    if isinstance(value, list):
        return [_readable(item) for item in value]
    if not isinstance(value, dict):
        return value
    hidden = UNREADABLE | ({"data"} if value.get("type") == "base64" else set())
    return {k: _readable(v) for k, v in value.items() if v is not None and k not in hidden}
