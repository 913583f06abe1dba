"""Run the tests that need a GPU, keep a record of each file's last run, and list the files that are due again.

    python -m tools.gpu_tests run RECORD.json [-n 6] [FILES]    on a machine with a GPU; default: all files
    python -m tools.gpu_tests store RECORD.json                 take the record over into bench/gpu_tests.json
    python -m tools.gpu_tests due                               list files without a passing run of what they import now

The record holds a hash of each test file and of everything of this repository that it imports before it runs: its own
imports, inside functions too, conftest files, and what these modules import at their top. Imports inside functions of
the package and techniques that are found by name are left out: through them every file needs every other one. A file
is due when its hash changed, when it was never run, or when its last run failed. ``make gpu-due`` lists the same and
never fails, since CI has no GPU.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import functools
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
STORED = ROOT / "bench" / "gpu_tests.json"
MARK = "mark.gpu"  # how a file says that it has tests for a GPU
# The packages that are read, and the folders that they lie in.
HOMES = {"kvasir": "src", "kvasir_lab": "packages/lab/src", "tests": ".", "tools": "."}


def gpu_test_files(root: Path = ROOT) -> list[str]:
    """Return the test files that have tests for a GPU, relative to ``root``."""
    files = sorted((root / "tests").rglob("test_*.py"))
    return [str(file.relative_to(root)) for file in files if MARK in file.read_text(encoding="utf-8")]


def hash_of(test: str, root: Path = ROOT) -> str:
    """Return a hash over ``test`` and all files of the repository that it needs."""
    seen, todo = set[Path](), [root / test]
    todo += [folder / "conftest.py" for folder in (root / test).parents if root in folder.parents]
    while todo:
        file = todo.pop()
        if file not in seen and file.is_file():
            seen.add(file)
            todo += _needed(file, root)
    digest = hashlib.sha256()
    for file in sorted(seen):
        digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@functools.cache
def _needed(file: Path, root: Path) -> tuple[Path, ...]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = set[str]()
    for node in ast.walk(tree) if root / "tests" in file.parents else _at_top(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    found: list[Path] = []
    for name in names:
        for i in range(name.count(".") + 1):  # importing a.b.c runs the packages a and a.b first
            if path := _path(".".join(name.split(".")[: i + 1]), root):
                found += [path.with_suffix(".py"), path / "__init__.py"]
    return tuple(found)


def _at_top(node: ast.AST) -> Iterator[ast.AST]:
    """Walk what runs when a module is imported."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from _at_top(child)


def _path(name: str, root: Path) -> Path | None:
    """Return the folder, or the file without its suffix, that ``name`` stands for."""
    home = HOMES.get(name.split(".")[0])
    return root / home / Path(*name.split(".")) if home else None


def due(record: dict, files: Iterable[str], root: Path = ROOT) -> list[tuple[str, str]]:
    """Return each of ``files`` that has to run again, and why."""
    found = []
    for file in files:
        last = record.get(file)
        if last is None:
            found.append((file, "was never run"))
        elif last["failed"] or not last["passed"]:
            found.append((file, f"{last['failed']} failed, {last['passed']} passed at {last['commit']}"))
        elif last["hash"] != hash_of(file, root):
            found.append((file, f"changed since {last['commit']}"))
    return found


class Recorder:
    """A pytest plugin: counts of passed and failed tests, and seconds, by file."""

    def __init__(self) -> None:
        self.files: dict[str, dict] = {}

    def _of(self, nodeid: str) -> dict:
        return self.files.setdefault(nodeid.split("::")[0], {"passed": 0, "failed": 0, "seconds": 0.0})

    def pytest_runtest_logreport(self, report) -> None:
        counts = self._of(report.nodeid)
        counts["seconds"] = round(counts["seconds"] + report.duration, 2)
        counts["failed"] += report.failed
        counts["passed"] += report.passed and report.when == "call"

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self._of(report.nodeid)["failed"] += 1


def run(record: Path, files: list[str], rest: list[str]) -> int:
    """Run the GPU tests of ``files`` and write ``record``. Returns pytest's exit status."""
    import pytest
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    commit = os.environ.get("KVASIR_COMMIT", "unknown")
    versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
    recorder = Recorder()
    status = pytest.main(["-q", "-m", "gpu", "-p", "no:cacheprovider", *rest, *files], plugins=[recorder])
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    ran = {
        file: counts | {"hash": hash_of(file), "commit": commit, "device": device, "date": now, "versions": versions}
        for file, counts in sorted(recorder.files.items())
        if file in files
    }
    record.write_text(json.dumps(ran, indent=1) + "\n")
    return int(status)


def store(record: Path, stored: Path = STORED) -> None:
    """Take over what ``record`` says of the files that it names."""
    kept = json.loads(stored.read_text()) if stored.exists() else {}
    kept |= json.loads(record.read_text())
    known = set(gpu_test_files())
    stored.write_text(json.dumps({file: kept[file] for file in sorted(kept) if file in known}, indent=1) + "\n")


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="run them here, and write a record")
    running.add_argument("record", type=Path)
    running.add_argument("files", nargs="*")
    running.add_argument("-n", default="", help="number of processes (pytest-xdist)")
    commands.add_parser("store", help="take a record over").add_argument("record", type=Path)
    commands.add_parser("due", help="list what has to run again")
    options = parser.parse_args(given)
    if options.command == "run":
        return run(options.record, options.files or gpu_test_files(), ["-n", options.n] if options.n else [])
    if options.command == "store":
        store(options.record)
        return 0
    found = due(json.loads(STORED.read_text()) if STORED.exists() else {}, gpu_test_files())
    for file, why in found:
        print(f"{file}: {why}")
    print(f"{len(found)} of {len(gpu_test_files())} files of GPU tests are due.")
    if found:
        print("On a machine with a GPU: python -m tools.gpu_tests run RECORD.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
