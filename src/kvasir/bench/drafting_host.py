"""``kvasir bench speculation --host``: what drafters that run on the CPU cost a step, and how much memory they hold.

No model runs: sequences read the lab's own documents, so many tokens a step as the proposal had right and one more. Timed are
the drafter's proposals for all sequences of a step and the controller's cut, each by itself. Memory is what the drafter says it
holds, at its most, beside what the process grew by.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

from kvasir.bench.result import arm, finish, percentile, result
from kvasir.bench.speculation import TASKS
from kvasir.errors import ConfigError
from kvasir.models.checkpoint import resolve
from kvasir.speculation.controller import Controller
from kvasir.speculation.drafter import Ask, Drafter
from kvasir.speculation.router import load_drafter
from kvasir.types import Request, SamplingParams, Sequence

NODES = 8
WARM_STEPS = 20


def documents(folder: str, tasks: list[str]) -> Iterator[tuple[list[int], list[int]]]:
    """Prompt and reply of problem after problem, the tasks in turns, without end."""
    from kvasir.lab import tokenizer as lab_tokenizer
    from kvasir.lab.task import load_task

    tokenizer, loaded = lab_tokenizer.load(resolve(folder)), [load_task(spec) for spec in tasks]
    for first in itertools.count(0, 64):
        drawn = [task.problems("train", first, 64) for task in loaded]
        for problem in (p for some in zip(*drawn) for p in some):
            yield tuple(tokenizer.encode(text, add_special_tokens=False).ids for text in (problem.prompt, problem.solution + "<|im_end|>"))


def resident_bytes() -> int:
    """Of this process, where the system tells; else 0."""
    file = Path("/proc/self/statm")
    return int(file.read_text().split()[1]) * 4096 if file.exists() else 0


class Reader:
    """A sequence that reads its document. ``left``: what it has not read."""

    def __init__(self, number: int, prompt: list[int], reply: list[int]) -> None:
        self.seq = Sequence(Request(id=str(number), prompt_ids=prompt, params=SamplingParams(), seed=number, max_tokens=len(reply)))
        self.left = reply


def measure(drafter: Drafter, source: Iterator[tuple[list[int], list[int]]], num_seqs: int, num_tokens: int) -> dict[str, float | int]:
    """Read ``num_tokens`` tokens, prompts included, ``num_seqs`` sequences at a time."""
    control = Controller(lambda seqs, context, drafts, drafted: 1.0 + 0.001 * (seqs + drafts))
    control._rest = 0
    fresh = (Reader(i, *document) for i, document in enumerate(source))
    readers = [next(fresh) for _ in range(num_seqs)]
    done = sum(len(reader.seq.tokens) for reader in readers)
    began_bytes, most_bytes, accepted, drafted = resident_bytes(), 0, 0, 0
    times: dict[str, list[float]] = {"propose": [], "cut": [], "observe": []}
    for reader in readers:
        drafter.open(reader.seq)
    while done < num_tokens:
        asks = [Ask(reader.seq, NODES, NODES) for reader in readers]
        stamps = [time.perf_counter()]
        trees = drafter.propose(asks)
        stamps.append(time.perf_counter())
        control.allocate(trees, 0, num_seqs * NODES, num_seqs)  # for its time: what was proposed is verified whole
        stamps.append(time.perf_counter())
        for reader, tree in zip(readers, trees):
            path = tree.path(reader.left)
            taken, reader.left = reader.left[:len(path) + 1], reader.left[len(path) + 1:]
            reader.seq.tokens += taken
            control.observe(tree, path)
            drafter.observe(reader.seq, tree, path)
            done, accepted, drafted = done + len(taken), accepted + len(path), drafted + len(tree)
        stamps.append(time.perf_counter())
        for name, first, last in zip(times, stamps, stamps[1:]):
            times[name].append(last - first)
        for i, reader in enumerate(readers):
            if not reader.left:
                drafter.close(reader.seq)
                readers[i] = next(fresh)
                drafter.open(readers[i].seq)
                done += len(readers[i].seq.tokens)
        most_bytes = max(most_bytes, drafter.state_bytes())
    steps = {name: values[WARM_STEPS:] or values for name, values in times.items()}
    found: dict[str, float | int] = {"steps": len(times["propose"]), "tokens": done, "drafted": drafted, "accepted": accepted}
    for name, values in steps.items():
        found |= {f"{name}_ms_p50": round(1e3 * percentile(values, 0.5), 3), f"{name}_ms_p99": round(1e3 * percentile(values, 0.99), 3)}
    return found | {"held_mb": round(most_bytes / 1e6, 2), "grown_mb": round((resident_bytes() - began_bytes) / 1e6, 1)}


def run(folder: str, *, drafters: list[str] | None, tasks: list[str] | None, batches: list[int], num_tokens: int, output: Path | None,
        commit: str | None) -> None:
    arms = []
    for spec in drafters or ["ngram", "suffix", "token_recycling"]:
        for batch in batches:
            drafter = load_drafter(spec)
            if drafter.place != "cpu":
                raise ConfigError(f"{spec} runs on the device; what is measured here is the host: ngram, suffix, token_recycling")
            metrics = measure(drafter, documents(folder, tasks or list(TASKS)), batch, num_tokens)
            arms.append(arm(f"{spec} {batch}", {"drafter": spec, "batch": batch, "nodes": NODES, "tasks": tasks or list(TASKS)}, metrics))
    finish(result("drafting-host", arms), output, commit)
