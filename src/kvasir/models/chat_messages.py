"""Preparation of chat messages for a template: one form for all, and user text that cannot act as control strings."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from kvasir.errors import RequestError

# Code points of a private use area; a character from it stands for one control string.
PRIVATE = range(0xF0000, 0xFFFFE)
# Most commas in the arguments of a call, which are decoded: no other thread runs meanwhile. A body has the same limit.
MAX_MEMBERS = 1 << 20


class Marks:
    """Stand-ins for the control strings that occur in a user's input: one otherwise unused private character each."""

    def __init__(self, control: Collection[str], tags: Collection[str], values: Any) -> None:
        texts = list(strings(values))
        found = [c for c in control if any(c in text for text in texts)]
        used = set().union(*texts) if found else set()
        free = (chr(c) for c in PRIVATE if chr(c) not in used)
        self._marks = {c: next(free) for c in longest_first(found)}
        self.originals = {mark: c for c, mark in self._marks.items()}
        self._all = _any_of(self._marks)
        self._hard = _any_of(c for c in self._marks if c not in tags)

    def of(self, value: Any, strict: bool) -> Any:
        """Return ``value`` with its control strings replaced. Unless ``strict`` (so in system and assistant text), tags
        stay: templates look for them in answers, and developers write them on purpose."""
        if not self._marks:
            return value
        pattern = self._all if strict else self._hard
        if isinstance(value, str):
            return pattern.sub(lambda m: self._marks[m[0]], value)
        if isinstance(value, dict):
            return {self.of(k, strict): self.of(v, strict) for k, v in value.items()}
        return [self.of(v, strict) for v in value] if isinstance(value, (list, tuple)) else value


def unused(values: Any) -> str:
    """A private character that occurs in no text of ``values``, from the end that ``Marks`` does not use."""
    used = set().union(*strings(values))
    return next(chr(c) for c in reversed(PRIVATE) if chr(c) not in used)


def longest_first(words: Iterable[str]) -> list[str]:
    """The words by falling length, so that a pattern made of them prefers the longest match."""
    return sorted(words, key=len, reverse=True)


def _any_of(words: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, words)) or "(?!)")


def strings(value: Any) -> Iterable[str]:
    """Yield every text in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in (*value.keys(), *value.values()) if isinstance(value, dict) else value:
            yield from strings(item)


def restore(text: str, originals: dict[str, str]) -> str:
    """Put the control strings back in the place of their private characters."""
    return re.sub("[" + "".join(originals) + "]", lambda m: originals[m[0]], text) if originals else text


def normal(message: Any, index: int, parts: bool = False) -> dict[str, Any]:
    """Return a message in the form that templates expect: content is a string, null keys are dropped, and the arguments
    of calls are objects. ``parts``: the text parts of a user stay a list. Raises RequestError that names the place."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"{where} must be an object with a role", param=f"{where}.role")
    message = {k: v for k, v in message.items() if v is not None}
    texts = _texts(message.get("content", ""), where)
    if parts and len(texts) > 1 and message["role"] == "user":
        message["content"] = [{"type": "text", "text": text} for text in texts]
    else:
        message["content"] = "\n".join(texts)
    calls = message.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, (list, tuple)) or not all(isinstance(c, Mapping) for c in calls):
            raise RequestError(f"{where}.tool_calls must be a list of objects", param=f"{where}.tool_calls")
        message["tool_calls"] = [_call(c, f"{where}.tool_calls[{i}].function.arguments") for i, c in enumerate(calls)]
    return message


def _texts(content: Any, where: str) -> list[str]:
    """The texts of the parts. Raises RequestError for a part that is not text."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, (list, tuple)):
        raise RequestError(f"{where}.content must be a string or a list of parts", param=f"{where}.content")
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            part = {"text": part}
        known = isinstance(part, Mapping)
        kind, text = (part.get("type", "text"), part.get("text")) if known else (type(part).__name__, None)
        if kind not in ("text", "input_text", "output_text"):
            raise RequestError(
                f"{where}.content[{i}] is of type '{str(kind)[:80]}'; this model reads text parts only "
                "(of a multimodal checkpoint, the text part is served)",
                param=f"{where}.content[{i}].type",
                code="unsupported_content",
            )
        if not isinstance(text, str):
            raise RequestError(f"{where}.content[{i}].text must be a string", param=f"{where}.content[{i}].text")
        texts.append(text)
    return texts


def _call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    if function["arguments"].count(",") >= MAX_MEMBERS:
        raise RequestError(f"{where} holds more than {MAX_MEMBERS} values", param=where, code="body_too_large")
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return dict(call)  # the model wrote broken JSON; the template shows it unchanged
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else dict(call)
