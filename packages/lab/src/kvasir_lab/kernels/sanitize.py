"""Run the kernel tests under compute-sanitizer on the GPU, several parts of them at a time; the output is a folder.

Every tensor has an allocation of its own, or an access behind it would fall into a neighbour. A file runs in parts of a
few tests, first parts first, until the time is over. sanitize-TOOL.json in the folder has an arm for each file;
sanitize-TOOL.txt names what was found and the tests that were not reached. Exit status 0 only where every test was
reached and nothing was found. Compiled kernels are cached: a run of the tests before this one shortens it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvasir.bench.compare import keeper
from kvasir.bench.result import arm, finish, result
from tools.checkout import python_path

ROOT = Path(__file__).parents[5]
FOLDER = Path("tests/kernels/triton")
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
SIZE = 24  # tests of a part: the start of one costs some ten seconds
MARK = 99  # exit status of the sanitizer when it has found something
KEPT = 16_000  # characters kept of a part's report
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]


@dataclass
class Part:
    """Some tests of one file. ``status``: the exit status; None until it ran to its end."""

    file: str
    ids: list[str]
    number: int
    status: int | None = None
    seconds: float = 0.0
    log: str = ""
    counts: dict[str, int] = field(default_factory=dict)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="*", help="of tests/kernels/triton; default: all")
    parser.add_argument("--tool", choices=TOOLS, default="memcheck")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument(
        "--commit",
        default=os.environ.get("KVASIR_COMMIT"),
        help="the commit that is measured, where there is no repository to ask",
    )


def run(options: argparse.Namespace) -> int:
    until = time.monotonic() + options.seconds
    sanitizer = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
    if sanitizer is None:
        print("compute-sanitizer is not installed: it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    parts = divided(collected(options.files))
    command = [sanitizer, "--tool", options.tool, "--error-exitcode", str(MARK), "--print-limit", "20", *PYTEST]
    config = {"tool": options.tool, "jobs": options.jobs, "seconds": options.seconds}
    file = options.output / f"sanitize-{options.tool}.json"
    options.output.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        for _ in pool.map(lambda part: run_part(part, command, until), parts):
            keeper(file, options.commit)(outcome(parts, config))  # a run that is cut off keeps what it has
            file.with_suffix(".txt").write_text("\n\n".join(filter(None, map(report, parts))) + "\n")
    finish(outcome(parts, config), file, options.commit)
    return int(any(part.status != 0 for part in parts))


def outcome(parts: list[Part], config: dict[str, Any]) -> dict[str, Any]:
    arms = [
        arm(name, config, metrics([p for p in parts if p.file == name]))
        for name in dict.fromkeys(p.file for p in parts)
    ]
    return result(f"sanitize-{config['tool']}", arms)


def environment(file: str = "") -> dict[str, str]:
    """Variables of a part's process. A file that captures graphs keeps the caching allocator, which they need."""
    captures = file and "CudaCapture" in (ROOT / FOLDER / file).read_text()
    return os.environ | {"PYTHONPATH": python_path()} | ({} if captures else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})


def collected(files: list[str]) -> dict[str, list[str]]:
    """The tests of each file."""
    asked = [str(FOLDER / file) for file in files] or [str(FOLDER)]
    done = subprocess.run(
        [*PYTEST, "--collect-only", *asked], cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        if "::" in line and line.startswith(f"{FOLDER}/"):
            found.setdefault(Path(line.split("::")[0]).name, []).append(line)
    if done.returncode or not found:
        sys.exit(f"no tests: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return found


def divided(tests: dict[str, list[str]], size: int = SIZE) -> list[Part]:
    """Parts of ``size`` tests, the first of every file first: time that runs out then costs every file a little."""
    parts = [
        Part(file, ids[at : at + size], at // size) for file, ids in tests.items() for at in range(0, len(ids), size)
    ]
    return sorted(parts, key=lambda part: part.number)


def run_part(part: Part, command: list[str], until: float) -> None:
    started = time.monotonic()
    if started >= until:
        return
    process = subprocess.Popen(
        [*command, *part.ids],
        cwd=ROOT,
        env=environment(part.file),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        part.log, _ = process.communicate(timeout=until - started)
        part.status = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        part.log, _ = process.communicate()
    part.seconds, part.counts = time.monotonic() - started, read(part.log)
    print(
        f"{part.file} {part.number}: exit {part.status}, {part.counts}, {part.seconds:.0f} s",
        file=sys.stderr,
        flush=True,
    )


def read(log: str) -> dict[str, int]:
    """Counts that the sanitizer and pytest printed."""
    errors = re.findall(r"^========= (?:ERROR|RACECHECK) SUMMARY: (\d+)", log, re.M)
    words = {
        word: re.findall(rf"^(?:=+ )?(?:.*, )?(\d+) {word}\b", log, re.M) for word in ("passed", "skipped", "failed")
    }
    return ({"errors": sum(map(int, errors))} if errors else {}) | {
        word: int(counts[-1]) for word, counts in words.items() if counts
    }


def metrics(parts: list[Part]) -> dict[str, Any]:
    """Counts of one file. ``unclear``: parts that ended with neither a report of the sanitizer's nor a good exit."""
    ended = [p for p in parts if p.status is not None]
    totals = {name: sum(p.counts.get(name, 0) for p in ended) for name in ("passed", "skipped", "failed", "errors")}
    return {
        "tests": sum(len(p.ids) for p in parts),
        **totals,
        "not_reached": sum(len(p.ids) for p in parts if p.status is None),
        "unclear": sum("errors" not in p.counts for p in ended),
        "seconds": round(sum(p.seconds for p in parts), 1),
    }


def report(part: Part) -> str:
    """The lines that matter of a part that was not reached or not clean; "" for a clean one."""
    if part.status == 0 and not part.counts.get("errors"):
        return ""
    if part.status is None:
        return f"# {part.file} part {part.number}: not reached\n" + "\n".join(part.ids)
    lines = [line for line in part.log.splitlines() if line.startswith(("=========", "E  ", "FAILED", "ERROR"))]
    return (
        f"# {part.file} part {part.number}: exit {part.status}, {part.counts}\n" + ("\n".join(lines) or part.log)[:KEPT]
    )
