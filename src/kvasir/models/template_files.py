"""The chat templates of a folder, by name, and the JSON files beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvasir.errors import ConfigError
from kvasir.plain_files import read_text


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in ``file``, empty where there is no such file. Raises ConfigError for anything else."""
    if not file.exists():
        return {}
    try:
        value = json.loads(read_text(file))
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{file} is not valid JSON: {e}. Download it again.") from e
    if not isinstance(value, dict):
        raise ConfigError(f"{file} must hold a JSON object")
    return value


def templates_in(folder: Path, config: Mapping[str, Any], given: str | None) -> dict[str, str]:
    """Template sources by name. Later places override earlier ones: tokenizer_config.json, chat_template.json, *.jinja,
    the caller's (``given``)."""
    found: dict[str, str] = {}
    for value in (config.get("chat_template"), read_object(folder / "chat_template.json").get("chat_template")):
        if isinstance(value, str):
            found["default"] = value
        elif isinstance(value, list):
            found |= {
                v["name"]: v["template"] for v in value if isinstance(v, dict) and {"name", "template"} <= v.keys()
            }
    for file in [folder / "chat_template.jinja", *sorted((folder / "additional_chat_templates").glob("*.jinja"))]:
        if file.exists():
            found["default" if file.parent == folder else file.stem] = read_text(file)
    if given is not None:
        found = {"default": _given(given)}
    if len(found) == 1:
        found = {"default": next(iter(found.values()))}
    return found


def _given(chat_template: str) -> str:
    if "{" in chat_template or "\n" in chat_template:
        return chat_template
    try:
        return read_text(Path(chat_template))
    except (ConfigError, OSError) as e:  # a name that is too long cannot even be looked for
        raise ConfigError(
            f"chat_template={chat_template!r} is neither a Jinja template nor a file that can be read: {e}"
        ) from e
