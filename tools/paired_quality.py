"""Shared part of the tools that measure answers: arms that answer the same problems as a plain one, kept on disk."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvasir.bench.codec_quality import Job, Study, answer
from kvasir.bench.result import result, write_json

PLAIN = "plain"
# Pages of an engine on a GPU, which trainings and other engines may share: 262,144 tokens, 2 GiB for `base`.
PAGES = 1 << 14


def arguments(parser: argparse.ArgumentParser, model: str, tasks: tuple[str, ...], count: int) -> None:
    """Add the options that all such tools have."""
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", default=model)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("-n", type=int, default=count, help="problems of each task and seed")
    parser.add_argument("--seeds", nargs="*", type=int, default=(7,))
    parser.add_argument("--tasks", nargs="*", default=tasks)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="when to stop")


def room(device: str) -> dict[str, int]:
    """The options of an engine that takes no more of a GPU than it needs."""
    return {"num_pages": PAGES} if device == "cuda" else {}


def no_twin(size: int) -> Path:
    raise AssertionError(f"no job asks for outliers of {size}")


def measure(study: Study, names: Iterable[str], options: argparse.Namespace, case: str, config: dict[str, Any]) -> None:
    """Measure ``plain`` and the arms ``names`` that the file does not have with all tasks, and write the file after
    each task.

    An arm is known by its name, by ``config`` and by the number of problems. The plain arm is measured in every run:
    the others are paired with it. An arm that lacks a task is measured again, and stays in the file until then.
    """
    # what a result records as its command
    sys.argv[:] = ["python", "-m", f"tools.{Path(sys.argv[0]).stem}", *sys.argv[1:]]
    config = config | {"n": options.n, "seeds": list(options.seeds), "tasks": list(options.tasks)}
    before = json.loads(options.output.read_text())["arms"] if options.output.exists() else []
    kept = [a for a in before if a["name"] != PLAIN or a["config"] != config]
    done = {a["name"] for a in kept if a["config"] == config and set(options.tasks) <= set(a["metrics"])}
    todo = [name for name in names if name not in done]

    def save(arms: list[dict[str, Any]]) -> None:
        measured = [a | {"config": config} for a in arms]
        again = {a["name"] for a in measured}
        others = [a for a in kept if a["config"] != config or a["name"] not in again]
        write_json(options.output, result(case, measured + others))

    given = tuple(options.tasks), tuple(options.seeds)
    if todo:
        answer(study, [Job(name, 0, *given) for name in (PLAIN, *todo)], save)
