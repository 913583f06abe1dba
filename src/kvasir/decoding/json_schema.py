"""Which keywords of JSON Schema a grammar can hold, and what becomes of the others. Needs neither torch nor the grammar
library, so that the server refuses a schema before the engine sees it.

Unknown values of ``format`` are annotations, as the standard says (draft 2020-12, validation, 7.2.3). Annotations are
left out: they may be long, and a grammar does not need them. An unknown dialect (``$schema``) is read as 2020-12, as if
none was named. Keywords that no
grammar expresses (``UNSERVED``) are refused with their path, unless they change nothing (``uniqueItems: false``) or the
request asks for what can be had (``strict: false``).
"""

from __future__ import annotations

import json
import re
from typing import Any

from kvasir.decoding.one_of import exclusive
from kvasir.decoding.references import endless, pointers
from kvasir.errors import RequestError

# Formats that constrain a string.
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown")
)
UNSERVED = frozenset(
    (
        "uniqueItems",
        "not",
        "if",
        "then",
        "else",
        "propertyNames",
        "contains",
        "minContains",
        "maxContains",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "unevaluatedProperties",
        "unevaluatedItems",
        "$dynamicRef",
        "$recursiveRef",
    )
)
# Keywords that tell readers something and constrain nothing.
ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "example", "$comment", "deprecated", "readOnly", "writeOnly")
)
# Dialects that the grammar library reads differently, in the spellings that are in use. Others only name themselves.
_DIALECT = re.compile(r"https?://json-schema\.org/(?:(draft-0[467])|(draft/20(?:19-09|20-12)))/schema#?")
# Keywords that hold other schemas: as a value, a list, or the values of an object.
_ONE = ("items", "additionalItems", "additionalProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
# Whitespace between JSON tokens, as a regex of the grammar library: at most a blank, or a new line and its indentation.
SHORT_WHITESPACE = r"\x20|\r?\n[\x20\t]{0,40}"
# Any whitespace, with a bound: without one a weak model can go on with blanks for ever.
ANY_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"


def whitespace_options(whitespace: str) -> dict[str, Any]:
    """The grammar library's options for ``Grammar.whitespace``."""
    if whitespace == "fixed":
        return {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    pattern = ANY_WHITESPACE if whitespace == "any" else SHORT_WHITESPACE
    return {"whitespace_flexible": True, "whitespace_pattern": pattern}


def served_schema(schema: Any, param: str | None, dropped: list[str] | None = None) -> Any:
    """Return ``schema`` with served keywords only; the schema itself is not changed.

    ``dropped``: collects the paths of keywords that are left out; None refuses them: RequestError (400) with the path.
    """
    if (reference := endless(schema)) is not None:
        message = f"'$ref': {reference[:80]!r} leads back to itself and describes nothing"
        raise RequestError(message, param=param, code="invalid_grammar")
    # A reference may lead into an annotation, which then is a schema.
    kept = tuple(p for p in pointers(schema) if not ANNOTATIONS.isdisjoint(p.split("/")))
    return _served(schema, "#", param, dropped, 0, schema, kept)


def _served(
    node: Any,
    path: str,
    param: str | None,
    dropped: list[str] | None,
    depth: int,
    root: Any,
    kept_places: tuple[str, ...],
) -> Any:
    if not isinstance(node, dict) or depth > 64:  # deeper schemas are refused by ``check_schema``
        return node
    kept: dict[str, Any] = {}
    _check_keys(node, path, param)
    if isinstance(node.get("oneOf"), list):
        node = _without_one_of(node, path, param, dropped, root)
    for key, value in node.items():
        place = f"{path}/{_escaped(key)}"
        if key in ANNOTATIONS and not any(p.startswith(place) for p in kept_places):
            continue
        if key == "$schema":
            if isinstance(value, str) and (dialect := _DIALECT.fullmatch(value)):
                kept[key] = _dialect_name(dialect)
            continue
        if key == "format" and not (isinstance(value, str) and value in FORMATS):
            continue
        if key in ("$id", "id") and isinstance(value, str):
            # The grammar library takes the schema with an empty name for the whole.
            if path != "#" and _refers(node):
                raise _inexact(key, place, f"references below it would begin at '{value[:80]}'", param)
            continue
        if key in UNSERVED:
            if _changes_nothing(key, value, node):
                continue
            if dropped is None:
                raise RequestError(
                    f"'{key}' at {place[:200]} is not supported in a schema that constrains output: remove it, or send "
                    f"strict: false to leave out what is not supported",
                    param=param,
                    code="invalid_grammar",
                )
            dropped.append(place)
            continue
        if key in _MAPS and isinstance(value, dict):
            value = {
                k: _served(v, f"{place}/{_escaped(k)}", param, dropped, depth + 1, root, kept_places)
                for k, v in value.items()
            }
        elif key in _LISTS and isinstance(value, list):
            value = [
                _served(v, f"{place}/{i}", param, dropped, depth + 1, root, kept_places) for i, v in enumerate(value)
            ]
        elif key in _ONE:
            value = _served(value, place, param, dropped, depth + 1, root, kept_places)
        kept[key] = value
    return kept


def _dialect_name(found: re.Match[str]) -> str:
    """The name of a dialect in the spelling that the grammar library knows."""
    return f"http://json-schema.org/{found[1]}/schema#" if found[1] else f"https://json-schema.org/{found[2]}/schema"


def _without_one_of(
    node: dict[str, Any], path: str, param: str | None, dropped: list[str] | None, root: Any
) -> dict[str, Any]:
    """The node with ``anyOf`` of branches that exclude each other in place of ``oneOf``."""
    try:
        branches = exclusive(node["oneOf"], node, root)
    except (TypeError, AttributeError, ValueError, RecursionError):  # it is malformed, which the library says better
        return node
    if isinstance(branches, tuple):
        if dropped is None:
            raise RequestError(
                f"'oneOf' at {path[:200]}: one output could satisfy both branch {branches[0]} and branch {branches[1]}"
                "; give each branch a required property with a 'const' of its own, or use "
                "'anyOf'",
                param=param,
                code="invalid_grammar",
            )
        dropped.append(f"{path}/oneOf")
        branches = node["oneOf"]
    rest = {k: v for k, v in node.items() if k != "oneOf"}
    if "anyOf" in rest:
        return {**rest, "allOf": [*rest.get("allOf", []), {"anyOf": branches}]}
    return {**rest, "anyOf": branches}


def _check_keys(node: dict[str, Any], path: str, param: str | None) -> None:
    """Refuse what JSON texts of objects could get around: a key that stands twice, and a name in another spelling."""
    least, required = node.get("minProperties"), node.get("required")
    distinct = len(set(map(str, required))) if isinstance(required, list) else 0
    if isinstance(least, int | float) and least > distinct + 1:
        why = "one key could stand twice; it may be one more than the number of names in 'required'"
        raise _inexact("minProperties", f"{path}/minProperties", why, param)
    names = node.get("properties")
    if isinstance(names, dict) and node.get("additionalProperties") is not False:
        for name in names:
            if re.search(r"[\x00-\x1f\x7f]", name):
                why = "its control characters have several spellings; send additionalProperties: false"
                raise _inexact("properties", f"{path}/properties/{_escaped(json.dumps(name)[1:-1])}", why, param)


def _inexact(key: str, place: str, why: str, param: str | None) -> RequestError:
    return RequestError(f"'{key}' at {place[:200]} cannot be kept exactly: {why}", param=param, code="invalid_grammar")


def _refers(node: Any) -> bool:
    """Whether a reference lies in a schema, or in anything that looks like one."""
    if isinstance(node, dict):
        return "$ref" in node or any(map(_refers, node.values()))
    return isinstance(node, list) and any(map(_refers, node))


def _changes_nothing(key: str, value: Any, node: dict[str, Any]) -> bool:
    """Whether a keyword constrains nothing, so that leaving it out is right."""
    if key == "uniqueItems":
        return value is False
    if key == "not":
        return value is False
    if key in ("then", "else"):
        return "if" not in node
    if key == "if":
        return "then" not in node and "else" not in node
    if key in ("minContains", "maxContains"):
        return "contains" not in node or _changes_nothing("contains", node["contains"], node)
    if key == "contains":
        return node.get("minContains") == 0 and "maxContains" not in node
    if key == "propertyNames":
        return value in (True, {}, {"type": "string"})
    if key.startswith("$"):
        return False
    return value in (True, {})


def _escaped(key: str) -> str:
    """A key as a part of a JSON pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")
