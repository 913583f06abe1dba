"""compute-sanitizer over every own kernel: the kernel tests, on the GPU, several parts of them at a time.

    python tools/gpu_sanitize.py OUT [FILE...] [--tool memcheck] [--jobs 8] [--seconds 500]

FILE: of tests/kernels/triton (default: all); --tool: memcheck, racecheck, synccheck or initcheck. Every tensor has an allocation of its
own, or an access behind it would fall into a neighbour. A file runs in parts of a few tests, first parts first, until the time is over: what
was not reached is counted, and named by OUT/sanitize-TOOL.txt beside what was found. OUT/sanitize-TOOL.json has a row a file. Exit status 0
only where every test was reached and nothing was found. Compiled kernels are cached, so a run of the tests before this one shortens it.
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

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from kvasir.bench.compare import keeper  # noqa: E402
from kvasir.bench.result import arm, finish, result  # noqa: E402

FOLDER = Path("tests/kernels/triton")
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
SIZE = 24  # tests of a part: a start costs some ten seconds
MARK = 99  # exit status of the sanitizer where it found something
KEPT = 16_000  # characters of a part's report
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--tool", choices=TOOLS, default="memcheck")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument(
        "--commit",
        default=os.environ.get("KVASIR_COMMIT"),
        help="what is measured, where there is no repository to ask",
    )
    args = parser.parse_args()
    until = time.monotonic() + args.seconds
    sanitizer = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
    if sanitizer is None:
        parser.error("compute-sanitizer is not installed: it comes with the CUDA toolkit")
    parts = divided(collected(args.files))
    command = [sanitizer, "--tool", args.tool, "--error-exitcode", str(MARK), "--print-limit", "20", *PYTEST]
    config, file = (
        {"tool": args.tool, "jobs": args.jobs, "seconds": args.seconds},
        args.output / f"sanitize-{args.tool}.json",
    )
    args.output.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        for _ in pool.map(lambda part: run(part, command, until), parts):
            keeper(file, args.commit)(outcome(parts, config))  # a run that is cut off keeps what it has
            file.with_suffix(".txt").write_text("\n\n".join(filter(None, map(report, parts))) + "\n")
    finish(outcome(parts, config), file, args.commit)
    return int(any(part.status != 0 for part in parts))


def outcome(parts: list[Part], config: dict[str, Any]) -> dict[str, Any]:
    arms = [
        arm(name, config, metrics([p for p in parts if p.file == name]))
        for name in dict.fromkeys(p.file for p in parts)
    ]
    return result(f"sanitize-{config['tool']}", arms)


def environment(file: str = "") -> dict[str, str]:
    """A graph cannot be captured without the caching allocator: a file that does so keeps it."""
    paths = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH")]))
    captures = file and "CudaCapture" in (ROOT / FOLDER / file).read_text()
    return os.environ | {"PYTHONPATH": paths} | ({} if captures else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})


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
    """First parts of all files first, so that time which runs out costs every file a little instead of one all."""
    parts = [
        Part(file, ids[at : at + size], at // size) for file, ids in tests.items() for at in range(0, len(ids), size)
    ]
    return sorted(parts, key=lambda part: part.number)


def run(part: Part, command: list[str], until: float) -> None:
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
    """What the sanitizer and pytest counted."""
    errors = re.findall(r"^========= (?:ERROR|RACECHECK) SUMMARY: (\d+)", log, re.M)
    words = {
        word: re.findall(rf"^(?:=+ )?(?:.*, )?(\d+) {word}\b", log, re.M) for word in ("passed", "skipped", "failed")
    }
    return ({"errors": sum(map(int, errors))} if errors else {}) | {
        word: int(counts[-1]) for word, counts in words.items() if counts
    }


def metrics(parts: list[Part]) -> dict[str, Any]:
    """Of one file. ``unclear``: parts that ended with neither a report of the sanitizer's nor a good exit."""
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
    """Nothing for a part that is clean; else what it was and the lines that matter, so that one file holds them all."""
    if part.status == 0 and not part.counts.get("errors"):
        return ""
    if part.status is None:
        return f"# {part.file} part {part.number}: not reached\n" + "\n".join(part.ids)
    lines = [line for line in part.log.splitlines() if line.startswith(("=========", "E  ", "FAILED", "ERROR"))]
    return (
        f"# {part.file} part {part.number}: exit {part.status}, {part.counts}\n" + ("\n".join(lines) or part.log)[:KEPT]
    )


if __name__ == "__main__":
    sys.exit(main())
