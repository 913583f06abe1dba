"""``kvasir bench drift`` and its stream: what drafters that learn are worth when traffic changes, in tokens a forward.

One stream of requests, a task after another, is replayed in every arm. The replies are the model's own at temperature
0, so tokens are equal and forwards compare exactly; nothing is timed. A request is drafted for with the weights that
are served then: one chain of the head's depth, walked as the engine would. What its verification shows, rejected drafts
included, becomes a trace as the engine writes it, and the trainer (`kvasir.learn.learner`) takes some steps. A
candidate that passes the first gate is served from the next request on; the second gate, time, needs an engine.

Arms: *static* (as trained on the first task), *accepted only*, rejected branches with a weight of 0.25 and of 1, and
the *oracle*, which was trained on other problems of each task before it comes. It takes longest and runs last. The
result is written after every arm.

Legend: T tokens, R rows, D guesses of a draft, L tapped layers, E model dim.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvasir.bench.result import arm, finish, result, save
from kvasir.errors import ConfigError
from kvasir.learn.base import Base
from kvasir.learn.learner import Learner, Recipe, head_to_learn
from kvasir.learn.trace import ACCEPTED, PLAIN, REJECTED, Trace
from kvasir.models.checkpoint import resolve
from kvasir.speculation.head import Head, Level
from kvasir_lab.drafters import data
from kvasir_lab.drafters.target import Target
from kvasir_lab.drafters.training import load_target

KIND, TASKS = "eagle", ("chain", "schema", "story")
ARMS = {"static": None, "accepted only": 0.0, "rejected 0.25": 0.25, "rejected 1": 1.0}
ORACLE = "oracle"
ROWS = 256  # of an optimizer step; as each is used four times at most, they bound the steps
ORACLE_STEPS = 2  # steps of the oracle for each one that the others take in a task
OFFLINE_RATE = 2e-4  # for a model of width 4,096; 2e-3 at 410, which is what `kvasir train` takes
RECOVERED = 0.95  # share of the oracle's tokens a forward at which a drafter has recovered
WINDOW = 8  # requests over which it is looked at


@dataclass(slots=True)
class Stream:
    """The requests: token ids [T] of prompt and reply, the prompt's length, and the number of its task."""

    texts: list[np.ndarray]
    prompts: list[int]
    tasks: list[int]

    def of(self, task: int) -> list[int]:
        """Numbers of the requests of a task."""
        return [i for i, t in enumerate(self.tasks) if t == task]


@dataclass(slots=True)
class Counts:
    """Tokens and forwards of every request of an arm, and when it got new weights."""

    tokens: list[int] = field(default_factory=list)
    forwards: list[int] = field(default_factory=list)
    swaps: list[int] = field(default_factory=list)  # requests before which new weights came
    steps: int = 0  # of the optimizer

    def per_forward(self, requests: slice) -> float:
        return sum(self.tokens[requests]) / max(1, sum(self.forwards[requests]))


