"""Learning rates of a drafter that meets another task: tokens a forward after so many steps on its traces.

Usage: python -m tools.learn_rates [OUT.json] --model base --rates 1e-5 1e-4 3e-4

A drafter is trained on the first task, then on traces of the second one, with the loss, packing and optimizer of
``kvasir.learn``. After some steps it drafts for other problems of both tasks, as `kvasir bench drift` counts. There is
no gate, and traces are used again and again: what is left is the rate.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

from kvasir.bench import drift
from kvasir.bench.result import arm, finish, result, save
from kvasir.learn.base import Base
from kvasir.learn.learner import Learner, Recipe, head_to_learn
from kvasir.models.checkpoint import resolve
from kvasir.speculation.head import Head


def per_forward(replay: drift.Replay, head: Head, task: int) -> float:
    """Tokens a forward that ``head`` gives on all requests of a task."""
    found = [replay.request(i, replay.served(head))[:2] for i in replay.stream.of(task)]
    return round(sum(tokens for tokens, _ in found) / sum(forwards for _, forwards in found), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, nargs="?")
    parser.add_argument("--model", default="base")
    parser.add_argument("--kind", default="eagle")
    parser.add_argument("--tasks", nargs=2, default=["chain", "schema"])
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-5, 1e-4, 3e-4], help="for a width of 4,096")
    parser.add_argument("--steps", nargs="+", type=int, default=[25, 50, 100], help="after which it is measured")
    parser.add_argument("--start-steps", type=int, default=150, help="on the first task")
    parser.add_argument("--requests", type=int, default=48, help="of each task")
    parser.add_argument("--max-tokens", type=int, default=256, help="most tokens of a reply")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--commit")
    given = parser.parse_args()
    target, tokenizer = drift.load_target(given.model, given.device)
    base = Base.read(Path(resolve(given.model)), target.device, target.dtype)
    replay, others = (
        drift.Replay(
            target, base, drift.sampled(target, tokenizer, given.tasks, given.requests, given.max_tokens, split)
        )
        for split in ("test", "train")
    )
    recipe = {"rows": drift.ROWS, "rate": drift.OFFLINE_RATE}
    start = drift.trained(others, head_to_learn(given.kind, base, ""), others.stream.of(0), given.start_steps, recipe)
    traces = [others.request(i, others.served(start))[2] for i in others.stream.of(1)]
    before = {f"{task}_per_forward": per_forward(replay, start, n) for n, task in enumerate(given.tasks)}
    setting = {name: getattr(given, name) for name in ("model", "kind", "tasks", "start_steps", "requests")}
    arms = [arm("before", setting | {"rows": drift.ROWS, "max_tokens": given.max_tokens}, before)]
    outcome = result(f"learn-rates-{given.kind}-{Path(given.model).name}", arms)
    for rate in given.rates:
        options = {"rows": drift.ROWS, "rate": rate, "every": 1 << 30, "pool": 1 << 30}
        learner, metrics = Learner(copy.deepcopy(start), base, Recipe(**options), scratch=False), {}
        for steps in sorted(given.steps):
            while learner.steps < steps:
                if not len(learner.pieces):
                    for trace in traces:
                        learner.add(trace)
                drift.learn(learner, steps - learner.steps)
            for n, task in enumerate(given.tasks):
                metrics[f"{task}_per_forward_{steps}"] = per_forward(replay, learner.head, n)
        metrics["rate_at_this_width"] = round(learner.rate, 8)
        outcome["arms"].append(arm(f"rate {rate:g}", {"rate": rate}, metrics))
        save(outcome, given.output, given.commit)
    finish(outcome, given.output, given.commit)


if __name__ == "__main__":
    main()
