"""``oneOf`` as ``anyOf`` of branches that exclude each other.

An output must satisfy exactly one branch. Where two branches overlap, each is narrowed by a property until nothing
satisfies both: some valid outputs are lost, none is invalid.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvasir.decoding.references import target

KINDS = frozenset(("null", "boolean", "number", "string", "array", "object"))


def exclusive(branches: list[Any], parent: Mapping[str, Any], root: Any) -> list[Any] | tuple[int, int]:
    """The branches, narrowed so that no output satisfies two of the originals; or the numbers of two that could not be
    kept apart."""
    whole = [_merged(branch, parent, root) for branch in branches]
    found = []
    for i, mine in enumerate(whole):
        narrowed = dict(mine)
        narrowed["properties"], narrowed["required"] = dict(_properties(mine)), list(mine.get("required") or [])
        changed: dict[str, Any] = {"properties": {}, "required": []}
        for j, other in enumerate(whole):
            if i != j and not disjoint(narrowed, other, root) and not _narrow(narrowed, changed, other, root):
                return (i, j)
        found.append(_with(branches[i], {k: v for k, v in changed.items() if v}))
    return found


def _with(branch: Any, changed: dict[str, Any]) -> Any:
    if not changed:
        return branch
    if "$ref" in branch:
        return {"allOf": [branch, changed]}
    required = [*branch.get("required", []), *changed.get("required", [])]
    properties = {**_properties(branch), **changed.get("properties", {})}
    return {**branch, "properties": properties, **({"required": required} if required else {})}


def _narrow(mine: dict[str, Any], changed: dict[str, Any], other: Mapping[str, Any], root: Any) -> bool:
    """Narrow ``mine`` by one property so that nothing that satisfies it satisfies ``other``."""
    if _kinds(mine) != {"object"} or _kinds(other) != {"object"}:
        return False
    properties, theirs = mine["properties"], _properties(other)
    for name, schema in properties.items():  # a property whose value tells the two apart
        apart = name in theirs and disjoint(_merged(schema, {}, root), _merged(theirs[name], {}, root), root)
        closed = (
            other.get("additionalProperties") is False and name not in theirs and not other.get("patternProperties")
        )
        if (apart or closed) and schema is not False:
            mine["required"].append(name)
            changed["required"].append(name)
            return True
    for name in other.get("required") or []:
        if name not in mine["required"]:
            properties[name] = changed["properties"][name] = False
            return True
    return False


def disjoint(a: Mapping[str, Any], b: Mapping[str, Any], root: Any) -> bool:
    """Whether it is shown that no value satisfies both schemas."""
    for one, two in ((a, b), (b, a)):
        if (values := _values(one)) is not None:
            others = _values(two)
            if others is not None and not values & others:
                return True
            kinds = _kinds(two)
            if all(_kind(json.loads(v)) not in kinds for v in values):
                return True
    shared = _kinds(a) & _kinds(b)
    if not shared:
        return True
    if shared != {"object"}:
        return False
    for one, two in ((a, b), (b, a)):
        properties, theirs = _properties(one), _properties(two)
        for name in one.get("required") or []:
            if theirs.get(name) is False:
                return True
            if name not in theirs and two.get("additionalProperties") is False and not two.get("patternProperties"):
                return True
            # A value of ``one`` has it; ``two`` reads it by its own schema.
            both = name in theirs and name in properties
            if both and disjoint(_merged(properties[name], {}, root), _merged(theirs[name], {}, root), root):
                return True
    return False


def _merged(schema: Any, parent: Mapping[str, Any], root: Any) -> dict[str, Any]:
    """Return the keywords that hold for a schema: its own behind references, its parent's type and required names."""
    for _ in range(8):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#"):
            break
        schema = target(root, reference)
    known = dict(schema) if isinstance(schema, Mapping) else {}
    if "type" in parent and "type" not in known:
        known["type"] = parent["type"]
    if parent.get("required"):
        known["required"] = [*(known.get("required") or []), *parent["required"]]
    return known


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def _kinds(schema: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types of a schema's values, in which every integer is a number."""
    kinds = schema.get("type")
    if kinds is None:
        return KINDS
    return frozenset("number" if k == "integer" else k for k in ([kinds] if isinstance(kinds, str) else kinds))


def _values(schema: Mapping[str, Any]) -> set[str] | None:
    """The only values of a schema, as text; None: it names none. Numbers are compared by value."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not all(_plain(v) for v in values):
        return None
    return {json.dumps(int(v) if isinstance(v, float) and v.is_integer() else v) for v in values}


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    return "string" if isinstance(value, str) else "number"
