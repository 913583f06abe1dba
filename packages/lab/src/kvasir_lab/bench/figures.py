"""Figures for the pages: templates whose placeholders name numbers in result files.

A placeholder is ``{RESULT > ARM > METRIC as FORMAT}``. ``RESULT`` is the path of a result without ``.json``. ``ARM`` is
the name of an arm, with a choice by its settings where several arms share the name (``ARM [codec=plain; way=graph]``;
nothing after ``=`` means that the arm lacks the setting), or a key of the result itself (``ratios``, ``limits``,
``targets``). Further keys go deeper; a spread stands for its median. ``A / B``, ``A * B`` and ``A - B`` compute, from
left to right, and an operand may be a plain number.

``FORMAT`` is a format specification of Python, ``verdict`` for an entry of ``targets``, ``mark`` for an asterisk where
the value is not zero, or ``text``. A figure that does not exist is an error, unless its placeholder starts with ``?``:
then it is blank.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kvasir.bench.merge import load
from kvasir.bench.result import middle, verdict
from kvasir.errors import ConfigError

_PLACEHOLDER = re.compile(r"\{([^{}]+)\}")
_OPERATOR = re.compile(r" ([/*-]) ")
_NUMBER = re.compile(r"\d+(\.\d+)?")
_ARM = re.compile(r"(?P<name>.*?)(?: \[(?P<settings>.*)\])?")


class Figures:
    """The numbers in the results under ``folder``. Every file is read once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._results: dict[str, dict[str, Any]] = {}

    def fill(self, template: str) -> str:
        """Replace every placeholder of ``template`` by its figure. Raises ConfigError where no result holds it."""
        return _PLACEHOLDER.sub(lambda found: self._shown(found[1]), template)

    def value(self, expression: str) -> Any:
        """The value of a placeholder without its format. Raises ConfigError."""
        first, *rest = _OPERATOR.split(expression.strip())
        value = self._operand(first)
        for operator, text in zip(rest[::2], rest[1::2]):
            left, right = (_number(v, expression) for v in (value, self._operand(text)))
            value = left / right if operator == "/" else left * right if operator == "*" else left - right
        return value

    def _shown(self, placeholder: str) -> str:
        optional = placeholder.startswith("?")
        expression, separator, form = placeholder.removeprefix("?").rpartition(" as ")
        if not separator:
            raise ConfigError(f"the figure {{{placeholder}}} has no format: end it with ' as FORMAT'")
        try:
            value = self.value(expression)
        except _Missing:
            if optional:
                return ""
            raise
        if form == "verdict":
            return verdict(value)
        if form == "mark":
            return "\\*" if value else ""
        if form == "text":
            return str(value)
        return format(_number(value, expression), form).replace("%", " %")

    def _operand(self, text: str) -> Any:
        text = text.strip()
        if _NUMBER.fullmatch(text):
            return float(text)
        name, *keys = text.split(" > ")
        if len(keys) < 2:
            raise ConfigError(f"'{text}' names no figure: write RESULT > ARM > METRIC")
        found = self._result(name)
        value = found[keys[0]] if keys[0] in found else _arm(found, keys[0], text)["metrics"]
        for key in keys[1:]:
            try:
                value = value[int(key)] if isinstance(value, list) else value[key]
            except (KeyError, IndexError, TypeError, ValueError):
                raise _Missing(f"no figure '{text}': there is no '{key}'") from None
        return value

    def _result(self, name: str) -> dict[str, Any]:
        if name not in self._results:
            self._results[name] = load(self.folder / f"{name}.json")
        return self._results[name]


class _Missing(ConfigError):
    """A figure that its result does not hold."""


def _arm(found: dict[str, Any], words: str, text: str) -> dict[str, Any]:
    """The one arm that ``words`` name."""
    match = _ARM.fullmatch(words)
    settings = [pair.partition("=")[::2] for pair in (match["settings"] or "").split("; ") if pair]
    arms = [
        a
        for a in found["arms"]
        if a["name"] == match["name"] and all(str(a["config"].get(key, "")) == value for key, value in settings)
    ]
    if not arms:
        raise _Missing(f"no figure '{text}': there is no arm '{words}'")
    if len(arms) > 1:
        raise ConfigError(f"'{text}' may be any of {len(arms)} arms: choose one as in ARM [codec=plain]")
    return arms[0]


def _number(value: Any, text: str) -> float:
    number = middle(value)
    if number is None:
        raise ConfigError(f"'{text}' is no single number")
    return number
