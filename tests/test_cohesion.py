"""A rule of cohesion: a class has at most 25 methods, a function at most 60 lines and 15 branches, kernels excepted.

``cohesion.toml`` lists what is larger, with its size. An entry may only shrink, and goes when what it names fits. After
a change that makes something smaller, ``python -m tests.test_cohesion`` writes the sizes again; it adds nothing.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LISTED = Path(__file__).with_name("cohesion.toml")
PACKAGES = {"kvasir": ROOT / "src" / "kvasir", "kvasir_lab": ROOT / "packages" / "lab" / "src" / "kvasir_lab"}
METHODS, LINES, BRANCHES = 25, 60, 15
HEAD = """# What is larger than tests/test_cohesion.py allows: methods of a class, or lines and branches of a function.
# These wait to be split. Nothing is added here.

"""


def branches(function: ast.AST) -> int:
    """Number of ways that the flow can take in addition to the straight one."""
    count = 0
    for node in ast.walk(function):
        if isinstance(
            node, ast.If | ast.IfExp | ast.For | ast.AsyncFor | ast.While | ast.ExceptHandler | ast.match_case
        ):
            count += 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
    return count


def large(tree: ast.AST, name: str) -> Iterator[tuple[str, list[int]]]:
    """Classes and functions of a module that are too large, with their sizes: methods, or lines and branches."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            methods = sum(isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) for part in node.body)
            if methods > METHODS:
                yield f"{name}.{node.name}", [methods]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = [(node.end_lineno or node.lineno) - node.lineno + 1, branches(node)]
            if size[0] > LINES or size[1] > BRANCHES:
                yield f"{name}.{node.name}", size
        inner = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        yield from large(node, f"{name}.{node.name}" if inner else name)  # type: ignore[attr-defined]


def found() -> dict[str, list[int]]:
    """Everything in both packages that is too large, by dotted name. Of equal names, the largest."""
    sizes: dict[str, list[int]] = {}
    for package, folder in PACKAGES.items():
        for file in sorted(folder.rglob("*.py")):
            if "kernels" in file.relative_to(folder).parts:
                continue
            module = ".".join([package, *file.relative_to(folder).with_suffix("").parts])
            for name, size in large(ast.parse(file.read_text()), module):
                sizes[name] = max(size, sizes.get(name, size))
    return sizes


def faults(sizes: dict[str, list[int]], listed: dict[str, list[int]]) -> list[str]:
    """What breaks the rule: something too large that is not listed, or larger than listed, or listed and no more."""
    wrong = [
        f"{name} is too large ({size}): split it by its jobs" for name, size in sizes.items() if name not in listed
    ]
    for name, most in listed.items():
        if (size := sizes.get(name)) is None:
            wrong.append(f"{name} fits now: take it out of {LISTED.name}")
        elif any(a > b for a, b in zip(size, most)):
            wrong.append(f"{name} has grown from {most} to {size}")
    return wrong


def test_nothing_grows_beyond_its_job():
    wrong = faults(found(), tomllib.loads(LISTED.read_text()))
    assert not wrong, "\n".join(wrong)


def test_the_rule_sees_what_it_should():
    """Negative controls: one class and two functions that are too large, and what a list must not hide."""
    methods = "".join(f"    def f{i}(self): pass\n" for i in range(METHODS + 1))
    long = "def long():\n" + "    pass\n" * LINES
    many = (
        "def many(x):\n    return [y for y in x if y or x] if x else "
        + " or ".join("x" for _ in range(BRANCHES))
        + "\n"
    )
    small = "def small():\n    pass\n"
    sizes = dict(large(ast.parse(f"class C:\n{methods}\n{long}\n{many}\n{small}"), "m"))
    assert sizes == {"m.C": [26], "m.long": [61, 0], "m.many": [2, 18]}
    assert faults(sizes, sizes) == []
    assert len(faults(sizes, {})) == 3
    assert faults(sizes, sizes | {"m.many": [2, 17]}) == ["m.many has grown from [2, 17] to [2, 18]"]
    assert faults(sizes, sizes | {"m.small": [70, 1]}) == [f"m.small fits now: take it out of {LISTED.name}"]


def main() -> None:
    """Write the sizes of what is listed again."""
    sizes, listed = found(), tomllib.loads(LISTED.read_text())
    kept = {name: [min(a, b) for a, b in zip(sizes[name], most)] for name, most in listed.items() if name in sizes}
    LISTED.write_text(HEAD + "".join(f'"{name}" = {size}\n' for name, size in sorted(kept.items())))


if __name__ == "__main__":
    main()
