"""Run a list of studies in the fewest minutes: in lanes, each of which may have a GPU of its own.

    python -m tools.side_by_side LIST.toml OUT --part together [--only ssa,reward] [--seconds 570]
    python -m tools.side_by_side LIST.toml OUT --part first second

LIST.toml has tables ``[[PART]]`` with ``name``, ``seconds`` and ``command``, a shell command in which OUT stands for
the folder, `kvasir` runs this tree, and environment variables that it names must be set. ``gpu`` (default: all) names
the GPUs that the command sees, ``decides`` says what the result is for, and ``after`` names a file that must be there
before it starts (OUT and environment variables stand for their values). Several parts run at the same time. Commands of
``together`` start at once and measure no time: they share a GPU. Commands of every other part run in their order, one
at a time. A part that runs alone on a machine with fewer GPUs than it names gets the first ones.

Each command has its own process group and is asked to end (SIGTERM) after its seconds, or when --seconds of the whole
run are over, so it must write what it has as it goes. It may then end its servers; whatever is left of it and of the
processes that it started is killed after `GRACE` seconds, since it would hold memory of the GPU. What a command prints
lies in OUT/NAME.log, and what became of it in OUT/PART.status.json. Exit status 1 when a command failed by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from kvasir.errors import ConfigError
from tools import checkout

ROOT = Path(__file__).parent.parent
AT_ONCE = "together"  # The part whose commands all start at once.
GRACE = 20.0  # Seconds between asking a command to end and ending it.
LEAST = 20.0  # A command does not begin with fewer seconds left.
# A machine with a GPU may have the dependencies, and no installed kvasir.
KVASIR = 'kvasir() { python -m kvasir.cli.main "$@"; }\n'


@dataclass(frozen=True)
class Study:
    """A command of the list. ``seconds``: the most that it may take. The other fields: see above."""

    name: str
    seconds: float
    command: str
    gpu: str = ""
    after: str = ""
    decides: str = ""


class Running:
    """A study that was started, in its own process group. Its servers have groups of their own."""

    def __init__(self, study: Study, out: Path, seconds: float) -> None:
        self.study, self.began = study, time.monotonic()
        self.end, self.asked, self.took = self.began + min(study.seconds, seconds), 0.0, 0.0
        self.family: set[psutil.Process] = set()  # what it has started, once it was asked to end
        # Commands that say python get the interpreter that runs this.
        tools = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
        with (out / f"{study.name}.log").open("w") as log:
            self.process = subprocess.Popen(
                KVASIR + study.command.replace("OUT", str(out)),
                shell=True,
                cwd=ROOT,
                env={
                    "OMP_NUM_THREADS": "2",
                    **os.environ,
                    "PATH": tools,
                    "PYTHONPATH": checkout.python_path(),
                    "PYTHONUNBUFFERED": "1",
                }
                | ({"CUDA_VISIBLE_DEVICES": study.gpu} if study.gpu else {}),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.shell = psutil.Process(self.process.pid)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _left(self) -> list[psutil.Process]:
        """Processes of the family that still live. Their children join it."""
        left = []
        for one in [self.shell, *self.family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.family |= set(one.children(recursive=True))
        for one in self.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                if one.status() != psutil.STATUS_ZOMBIE:
                    left.append(one)
        return left

    def kill(self) -> None:
        """End the command and all that it has started, at once."""
        left = self._left()
        self.signal(signal.SIGKILL)
        for one in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()

    def done(self) -> bool:
        """Whether it has ended. Asks it to end when its time is over, and ends it when it does not."""
        now = time.monotonic()
        if now > self.end and not self.asked and self.process.poll() is None:
            self.asked = now
            self._left()
            self.signal(signal.SIGTERM)
            return False
        # The shell may end at once, and what it runs a little later.
        over = self.process.poll() is not None and not (self.asked and self._left())
        if over or self.asked and now > self.asked + GRACE:
            self.kill()
            self.took = self.took or now - self.began
        return over

    def told(self) -> dict[str, object]:
        """Return how the study ended (``done``, ``cut off`` after its seconds, or ``failed``), and the seconds that it
        took."""
        how = "cut off" if self.asked else "failed" if self.process.returncode else "done"
        took = {"how": how, "took": round(self.took, 1), "status": self.process.returncode}
        return vars(self.study) | took


class Lane:
    """The studies of one part. ``at_once``: all start together. ``end``: when the run ends, by time.monotonic()."""

    def __init__(self, part: str, studies: list[Study], out: Path, end: float) -> None:
        self.part, self.out, self.end, self.at_once = part, out, end, part == AT_ONCE
        self.waiting, self.running = list(studies), list[Running]()
        self.told: list[dict[str, object]] = []

    def advance(self) -> bool:
        """Note what has ended and start what may start. Return whether nothing is left."""
        for one in [one for one in self.running if one.done()]:
            self.running.remove(one)
            self._tell(one.told())
        for study in list(self.waiting):
            left = self.end - time.monotonic()
            if self.running and not self.at_once:
                break
            if left < LEAST:
                self.waiting.remove(study)
                self._tell(vars(study) | {"how": "no time left", "took": 0.0})
            elif not study.after or Path(os.path.expandvars(study.after.replace("OUT", str(self.out)))).exists():
                self.waiting.remove(study)
                self.running.append(Running(study, self.out, left))
            elif not self.at_once:
                break
        return not self.waiting and not self.running

    def kill(self) -> None:
        for one in self.running:
            one.kill()

    def _tell(self, what: dict[str, object]) -> None:
        self.told.append(what)
        print(f"{what['name']}: {what['how']} after {what['took']} s", flush=True)
        (self.out / f"{self.part}.status.json").write_text(json.dumps(self.told, indent=1) + "\n")


def read(file: Path, parts: list[str], only: str) -> dict[str, list[Study]]:
    """The studies by part. Raises ConfigError for a part, or for a name, that the list does not have."""
    table = tomllib.loads(file.read_text())
    if unknown := set(parts) - set(table):
        raise ConfigError(f"--part {', '.join(sorted(unknown))}: {file.name} has {', '.join(table)}")
    studies = {part: [Study(**entry) for entry in table[part]] for part in parts}
    names = [study.name for part in studies.values() for study in part]
    wanted = only.split(",") if only else names
    if unknown := set(wanted) - set(names):
        raise ConfigError(
            f"--only {', '.join(sorted(unknown))}: {file.name} has {', '.join(names)} in {', '.join(parts)}"
        )
    return {part: [study for study in those if study.name in wanted] for part, those in studies.items()}


def gpus() -> int:
    """Number of GPUs of this machine."""
    import torch

    return torch.cuda.device_count()


def placed(studies: dict[str, list[Study]], count: int) -> dict[str, list[Study]]:
    """The studies with GPUs that are among ``count`` (0: a dry run without any, which changes nothing). Raises
    ConfigError where parts that run at the same time, or a command, name more."""

    def moved(study: Study) -> Study:
        wanted = [int(number) for number in study.gpu.split(",") if number]
        if not count or max(wanted, default=0) < count:
            return study
        if len(wanted) > count or len(studies) > 1:
            raise ConfigError(
                f"{study.name} needs GPU {study.gpu}, and GPUs here are numbered 0 to {count - 1}: run fewer parts at "
                "a time, or use a machine with more GPUs"
            )
        return replace(study, gpu=",".join(map(str, range(len(wanted)))))

    return {part: [moved(study) for study in those] for part, those in studies.items()}


def check_variables(studies: dict[str, list[Study]]) -> None:
    """Raise ConfigError for an environment variable that a study names and that is not set."""
    for study in (study for those in studies.values() for study in those):
        for name in re.findall(r"\$\{?([A-Z][A-Z_]*)\b(?!:-)", f"{study.after} {study.command}"):
            if name != "OUT" and name not in os.environ and not (study.gpu and name == "CUDA_VISIBLE_DEVICES"):
                raise ConfigError(f"{study.name} needs the environment variable {name}: set it, as the list says")


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("list", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--part", nargs="+", required=True, help="parts of the list, which run at the same time")
    parser.add_argument("--only", default="", help="names, with commas")
    parser.add_argument("--seconds", type=float, default=570.0, help="of the whole run")
    options = parser.parse_args(given)
    checkout.write()
    studies, end = read(options.list, options.part, options.only), time.monotonic() + options.seconds
    check_variables(studies)
    studies = placed(studies, gpus())
    out = options.output.resolve()
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the studies, too
    lanes = [Lane(part, those, out, end) for part, those in studies.items()]
    try:
        while not all([lane.advance() for lane in lanes]):  # a list, so that each is looked at
            time.sleep(0.2)
    finally:
        for lane in lanes:
            lane.kill()
    return int(any(told["how"] == "failed" for lane in lanes for told in lane.told))


if __name__ == "__main__":
    sys.exit(main())
