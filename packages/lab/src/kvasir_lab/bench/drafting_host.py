"""``kvasir bench speculation --host``: what CPU drafters cost a step, and how much memory they hold.

No model runs. Sequences read the lab's own documents through the engine's own ``Drafting``, on a stand-in for the
runner. A step advances a sequence by the draft tokens that match its document, plus one.

Three parts of a step are timed, by the wall clock and by processor time, which other processes do not lengthen.
``propose``: the drafter's proposals for all sequences. ``cut``: the controller's choice among them; only its time
counts, since the proposals are verified whole. ``around``: the rest of ``Drafting``, from asking to observing what was
right. Memory is the most that the drafter reports, next to the growth of the process.

A drafter with native code is measured both with and without it.
"""

from __future__ import annotations

import functools
import gc
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kvasir.bench.result import arm, finish, percentile, result
from kvasir.client.engine_process import collect_rarely
from kvasir.config import SpeculationConfig
from kvasir.engine.drafts.drafting import Drafting
from kvasir.errors import ConfigError
from kvasir.models.checkpoint import read_config, resolve
from kvasir.models.families import build_spec
from kvasir.speculation.controller import Controller
from kvasir.speculation.drafter import Drafter
from kvasir.speculation.router import load_drafter
from kvasir.speculation.tree import DraftTree
from kvasir.types import Request, SamplingParams, Sequence, Span, SpanResult, Status
from kvasir_lab.bench.speculation import TASKS

# Most tokens drafted for a sequence in a step.
NODES = 8
# First steps, which do not count.
WARM_STEPS = 20


