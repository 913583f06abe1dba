"""Learning rates of a drafter that meets another task: tokens a forward after so many steps on its traces.

Usage: python -m kvasir_lab.studies learn_rates [OUT.json] --model base --rates 1e-5 1e-4 3e-4

A drafter is trained on the first task, then on traces of the second one, with the loss, packing and optimizer of
``kvasir.learn``. After some steps it drafts for other problems of both tasks, as `kvasir bench drift` counts. There is
no gate, and traces are used again and again: what is left is the rate.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Annotated

from kvasir.learn.base import Base
from kvasir.learn.learner import Learner, Recipe, head_to_learn
from kvasir.models.checkpoint import resolve
from kvasir.speculation.head import Head
from kvasir_lab.bench import drift
from kvasir_lab.study import Arms, Report, study


def per_forward(replay: drift.Replay, head: Head, task: int) -> float:
    """Tokens a forward that ``head`` gives on all requests of a task."""
    found = [replay.request(i, replay.served(head))[:2] for i in replay.stream.of(task)]
    return round(sum(tokens for tokens, _ in found) / sum(forwards for _, forwards in found), 3)


@study("learn-rates-{kind}-{model}")
def main(
    report: Report,
    *,
    model: str = "base",
    kind: str = "eagle",
    tasks: tuple[str, ...] = ("chain", "schema"),
    rates: Annotated[tuple[float, ...], "for a width of 4,096"] = (1e-5, 1e-4, 3e-4),
    steps: Annotated[tuple[int, ...], "after which it is measured"] = (25, 50, 100),
    start_steps: Annotated[int, "on the first task"] = 150,
    requests: Annotated[int, "of each task"] = 48,
    max_tokens: Annotated[int, "most tokens of a reply"] = 256,
    device: str = "cpu",
) -> Arms:
    target, tokenizer = drift.load_target(model, device)
    base = Base.read(Path(resolve(model)), target.device, target.dtype)
    replay, others = (
        drift.Replay(target, base, drift.sampled(target, tokenizer, tasks, requests, max_tokens, split))
        for split in ("test", "train")
    )
    recipe = {"rows": drift.ROWS, "rate": drift.OFFLINE_RATE}
    start = drift.trained(others, head_to_learn(kind, base, ""), others.stream.of(0), start_steps, recipe)
    traces = [others.request(i, others.served(start))[2] for i in others.stream.of(1)]
    setting = {"model": model, "kind": kind, "tasks": tasks, "start_steps": start_steps, "requests": requests}
    before = {f"{task}_per_forward": per_forward(replay, start, n) for n, task in enumerate(tasks)}
    yield "before", setting | {"rows": drift.ROWS, "max_tokens": max_tokens}, before
    for rate in rates:
        options = {"rows": drift.ROWS, "rate": rate, "every": 1 << 30, "pool": 1 << 30}
        learner, metrics = Learner(copy.deepcopy(start), base, Recipe(**options), scratch=False), {}
        for count in sorted(steps):
            while learner.steps < count:
                if not len(learner.pieces):
                    for trace in traces:
                        learner.add(trace)
                drift.learn(learner, count - learner.steps)
            for n, task in enumerate(tasks):
                metrics[f"{task}_per_forward_{count}"] = per_forward(replay, learner.head, n)
        metrics["rate_at_this_width"] = round(learner.rate, 8)
        yield f"rate {rate:g}", {"rate": rate}, metrics
