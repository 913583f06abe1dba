"""Settings from flat options: names are found in their sections, and values are checked against their fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvasir.errors import ConfigError, nearest


def _owners(cls: type) -> dict[str, tuple[str, dataclasses.Field]]:
    """The section and the field of every flat name."""
    owners: dict[str, tuple[str, dataclasses.Field]] = {}
    for section in dataclasses.fields(cls):
        for f in dataclasses.fields(section.default_factory):  # type: ignore[arg-type, misc]
            assert f.name not in owners, f"two sections own '{f.name}'"
            owners[f.name] = (section.name, f)
    return owners


def compose(cls: type, options: Mapping[str, Any], base: Any = None) -> Any:
    """Build ``cls`` from flat options, by our names or vLLM's, on top of ``base``.

    Raises ConfigError for an unknown name, a value of the wrong type, or one out of range.
    """
    owners = _owners(cls)
    options = _by_our_names(options, owners)
    base = base or cls()
    changes: dict[str, dict[str, Any]] = {}
    for name, value in options.items():
        if name in owners:
            section, f = owners[name]
            changes.setdefault(section, {})[name] = _checked(name, value, f)
        else:
            raise ConfigError(f"unknown setting '{name}'.{nearest(name, owners)}")
    return dataclasses.replace(base, **{s: dataclasses.replace(getattr(base, s), **c) for s, c in changes.items()})


def _by_our_names(options: Mapping[str, Any], owners: Mapping[str, tuple[str, dataclasses.Field]]) -> dict[str, Any]:
    """Translate vLLM's names to ours: ``kv_cache_dtype`` is ``kv_codec``, ``enforce_eager=True`` is
    ``cuda_graphs=False``.

    Raises ConfigError when one setting is given twice.
    """
    ours = {
        alias.replace("-", "_"): name
        for name, (_, f) in owners.items()
        for alias in f.metadata["aliases"]
        if len(alias) > 1 and not alias.startswith("-")
    }
    off = {f.metadata["off"].replace("-", "_"): name for name, (_, f) in owners.items() if f.metadata["off"]}
    found: dict[str, Any] = {}
    as_given: dict[str, str] = {}
    for given, value in options.items():
        name = given if given in owners else ours.get(given, off.get(given, given))
        if given not in owners and given in off and isinstance(value, bool):
            value = not value
        if name in found:
            raise ConfigError(f"{as_given[name]} and {given} are the same setting: give one of them")
        found[name], as_given[name] = value, given
    return found


def _checked(name: str, value: Any, f: dataclasses.Field) -> Any:
    """Return ``value`` if it fits the field's annotation and range; lists of TOML and JSON become tuples."""
    kind = str(f.type)
    if isinstance(value, list):
        value = tuple(value)
    if kind.endswith("| None") and value is None:
        return value
    kind = kind.removesuffix(" | None")
    if kind.startswith("Literal["):
        allowed = [word.strip().strip("\"'") for word in kind[8:-1].split(",")]
        if value not in allowed:
            raise ConfigError(f"{name}={value!r} is not one of {', '.join(allowed)}.{nearest(str(value), allowed)}")
    elif kind == "float" and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    elif kind.split("[")[0] in ("bool", "int", "float", "str", "tuple"):
        wanted = {"bool": bool, "int": int, "float": float, "str": str, "tuple": tuple}[kind.split("[")[0]]
        if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
            raise ConfigError(f"{name}={value!r}: expected {kind}, got {type(value).__name__}")
    low, high = f.metadata["low"], f.metadata["high"]
    if not (low is None or value >= low) or not (high is None or value <= high):
        raise ConfigError(
            f"{name}={value!r} is out of range: " + (f"at least {low}" if high is None else f"from {low} to {high}")
        )
    return value