def documents(folder: str, tasks: list[str]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the prompt and the reply of one problem after another, alternating between the tasks, without end."""
    from kvasir_lab import tokenizer as lab_tokenizer
    from kvasir_lab.lookup import load_task

    tokenizer, loaded = lab_tokenizer.load(resolve(folder)), [load_task(spec) for spec in tasks]
    for first in itertools.count(0, 64):
        drawn = [task.problems("train", first, 64) for task in loaded]
        for problem in (p for some in zip(*drawn) for p in some):
            yield tuple(
                tokenizer.encode(text, add_special_tokens=False).ids
                for text in (problem.prompt, problem.solution + "<|im_end|>")
            )


def resident_bytes() -> int:
    """Resident memory of this process in bytes; 0 where the system does not tell."""
    file = Path("/proc/self/statm")
    return int(file.read_text().split()[1]) * 4096 if file.exists() else 0


class Clock:
    """Seconds of the parts of each step, by name: ``wall`` clock and ``processor`` time."""

    def __init__(self) -> None:
        self.wall: dict[str, list[float]] = {}
        self.processor: dict[str, list[float]] = {}

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            wall, processor = time.perf_counter(), time.thread_time()
            found = call(*args)
            self.add(name, time.perf_counter() - wall, time.thread_time() - processor)
            return found

        return run

    def add(self, name: str, wall: float, processor: float) -> None:
        self.wall.setdefault(name, []).append(wall)
        self.processor.setdefault(name, []).append(processor)

    def part(self, name: str, wholes: list[str], less: str) -> None:
        """Set part ``name`` to the sum of the parts ``wholes`` minus the part ``less``, step by step."""
        for times in (self.wall, self.processor):
            times[name] = [
                sum(parts) - inner for *parts, inner in zip(*(times.pop(whole) for whole in wholes), times[less])
            ]

    def figures(self) -> dict[str, float]:
        """Milliseconds of a step by part: median and p99, and median processor time, without warm-up steps."""
        found = {}
        for name in self.wall:
            wall, processor = (times[name][WARM_STEPS:] or times[name] for times in (self.wall, self.processor))
            found |= {
                f"{name}_ms_p50": percentile(wall, 0.5),
                f"{name}_ms_p99": percentile(wall, 0.99),
                f"{name}_cpu_ms_p50": percentile(processor, 0.5),
            }
        return {name: round(1e3 * value, 3) for name, value in found.items()}


class Reader:
    """A sequence that reads its document. ``left`` holds the tokens that it has not read."""

    def __init__(self, number: int, prompt: list[int], reply: list[int], table: list[int]) -> None:
        self.seq = seq = Sequence(
            Request(
                id=str(number), prompt_ids=prompt, params=SamplingParams(), seed=number, max_tokens=len(reply) + NODES
            )
        )
        seq.status, seq.seat, seq.tables, seq.num_computed = Status.RUNNING, number, [table], len(prompt) - 1
        self.left = reply

    def verify(self, path: list[int]) -> tuple[Span, SpanResult]:
        """The span and the result of a step in which the draft nodes of ``path`` are right."""
        seq, rows = self.seq, 1 + len(self.seq.draft)
        parents = [-1, *(parent + 1 for parent in seq.draft_parents)] if seq.draft_parents else None
        span = Span(
            seq, seq.num_computed, rows, want={"sample": range(rows)}, commit="walk", parents=parents, seat=seq.seat
        )
        return span, SpanResult(tokens=self.left[: len(path) + 1], path=[0, *(node + 1 for node in path)])

    def advance(self, count: int) -> None:
        self.seq.tokens += self.left[:count]
        self.left = self.left[count:]
        self.seq.num_computed = len(self.seq.tokens) - 1


def _runner(folder: str) -> SimpleNamespace:
    """Stand-in, without a model, for the runner that ``Drafting`` asks."""
    spec, place = build_spec(read_config(resolve(folder))), SimpleNamespace(dtype=torch.float32, exact=False)
    model = SimpleNamespace(spec=spec, weight_bytes=4, place=place)
    pool = SimpleNamespace(page_slots=16, move_slots=lambda group, sources, targets: None)
    return SimpleNamespace(
        model=model,
        device=torch.device("cpu"),
        graphs=None,
        captures=0,
        parts=SimpleNamespace(taps=None, packer=SimpleNamespace(states=())),
        pool=pool,
        sampler=SimpleNamespace(num_top=0),
        capture=lambda: None,
    )


def measure(
    drafter: Drafter, folder: str, source: Iterator[tuple[list[int], list[int]]], num_seqs: int, num_tokens: int
) -> dict[str, float | int]:
    """Metrics of reading ``num_tokens`` tokens, prompts included, with ``num_seqs`` sequences at a time."""
    control = Controller(lambda seqs, context, drafts, drafted: 1.0 + 0.001 * (seqs + drafts))
    control._rest = 0
    config = SpeculationConfig(drafter=drafter.name, draft_control="fixed", max_draft_tokens=NODES)
    drafting = Drafting(config, drafter, _runner(folder), num_seqs * (2 + NODES), 1 << 20)
    table = list(range(1 << 12))
    fresh = (Reader(i, *document, table) for i, document in enumerate(source))
    readers = [next(fresh) for _ in range(num_seqs)]
    done = sum(len(reader.seq.tokens) for reader in readers)
    began_bytes, most_bytes, accepted, drafted = resident_bytes(), 0, 0, 0
    clock, proposed = Clock(), []
    propose = clock.timed("propose", drafter.propose)
    drafter.propose = lambda asks: proposed.append(propose(asks)) or proposed[-1]
    ask = clock.timed("ask", drafting.propose)
    allocate = clock.timed("cut", control.allocate)

    @functools.partial(clock.timed, "commit")
    def commit(verified: list[tuple[Reader, Span, SpanResult]]) -> None:
        for _, span, found in verified:
            drafting.committing(span, found, found.tokens)

    @functools.partial(clock.timed, "tell")
    def tell(verified: list[tuple[Reader, Span, SpanResult]]) -> None:
        for _, span, found in verified:
            drafting.observe(span, found)
        drafting.learn()

    thresholds = gc.get_threshold()
    collect_rarely()  # as in the engine's process
    while done < num_tokens:
        ask([reader.seq for reader in readers])
        allocate(proposed.pop(), 0, num_seqs * NODES, num_seqs)
        verified = []
        for reader in readers:
            tree = drafting.draft_of(reader.seq)
            path = [] if tree is None else tree.path(reader.left)
            verified.append((reader, *reader.verify(path)))
            control.observe(tree or DraftTree(), path)
            accepted, drafted = accepted + len(path), drafted + len(reader.seq.draft)
        done += sum(len(found.tokens) for _, _, found in verified)
        commit(verified)
        for reader, _, found in verified:
            reader.advance(len(found.tokens))
        tell(verified)
        for i, reader in enumerate(readers):
            if not reader.left:
                drafting.ended(reader.seq, "stop")
                readers[i] = next(fresh)
                done += len(readers[i].seq.tokens)
        most_bytes = max(most_bytes, drafter.state_bytes())
    gc.unfreeze()
    gc.set_threshold(*thresholds)
    clock.part("around", ["ask", "commit", "tell"], "propose")
    return (
        {"steps": len(clock.wall["propose"]), "tokens": done, "drafted": drafted, "accepted": accepted}
        | clock.figures()
        | {"held_mb": round(most_bytes / 1e6, 2), "grown_mb": round((resident_bytes() - began_bytes) / 1e6, 1)}
    )


def run(
    folder: str,
    *,
    drafters: list[str] | None,
    tasks: list[str] | None,
    batches: list[int],
    num_tokens: int,
    output: Path | None,
    commit: str | None,
) -> None:
    arms = []
    for spec in drafters or ["ngram", "suffix", "token_recycling"]:
        for batch in batches:
            drafter = load_drafter(spec)
            if drafter.place != "cpu":
                raise ConfigError(
                    f"{spec} runs on the device; --host measures CPU drafters: ngram, suffix, token_recycling"
                )
            tasks = tasks or list(TASKS)
            for name, one in ((spec, drafter), (f"{spec} without native code", drafter.reference())):
                if one is not None:
                    one.name = drafter.name
                    metrics = measure(one, folder, documents(folder, tasks), batch, num_tokens)
                    arms.append(
                        arm(
                            f"{name} {batch}",
                            {"drafter": spec, "batch": batch, "nodes": NODES, "tasks": tasks},
                            metrics,
                        )
                    )
    finish(result("drafting-host", arms), output, commit)
