"""The table of tuned numbers: sources, commands and readers exist, and no tuned number stands anywhere else."""

from __future__ import annotations

import ast
import shlex
from pathlib import Path

import pytest

from kvasir.tuned import TABLE, look_up
from tests import tuning

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "kvasir"
# Classes whose instances say how a kernel is built. Their numbers come from the table, except in grids of test cases.
BUILDERS = {"Shape", "HopperShape", "TogetherShape", "Config", "Ring", "Tile", "Tiling"}
GRIDS = {"grid", "ragged", "together_grid"}
# One tile for every machine: another would change the bits of exact mode.
FIXED = {"matmul.py"}
# Rules that nobody has measured on a GPU yet. They move to the table with their first measurement.
UNMEASURED = {"f8_matmul.py"}


def test_the_page_shows_the_table():
    assert tuning.PAGE.read_text() == tuning.page(), "write it again: python -m tests.tuning"


@pytest.mark.parametrize("name", TABLE)
def test_sources_and_commands_exist(name):
    entry = TABLE[name]
    assert entry.meaning.endswith(".") and entry.machine
    for file in entry.results:
        assert (ROOT / "bench" / "results" / file).is_file(), file
    if entry.command:
        program, script, *rest = shlex.split(entry.command)
        if script == "-m":  # an experiment of the one list
            assert rest[0] in ("kvasir_lab.kernels", "kvasir_lab.studies")
            script = f"packages/lab/src/{rest[0].replace('.', '/')}/{rest[1]}.py"
        assert program == "python" and (ROOT / script).is_file(), entry.command


@pytest.mark.parametrize("name", TABLE)
def test_readers_read_the_table(name):
    for reader in TABLE[name].readers:
        module, symbol = reader.rsplit(".", 1)
        file = ROOT / "src" / Path(*module.split(".")).with_suffix(".py")
        assert defined(ast.parse(file.read_text()), symbol), f"{file.name} has no {symbol}"
        assert f"tuned.{name}.value" in file.read_text(), f"{file.name} does not read {name}"


def test_no_kernel_has_a_shape_of_its_own():
    found = [f"{file.name}: {call}" for file in kernels() for call in built(ast.parse(file.read_text()))]
    found = [call for call in found if call.partition(":")[0] not in UNMEASURED]
    assert not found, "move these shapes to kvasir/tuned.py"


def test_the_check_for_shapes_can_fail():
    assert list(built(ast.parse("TILE = Tile(16, 32)"))) == ["Tile(16, 32)"]
    assert list(built(ast.parse("def of(dim):\n    return Shape(32 if dim > 64 else 16, 8, warps)")))
    assert not list(built(ast.parse("def grid():\n    yield Shape(1, 2)")))
    assert not list(built(ast.parse("Shape(*tuned.look_up(tuned.X.value))")))


def test_no_module_sets_a_tuned_name_itself():
    """A constant that a reader is named after is an expression over the table, never a number."""
    for entry in TABLE.values():
        for reader in entry.readers:
            module, symbol = reader.rsplit(".", 1)
            tree = ast.parse((ROOT / "src" / Path(*module.split(".")).with_suffix(".py")).read_text())
            for node in tree.body:
                if isinstance(node, ast.Assign) and symbol in names_in(node):
                    assert not isinstance(node.value, ast.Constant), f"{reader} is a number of its own"


def test_look_up_takes_the_first_row_that_applies():
    table = (({"kind": "a", "rows": 4}, (1,)), ({"few": True}, (2,)), ({}, (3,)))
    assert look_up(table, kind="a", rows=4, few=True) == (1,)
    assert look_up(table, kind="a", rows=5, few=True) == (2,), "a number is an upper bound"
    assert look_up(table, kind="b", rows=1, few=True) == (2,), "a word must be equal"
    assert look_up(table, kind="b", rows=1, few=False) == (3,), "a flag must be equal"


def kernels() -> list[Path]:
    return sorted(file for file in (PACKAGE / "kernels").rglob("*.py") if file.name not in FIXED)


def built(tree: ast.AST):
    """Calls of ``BUILDERS`` with a number above 1 among their arguments, outside grids."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and node.name in GRIDS:
            continue
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BUILDERS:
            constants = [n.value for a in node.args for n in ast.walk(a) if isinstance(n, ast.Constant)]
            if any(type(value) is int and value > 1 for value in constants):
                yield ast.unparse(node)
        yield from built(node)


def names_in(node: ast.Assign) -> set[str]:
    return {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}


def defined(tree: ast.Module, symbol: str) -> bool:
    kinds = ast.ClassDef, ast.FunctionDef
    return any(
        symbol in names_in(node) if isinstance(node, ast.Assign) else isinstance(node, kinds) and node.name == symbol
        for node in tree.body
    )
