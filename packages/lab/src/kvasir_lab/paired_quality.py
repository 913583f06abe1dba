"""Shared part of the tools that measure answers: arms that answer the same problems as a plain one, kept on disk."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvasir_lab.bench.codec_quality import Job, Study, answer
from kvasir_lab.study import Report

PLAIN = "plain"
# Pages of an engine on a GPU, which trainings and other engines may share: 262,144 tokens, 2 GiB for `base`.
PAGES = 1 << 14


def room(device: str) -> dict[str, int]:
    """The options of an engine that takes no more of a GPU than it needs."""
    return {"num_pages": PAGES} if device == "cuda" else {}


def no_twin(size: int) -> Path:
    raise AssertionError(f"no job asks for outliers of {size}")


def measure(study: Study, names: Iterable[str], report: Report, config: dict[str, Any]) -> None:
    """Measure ``plain`` and the arms ``names`` that the file does not have with all tasks, and write the file after
    each task.

    An arm is known by its name, by ``config`` and by the number of problems. The plain arm is measured in every run:
    the others are paired with it. An arm that lacks a task is measured again, and stays in the file until then.
    """
    tasks, seeds = tuple(report.options.tasks), tuple(report.options.seeds)
    config = config | {"n": report.options.n, "seeds": list(seeds), "tasks": list(tasks)}
    kept = [a for a in report.before if a["name"] != PLAIN or a["config"] != config]
    done = {a["name"] for a in kept if a["config"] == config and set(tasks) <= set(a["metrics"])}
    todo = [name for name in names if name not in done]

    def save(arms: list[dict[str, Any]]) -> None:
        measured = [a | {"config": config} for a in arms]
        again = {a["name"] for a in measured}
        report.replace(measured + [a for a in kept if a["config"] != config or a["name"] not in again])

    if todo:
        answer(study, [Job(name, 0, tasks, seeds) for name in (PLAIN, *todo)], save)
