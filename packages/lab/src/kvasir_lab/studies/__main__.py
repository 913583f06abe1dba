"""Run a study: ``python -m kvasir_lab.studies NAME OUT.json [options]``; without a name, list them."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

from kvasir_lab.study import ROOT, run

FOLDER = Path(__file__).parent


def described() -> dict[str, str]:
    """The name of every study and the first line of its docstring. Imports none of them."""
    files = sorted(f for f in FOLDER.glob("*.py") if not f.stem.startswith("_"))
    return {f.stem: (ast.get_docstring(ast.parse(f.read_text())) or "").splitlines()[0] for f in files}


def main(given: list[str]) -> int:
    names = described()
    if not given or given[0] not in names:
        wide = max(map(len, names))
        print("\n".join(f"{name:{wide}} {line}" for name, line in names.items()))
        return 2 if given and given[0] != "--list" else 0
    sys.path[:0] = [folder for folder in (str(ROOT / "src"), str(ROOT)) if folder not in sys.path]
    sys.argv[:] = ["python", "-m", "kvasir_lab.studies", *given]  # what a result records as its command
    return run(importlib.import_module(f"kvasir_lab.studies.{given[0]}").main, given[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