class Replay:
    """The model, and the requests with what it computed of them."""

    def __init__(self, target: Target, base: Base, stream: Stream) -> None:
        self._target, self.base, self.stream = target, base, stream

    def request(self, number: int, head: Head) -> tuple[int, int, Trace]:
        """Serve a request with a head: tokens after the first, forwards, and the trace."""
        ids, prompt = self.stream.texts[number], self.stream.prompts[number]
        size, depth = len(ids), head.shape.depth
        layers = head.shape.layers
        everything = np.arange(size - 1)
        states = self._states(ids[:-1], everything, np.tri(size - 1, dtype=bool), layers)
        chains_RD = self._chains(head, states, ids)
        positions, tokens = [*range(prompt)], ids[:prompt].tolist()
        parents, kinds = [*range(-1, prompt - 1)], [PLAIN] * prompt
        anchor, last, forwards = prompt, prompt - 1, 0
        while anchor < size - 1:
            chain = chains_RD[anchor - 1, : min(depth, size - 1 - anchor)]
            right = np.cumprod(chain == ids[anchor + 1 : anchor + 1 + len(chain)])
            accepted = int(right.sum())
            forwards += 1
            row = len(positions)
            drafted = accepted if accepted + anchor >= size - 1 else len(chain)  # nothing lies behind the end
            positions += range(anchor, anchor + 1 + drafted)
            tokens += [int(ids[anchor]), *chain[:drafted].tolist()]
            parents += [last, *range(row, row + drafted)]
            kinds += [PLAIN, *[ACCEPTED] * accepted, *[REJECTED] * (drafted - accepted)]
            last = row + accepted
            anchor += accepted + 1
        trace = self._trace(number, positions, tokens, parents, kinds, layers)
        return size - 1 - prompt, forwards, trace

    def _trace(
        self,
        number: int,
        positions: list[int],
        tokens: list[int],
        parents: list[int],
        kinds: list[int],
        layers: tuple[int, ...],
    ) -> Trace:
        """The trace of these rows, whose states one forward over the packed branches gives."""
        ids, kind = self.stream.texts[number], np.array(kinds, np.uint8)
        kept = np.array(positions) < len(ids) - 1  # the last token has no row
        place = np.cumsum(kept) - 1
        sees = np.zeros((int(kept.sum()),) * 2, bool)
        above = [int(place[p]) if p >= 0 else -1 for p, here in zip(parents, kept) if here]
        for row, parent in enumerate(above):
            if parent >= 0:
                sees[row] = sees[parent]
            sees[row, row] = True
        rows = [np.array(x, np.int32)[kept] for x in (tokens, positions)]
        states = self._states(rows[0], rows[1], sees, layers)
        name = str(states.dtype).removeprefix("torch.")
        held = states.cpu().view(torch.int16).numpy().view(np.uint16) if name == "bfloat16" else states.cpu().numpy()
        return Trace(
            ids.astype(np.int32),
            0,
            layers,
            held,
            name,
            rows[1],
            rows[0],
            np.array(above, np.int32),
            kind[kept],
            request=f"request {number}",
            prompt=self.stream.prompts[number],
        )

    @torch.no_grad()
    def _states(
        self, ids: np.ndarray, positions: np.ndarray, sees: np.ndarray, layers: tuple[int, ...]
    ) -> torch.Tensor:
        """Outputs of the tapped layers [R, L, E] for rows that see one another as ``sees`` [R, R] says."""
        model, device = self._target.model, self._target.device
        x = model.model.embed_tokens(torch.from_numpy(ids.astype(np.int64)).to(device))[None]
        place = torch.from_numpy(positions.astype(np.int64)).to(device)
        rope = tuple(part[0, 0][place][None, None] for part in model.rope(int(positions.max()) + 1))
        mask, found = torch.from_numpy(sees).to(device)[None, None], {}
        for i, layer in enumerate(model.model.layers):
            x = layer(x, rope, mask)
            if i in layers:
                found[i] = x[0]
        return torch.stack([found[i] for i in layers], 1)

    @torch.no_grad()
    def _chains(self, head: Head, states: torch.Tensor, ids: np.ndarray) -> np.ndarray:
        """The draft [R, D] that the head makes from every row, each guess built on the ones before."""
        rows, device = len(states), states.device
        place = torch.arange(rows, device=device)
        seen = place[:, None] >= place
        guessed = [torch.from_numpy(ids[1:].astype(np.int64)).to(device)]

        def levels() -> Iterator[Level]:
            for j in range(head.shape.depth):
                own = [place[:, None] == place] * j
                yield Level(place, place, self.base.embed(guessed[-1]), torch.cat([seen, *own], 1))

        outputs = head.unroll_paths(
            states, self.base.normed(states[:, -1]), place, rows + head.shape.depth + 1, levels()
        )
        for guess_RE in outputs:
            guessed.append(torch.cat([self.base.logits(part).argmax(-1) for part in guess_RE.split(256)]))
        return torch.stack(guessed[1:], 1).cpu().numpy()

    def served(self, head: Head) -> Head:
        """A copy of a head in the type that it is served in."""
        return copy.deepcopy(head).to(self.base.dtype).eval().requires_grad_(False)


def learn(learner: Learner, steps: int) -> None:
    """Take up to ``steps`` optimizer steps, as far as there are traces."""
    wanted = learner.steps + steps
    for rows in learner.slices():
        if rows is None or learner.steps >= wanted:
            return


def run_arm(replay: Replay, start: Head, lam: float | None, steps: int, recipe: dict[str, Any]) -> Counts:
    """Replay the stream with one drafter. ``lam`` None: it does not learn. ``steps``: optimizer steps a request."""
    counts, served = Counts(), replay.served(start)
    learner = None
    if lam is not None:
        learner = Learner(copy.deepcopy(start), replay.base, Recipe(lam=lam, **recipe), scratch=False)
        slices = learner.slices()
    for number in range(len(replay.stream.texts)):
        tokens, forwards, trace = replay.request(number, served)
        counts.tokens.append(tokens)
        counts.forwards.append(forwards)
        if learner is None:
            continue
        learner.add(trace)
        wanted = learner.steps + steps
        while learner.steps < wanted and next(slices) is not None:
            pass
        if learner.candidate is not None:
            served.load_state_dict(learner.candidate[0])
            learner.accepted()
            counts.swaps.append(number + 1)
    counts.steps = learner.steps if learner is not None else 0
    return counts


def trained(replay: Replay, start: Head, numbers: Sequence[int], steps: int, recipe: dict[str, Any]) -> Head:
    """A head trained on these requests, again and again, without a gate."""
    head = copy.deepcopy(start)
    learner = Learner(head, replay.base, Recipe(**recipe | {"every": 1 << 30, "pool": 1 << 30}), scratch=True)
    traces = [replay.request(number, replay.served(start))[2] for number in numbers]
    while learner.steps < steps:
        for trace in traces:
            learner.add(trace)
        before = learner.steps
        learn(learner, steps - learner.steps)
        if learner.steps == before:
            raise ConfigError("the requests of a task are too few to train an oracle: raise --requests")
    return head


