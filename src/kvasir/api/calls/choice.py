"""The tools of a request and its ``tool_choice``: checks, and what may be called."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvasir.errors import RequestError, nearest

MAX_TOOLS = 512
NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
# Longest list of names that is read: clients may name a tool several times.
MAX_ALLOWED = 4 * MAX_TOOLS
FORMS = (
    "tool_choice must be none, auto, required or {type: 'function', function: {name}}, or an object of the type "
    "allowed_tools"
)
ALLOWED = (
    "a tool_choice of the type allowed_tools holds a mode (auto or required) and a list of tools, each of them "
    "{type: 'function', function: {name}}"
)


def functions(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [tool["function"] for tool in tools]


@dataclass(frozen=True, slots=True)
class Choice:
    """A request's choice of tools. ``names``: the functions that may be called (None: all of the tools), one with the
    mode ``named``."""

    mode: Literal["none", "auto", "required", "named"] = "auto"
    names: frozenset[str] | None = None

    @property
    def forces(self) -> bool:
        """Whether the answer is a call."""
        return self.mode in ("required", "named")

    def allows(self, name: str) -> bool:
        """Whether a function may be called."""
        return self.names is None or name in self.names

    def shown(self, tools: Sequence[Mapping[str, Any]] | None) -> list[Any] | None:
        """The tools that the prompt names; None: none. A call that is forced follows a grammar, so all of them stay and
        with them the cached prefix. Where the model chooses itself it is shown what it may call and nothing else."""
        if not tools or self.mode == "none":
            return None
        return list(tools) if self.forces else [t for t in tools if self.allows(t["function"]["name"])] or None


def validate(tools: Any, tool_choice: Any = None) -> Choice:
    """Check ``tools`` and ``tool_choice`` of a chat request. Raises RequestError 400 that names the place."""
    if tools is not None:
        _check_tools(tools)
    choice, place = _read(tool_choice)
    if choice.forces and not tools:
        raise RequestError("tool_choice asks for a call, but there are no tools", param="tool_choice")
    names = [f["name"] for f in functions(tools or ())]
    for name in sorted(choice.names or ()):
        if name not in names:
            raise RequestError(
                f"tool_choice names '{name[:80]}', which is not among the tools.{nearest(name[:80], names)}",
                param=place,
            )
    return choice


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


def _read(tool_choice: Any) -> tuple[Choice, str]:
    """The choice that ``tool_choice`` states, and the place of its names in the body. Raises RequestError."""
    if tool_choice is None:
        return Choice(), ""
    if tool_choice in ("none", "auto", "required"):
        return Choice(tool_choice), ""
    kind = tool_choice.get("type") if isinstance(tool_choice, Mapping) else None
    if kind == "allowed_tools":
        return _read_allowed(tool_choice.get("allowed_tools")), "tool_choice.allowed_tools.tools"
    name = _name(tool_choice) if kind == "function" else None
    if name is None:
        raise RequestError(FORMS, param="tool_choice")
    return Choice("named", frozenset((name,))), "tool_choice.function.name"


def _read_allowed(given: Any) -> Choice:
    """The functions among which the model chooses, as OpenAI has it: in the mode ``auto`` it may answer without a call,
    in the mode ``required`` it may not. Tools of other kinds are left out there, as they are among the tools."""
    mode, listed = (given.get("mode"), given.get("tools")) if isinstance(given, Mapping) else (None, None)
    if mode not in ("auto", "required") or not isinstance(listed, list) or len(listed) > MAX_ALLOWED:
        raise RequestError(ALLOWED, param="tool_choice.allowed_tools")
    names = set()
    for tool in listed:
        kind = tool.get("type", "function") if isinstance(tool, Mapping) else None
        name = _name(tool) if kind == "function" else None
        if not isinstance(kind, str) or (kind == "function" and name is None):
            raise RequestError(ALLOWED, param="tool_choice.allowed_tools.tools")
        if name is not None:
            names.add(name)
    if mode == "required" and not names:
        raise RequestError(
            "tool_choice requires a call of the tools that it allows, and they hold no function",
            param="tool_choice.allowed_tools.tools",
        )
    return Choice(mode if names else "none", frozenset(names))


def _name(tool: Mapping[str, Any]) -> str | None:
    """The name in ``{function: {name}}``; None: there is none."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None
