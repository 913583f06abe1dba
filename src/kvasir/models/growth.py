"""Bounds on how much longer a tokenizer.json makes a text: a normaliser or a decoder that multiplies it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvasir.errors import ConfigError
from kvasir.models.checkpoint import read_json

# Most characters that the steps of a tokenizer may make of one.
MAX_GROWTH = 64


def check_growth(file: Path) -> list[str]:
    """Raise ConfigError, which names file and field, for steps that make more than 64 characters of one. Returns the
    regular expressions of all steps."""
    try:
        found = read_json(file)
    except ConfigError as e:
        raise ConfigError(f"{file} cannot be read as a tokenizer: {e}") from e
    expressions: list[str] = []
    for field in ("normalizer", "pre_tokenizer", "decoder"):
        growth = 1
        for step in _steps(found.get(field)):
            pattern = step.get("pattern")
            if isinstance(pattern, Mapping) and isinstance(pattern.get("Regex"), str):
                expressions.append(pattern["Regex"])
            growth *= _growth(step)
            if growth > MAX_GROWTH:
                raise ConfigError(
                    f"{file}: {field} makes more than {MAX_GROWTH} characters of one ({step.get('type')}), "
                    "which is not served"
                )
    return expressions


def _steps(step: Any) -> list[Mapping[str, Any]]:
    """The steps of a field, in order."""
    found, todo = [], [step]
    while todo:
        step = todo.pop(0)
        if isinstance(step, list):
            todo = step + todo
        elif isinstance(step, Mapping):
            inner = [step[name] for name in ("normalizers", "pretokenizers", "decoders") if name in step]
            found.append(step)
            todo = inner + todo
    return found


def _growth(step: Mapping[str, Any]) -> int:
    """Characters that one step makes of one."""
    if step.get("type") == "Replace":
        pattern, content = step.get("pattern"), str(step.get("content", ""))
        text = pattern.get("String") if isinstance(pattern, Mapping) else None
        # An expression may match the empty text, before and after each character.
        return -(-len(content) // max(1, len(text))) or 1 if text else 2 * len(content) + 1
    longest = max([len(str(step.get(name) or "")) for name in ("prepend", "replacement", "prefix", "suffix")])
    return max(1, longest if step.get("type") != "Prepend" else longest + 1)
