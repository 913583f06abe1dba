"""The page of tuned numbers, made from ``kvasir.tuned``.

``python -m tests.tuning`` writes docs/tuning.md; ``tests/test_tuning.py`` fails when the page and the table differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvasir.tuned import TABLE, Tuned

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "tuning.md"
HEAD = """# Tuned numbers

Some numbers in the code are right for one machine or one workload. Those of the kernels, and of the scheduler's short
steps, stand in [`tuned.py`](../src/kvasir/tuned.py); this page is made from it. On another GPU the kernels are correct
with these numbers, and may be slower than they could be.

To tune for another machine, run the command of an entry on it, compare the times, and change the rows in `tuned.py`.
Then write this page again with `python -m tests.tuning`. Another shape may round differently. Exact mode stays exact
with any of them: a row's bits never depend on its batch.

In a table of shapes the first row that applies is used. A condition with a number is an upper bound.

"""


def page() -> str:
    summary = [
        "| number | machine | measured | command that times the alternatives |",
        "|---|---|---|---|",
        *(_summary(name, entry) for name, entry in TABLE.items()),
    ]
    return HEAD + "\n".join(summary) + "\n" + "".join(_section(name, entry) for name, entry in TABLE.items())


def _summary(name: str, entry: Tuned) -> str:
    results = ", ".join(f"[{Path(file).stem}](../bench/results/{file})" for file in entry.results)
    command = f"`{entry.command}`" if entry.command else "none is kept"
    return f"| [{name}](#{name.lower()}) | {entry.machine} | {results or 'no result kept'} | {command} |"


def _section(name: str, entry: Tuned) -> str:
    readers = ", ".join(f"`{reader.removeprefix('kvasir.')}`" for reader in entry.readers)
    return f"\n## {name}\n\n{entry.meaning}\n\n{_value(entry.value)}\n\nRead by {readers}.\n"


def _value(value: Any) -> str:
    """A number as it is; shapes as a table of what they apply to."""
    if isinstance(value, dict):
        rows = [(str(key), "cuBLAS" if shape is None else str(shape)) for key, shape in value.items()]
    elif isinstance(value, tuple) and isinstance(value[0], tuple):
        rows = [(", ".join(map(_condition, conditions.items())) or "else", str(shape)) for conditions, shape in value]
    elif isinstance(value, range):
        return f"Value: {value.start} to {value.stop - 1}"
    else:
        return f"Value: {value}"
    return "\n".join(["| where | shape |", "|---|---|", *(f"| {where} | {shape} |" for where, shape in rows)])


def _condition(item: tuple[str, int | str | bool]) -> str:
    name, bound = item
    if isinstance(bound, bool):
        return f"`{name}`" if bound else f"not `{name}`"
    return f"`{name}` is {bound}" if isinstance(bound, str) else f"`{name}` up to {bound}"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE.name}")
