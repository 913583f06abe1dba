"""Run many studies on one GPU in the fewest minutes: those of quality side by side, those of time one by one.

    python -m tools.side_by_side LIST.toml OUT --part together [--only ssa,reward] [--seconds 570]
    python -m tools.side_by_side LIST.toml OUT --part alone [--only sonic]

LIST.toml has tables ``[[together]]`` and ``[[alone]]`` with ``name``, ``seconds`` and ``command``, a shell command in
which OUT stands for the folder. Commands of ``together`` start at once, each in its own process group, and measure no
time: they share the GPU. Commands of ``alone`` run in their order. Each is ended after its seconds, or when --seconds
of the whole part are over, so it must write what it has as it goes. What a command prints lies in OUT/NAME.log, and
what became of it in OUT/PART.status.json. Exit status 1 when a command failed by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

from kvasir.errors import ConfigError

ROOT = Path(__file__).parent.parent
PARTS = ("together", "alone")
GRACE = 15.0  # Seconds between asking a command to end and ending it.
LEAST = 20.0  # A command of the part alone does not begin with fewer seconds left.


@dataclass(frozen=True)
class Study:
    """A command of the list. ``seconds``: the most that it may take."""

    name: str
    seconds: float
    command: str


class Running:
    """A study that was started, in its own process group, so that its engines end with it."""

    def __init__(self, study: Study, out: Path, seconds: float) -> None:
        self.study, self.began = study, time.monotonic()
        self.end, self.asked, self.took = self.began + min(study.seconds, seconds), 0.0, 0.0
        path = os.pathsep.join(filter(None, (str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH"))))
        # Commands that say python get the interpreter that runs this.
        tools = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
        with (out / f"{study.name}.log").open("w") as log:
            self.process = subprocess.Popen(
                study.command.replace("OUT", str(out)),
                shell=True,
                cwd=ROOT,
                env={"OMP_NUM_THREADS": "2", **os.environ, "PATH": tools, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def done(self) -> bool:
        """Whether it has ended. Asks it to end when its time is over, and ends it when it does not."""
        now = time.monotonic()
        if self.process.poll() is not None:
            if not self.took:
                self.took = now - self.began
                self.signal(signal.SIGKILL)  # what it left running would hold memory of the GPU
            return True
        if now > self.end and not self.asked:
            self.asked = now
            self.signal(signal.SIGTERM)
        elif self.asked and now > self.asked + GRACE:
            self.signal(signal.SIGKILL)
        return False

    def told(self) -> dict[str, object]:
        """Return how the study ended (``done``, ``cut off`` after its seconds, or ``failed``), and its seconds."""
        how = "cut off" if self.asked else "failed" if self.process.returncode else "done"
        return {"how": how, "seconds": round(self.took, 1), "status": self.process.returncode} | vars(self.study)


def read(file: Path, part: str, only: str) -> list[Study]:
    """The studies of a part. Raises ConfigError for a name that the part does not have."""
    studies = [Study(**entry) for entry in tomllib.loads(file.read_text()).get(part, ())]
    names = [study.name for study in studies]
    wanted = only.split(",") if only else names
    if unknown := set(wanted) - set(names):
        raise ConfigError(f"--only {', '.join(sorted(unknown))}: {file.name} has {', '.join(names)} in {part}")
    return [study for study in studies if study.name in wanted]


def together(studies: list[Study], out: Path, seconds: float) -> list[Running]:
    """Run all studies at once and wait for them."""
    started: list[Running] = []
    try:
        started += [Running(study, out, seconds) for study in studies]
        while not all([one.done() for one in started]):  # a list, so that each is looked at
            time.sleep(0.2)
    finally:
        for one in started:
            one.signal(signal.SIGKILL)
    return started


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("list", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--only", default="", help="names, with commas")
    parser.add_argument("--seconds", type=float, default=570.0, help="of the whole part")
    options = parser.parse_args(given)
    studies, end = read(options.list, options.part, options.only), time.monotonic() + options.seconds
    out = options.output.resolve()
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the studies, too
    found: list[dict[str, object]] = []
    for batch in [studies] if options.part == PARTS[0] else [[study] for study in studies]:
        left = end - time.monotonic()
        if left < LEAST:
            found += [{"how": "no time left"} | vars(study) for study in batch]
            continue
        for one in together(batch, out, left):
            found.append(one.told())
            print(f"{one.study.name}: {found[-1]['how']} after {one.took:.0f} s", flush=True)
        (out / f"{options.part}.status.json").write_text(json.dumps(found, indent=1) + "\n")
    (out / f"{options.part}.status.json").write_text(json.dumps(found, indent=1) + "\n")
    return int(any(told["how"] == "failed" for told in found))


if __name__ == "__main__":
    sys.exit(main())
