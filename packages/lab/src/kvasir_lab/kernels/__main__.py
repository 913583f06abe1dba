"""Run an experiment: `python -m kvasir_lab.kernels NAME OUT.json [options]`; `--list` lists them.

Run it in the repository's root. Exit status 1 when a check failed.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[4]
SHARED = ("__init__", "__main__", "frame", "pages", "kv_world")


def described() -> dict[str, str]:
    """The name of every experiment and the first line of its docstring. Imports none of them."""
    files = sorted(f for f in FOLDER.glob("*.py") if f.stem not in SHARED)
    return {f.stem: (ast.get_docstring(ast.parse(f.read_text())) or "").splitlines()[0] for f in files}


def main(given: list[str]) -> int:
    names = described()
    if given[:1] == ["--list"]:
        for name, line in names.items():
            print(f"{name:10} {line}")
        return 0
    if not given or given[0] not in names:
        print(f"{__doc__.splitlines()[0]}\nThere are {', '.join(names)}.", file=sys.stderr)
        return 2
    # Machines with a GPU often have the repository and its dependencies, and no installed kvasir.
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    module = importlib.import_module(f"kvasir_lab.kernels.{given[0]}")
    parser = argparse.ArgumentParser(
        prog=f"python -m kvasir_lab.kernels {given[0]}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("output", type=Path)
    module.arguments(parser)
    options = parser.parse_args(given[1:])
    sys.argv[:] = ["python", "-m", "kvasir_lab.kernels", *given]  # what a result records as its command
    return module.run(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