def run_oracle(replay: Replay, others: Replay, start: Head, steps: int, recipe: dict[str, Any]) -> Counts:
    """Replay the stream, each task with a head that was trained on ``others``' requests of it."""
    counts = Counts()
    for task in sorted(set(replay.stream.tasks)):
        numbers = replay.stream.of(task)
        head = replay.served(
            trained(others, start, others.stream.of(task), ORACLE_STEPS * steps * len(numbers), recipe)
        )
        for number in numbers:
            tokens, forwards, _ = replay.request(number, head)
            counts.tokens.append(tokens)
            counts.forwards.append(forwards)
    return counts


def recovered(counts: Counts, oracle: Counts, first: int, last: int) -> int | None:
    """Tokens of a task that were served until its last requests gave 95 % of the oracle's tokens a forward; None: it
    never did."""
    for end in range(first + WINDOW, last + 1):
        here = slice(end - WINDOW, end)
        if counts.per_forward(here) >= RECOVERED * oracle.per_forward(here):
            return sum(counts.tokens[first:end])
    return None


def metrics_of(stream: Stream, tasks: Sequence[str], counts: Counts, oracle: Counts | None) -> dict[str, Any]:
    """Tokens a forward by task: of all of it and of its last third; and how soon it had recovered, where the oracle is
    known."""
    found: dict[str, Any] = {
        "tokens": sum(counts.tokens),
        "forwards": sum(counts.forwards),
        "tokens_per_forward": round(counts.per_forward(slice(None)), 4),
        "swaps": len(counts.swaps),
        "steps": counts.steps,
    }
    for n, task in enumerate(tasks):
        numbers = stream.of(n)
        first, last = numbers[0], numbers[-1] + 1
        name = task.partition(":")[0]
        found[f"{name}_per_forward"] = round(counts.per_forward(slice(first, last)), 4)
        found[f"{name}_last_third"] = round(counts.per_forward(slice(last - max(1, len(numbers) // 3), last)), 4)
        if oracle is not None:
            found[f"{name}_tokens_to_95"] = recovered(counts, oracle, first, last)
    return found


def sampled(target: Target, tokenizer: Any, tasks: Sequence[str], requests: int, max_tokens: int, split: str) -> Stream:
    """The model's greedy replies to ``requests`` problems of each task, a task after another."""
    stream = Stream([], [], [])
    for n, task in enumerate(tasks):
        texts = data.sample_texts(
            target.model, tokenizer, {task: 1.0}, requests, split, 0, max_tokens, print_to_nobody, temperatures=(0.0,)
        )
        for i in range(len(texts)):
            if len(texts.text(i)) - texts.begins[i] > 2:
                stream.texts.append(texts.text(i))
                stream.prompts.append(int(texts.begins[i]))
                stream.tasks.append(n)
    return stream


def print_to_nobody(line: str) -> None:
    """Say nothing: the table at the end tells."""


def run(
    model: str,
    *,
    kind: str,
    tasks: Sequence[str],
    requests: int,
    steps: int,
    start_steps: int,
    rate: float,
    max_tokens: int,
    every: int,
    device: str,
    output: Path | None,
    commit: str | None,
) -> None:
    """Replay the stream in every arm and show the result. Raises ConfigError for what cannot be."""
    target, tokenizer = load_target(model, device)
    base = Base.read(Path(resolve(model)), target.device, target.dtype)
    replay = Replay(target, base, sampled(target, tokenizer, tasks, requests, max_tokens, "test"))
    others = Replay(target, base, sampled(target, tokenizer, tasks, requests, max_tokens, "train"))
    recipe = {"every": every, "rate": rate, "rows": ROWS, "forwards": 64}
    learning = recipe | {"rate": OFFLINE_RATE}  # of heads that are trained without a gate
    start = trained(others, head_to_learn(kind, base, ""), others.stream.of(0), start_steps, learning)
    setting = {
        "model": model or "embedded",
        "kind": kind,
        "tasks": list(tasks),
        "requests": requests,
        "steps_a_request": steps,
        "start_steps": start_steps,
        "rate": rate,
        "max_tokens": max_tokens,
        "every": every,
    }
    found: dict[str, Counts] = {}
    outcome = result(f"drift-{kind}-{Path(model).name or 'embedded'}", [])
    for name in (*ARMS, ORACLE):
        if name == ORACLE:  # it takes longest
            found[name] = run_oracle(replay, others, start, steps, learning)
        else:
            found[name] = run_arm(replay, start, ARMS[name], steps, recipe)
        outcome["arms"] = [
            arm(name, setting, metrics_of(replay.stream, tasks, counts, found.get(ORACLE)))
            for name, counts in found.items()
        ]
        save(outcome, output, commit)
    finish(outcome, output, commit)
