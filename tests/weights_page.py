"""The tables of docs/methods/weights.md that the code knows: ``python -m tests.weights_page`` writes them."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import torch

from kvasir import technique
from kvasir.errors import ConfigError
from kvasir.layers.weight_format import PACKAGE, WeightFormat
from kvasir.models.quantisation import READERS

PAGE = Path(__file__).parents[1] / "docs" / "methods" / "weights.md"
SIDE = 4096  # outputs and inputs of the matrix whose bits are counted


def first_line(package: str, name: str) -> str:
    """The first line of a module's docstring, without its full stop. Imports nothing."""
    file = Path(importlib.import_module(package).__file__).parent / f"{name}.py"
    return (ast.get_docstring(ast.parse(file.read_text())) or "").splitlines()[0]


def formats() -> str:
    """A row for each format: bits of a weight, scales included, and the options with their defaults."""
    rows = ["| `--weights` | what it is | bits a weight | options |", "|---|---|---|---|"]
    for name in technique.own(PACKAGE):
        made = technique.load(PACKAGE, name, WeightFormat)
        try:
            planes = made.planes((SIDE,), SIDE, torch.bfloat16)
            bits = 8 * sum(torch.empty(p.shape, dtype=p.dtype, device="meta").nbytes for p in planes) / SIDE**2
            size = f"{bits:.3f}".rstrip("0").rstrip(".")
        except ConfigError as error:
            size = str(error)
        config = technique.find(PACKAGE, name, WeightFormat)[1]
        options = (
            [] if config is None else [f"`{p.name}={p.default}`" for p in inspect.signature(config).parameters.values()]
        )
        rows.append(f"| `{name}` | {first_line(PACKAGE, name)} | {size} | {', '.join(options) or 'none'} |")
    return "\n".join(rows)


def readers() -> str:
    """A row for each reader."""
    rows = ["| `quant_method` | what is read |", "|---|---|"]
    for name in technique.own(READERS):
        line = first_line(READERS, name)
        rows.append(f"| `{name.replace('_', '-')}` | {line.partition(': ')[2] if ': ' in line else line} |")
    return "\n".join(rows)


def page() -> str:
    """The page as it should be."""
    text = PAGE.read_text()
    for what, table in (("formats", formats()), ("readers", readers())):
        text = re.sub(
            f"<!-- {what} -->.*?<!-- /{what} -->", f"<!-- {what} -->\n{table}\n<!-- /{what} -->", text, flags=re.S
        )
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
