"""Local references of a schema: what they point at, and which never end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

# Keywords whose schemas hold for the very value that the schema around them describes.
_IN_PLACE = ("allOf", "anyOf", "oneOf")


def target(root: Any, reference: Any) -> Any:
    """The part of ``root`` that a JSON pointer like ``#/$defs/a`` names; None: there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    node = root
    for step in reference[1:].strip("/").split("/") if reference.strip("#/") else ():
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and step.isdecimal() and int(step) < len(node):
            node = node[int(step)]
        elif isinstance(node, Mapping):
            node = node.get(step)
        else:
            return None
    return node


def pointers(root: Any) -> set[str]:
    """The JSON pointers of all references of a schema."""
    return {unquote(node["$ref"]) for node in _nodes(root)}


def endless(root: Any) -> str | None:
    """A reference that leads back to itself before any part of a value is read, so that it describes nothing."""
    ended: set[int] = set()
    for start in _nodes(root):
        # Depth first: (schema, what to visit next). The schemas on the way are those of the stack.
        stack, on_the_way = [(start, _same_place(start, root))], {id(start)}
        while stack:
            node, rest = stack[-1]
            found = next(rest, None)
            if found is None:
                stack.pop()
                on_the_way.discard(id(node))
                ended.add(id(node))
            elif id(found[0]) in on_the_way:
                return found[1]
            elif id(found[0]) not in ended:
                stack.append((found[0], _same_place(found[0], root)))
                on_the_way.add(id(found[0]))
    return None


def _nodes(root: Any) -> Iterator[Any]:
    """Everything that has a reference."""
    todo = [root]
    while todo:
        node = todo.pop()
        if isinstance(node, Mapping):
            if isinstance(node.get("$ref"), str):
                yield node
            todo.extend(node.values())
        elif isinstance(node, list):
            todo.extend(node)


def _same_place(node: Mapping[str, Any], root: Any) -> Iterator[tuple[Mapping[str, Any], str]]:
    """The schemas that hold for the value of ``node``, too, and the references that lead there."""
    reference = node.get("$ref")
    if isinstance(reference, str) and isinstance(pointed := target(root, reference), Mapping):
        yield pointed, reference
    for word in _IN_PLACE:
        parts = node.get(word)
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, Mapping):
                yield part, f"a part of {word}"
