"""Speculation on a simulated GPU: the engine's own drafting, controller, router and step-time models on a simulated
clock.

Step times are those of an H200 at the llama-8b shape in bf16. Plain steps, and steps with one to eight drafts a
sequence at batch 1, 8, 64 and 256, come from bench/results/h200/speculation-llama-8b.json; longer contexts come from
offline-llama-8b.json. The simulation adds noise, outliers, prompts that are computed in between, graphs that are
captured after some uses, and kernels that compile on first use. Plain steps overlap their host work; drafted steps do
not.

Everything is drawn from seeds, so a run repeats to the bit. The simulation shows how the controller decides, not how
fast a GPU is. Its figures are labelled as simulated wherever they are shown.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from kvasir.bench.workloads import SHAPES
from kvasir.config import SpeculationConfig
from kvasir.engine.drafts.drafting import Drafting
from kvasir.engine.schedule.spans import next_span, rows_left
from kvasir.engine.ways.capture import EAGER_STEPS
from kvasir.engine.ways.graph_buckets import DRAFT_ROWS, buckets
from kvasir.models.families import build_spec
from kvasir.speculation.drafter import Ask, Drafter
from kvasir.speculation.tree import DraftTree
from kvasir.types import Plan, Request, SamplingParams, Sequence, Span, SpanResult, Status

# Token ids of a right and of a wrong draft: every output consists of ones.
RIGHT, WRONG = 1, 2
# Bytes of a token's keys and values at the llama-8b shape, and bytes a second that reading them takes.
KV_BYTES, BANDWIDTH = 131072.0, 4.4e12
# Milliseconds of a step by its rows, without reading keys: measured plain and drafted steps minus keys and host work.
LINEAR = {1: 4.25, 2: 4.26, 8: 4.45, 24: 4.47, 32: 4.6, 40: 4.95, 64: 5.24, 128: 5.75, 256: 8.71, 512: 13.96}
# Milliseconds of each row beyond the table.
ROW = 21.5e-3
# Seconds of a row of a step with prompts.
PROMPT_ROW = 21.8e-6
# Seconds that a step launched kernel by kernel takes longer than a replayed graph.
EAGER = 1.2e-3
# Most rows of a step.
MAX_ROWS = 8192
# Seconds to compile and to capture a kind of step, once each.
COMPILES, CAPTURES = 0.4, 0.03

# Probability that a draft is right, by number of the sequence and number of its output token.
Accept = Callable[[int, int], float]


@dataclass(slots=True)
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Graphs:
    """Stand-in for captured steps, which hold chains only.

    ``ready``: every bucket has a graph from the start, as after an idle moment.
    """

    trees = False

    def __init__(self, max_seqs: int, ready: bool) -> None:
        self.most_drafted = DRAFT_ROWS
        self.buckets = buckets(max(max_seqs, DRAFT_ROWS))
        self._ready, self._uses = ready, Counter()
        self.captures = 0

    def bucket(self, rows: int) -> int:
        return self.buckets[bisect_left(self.buckets, rows)]

    def takes(self, spans: list[Any]) -> bool:
        """Accept steps of any size; ``DraftTimes`` knows which are captured."""
        return True

    def replays(self, size: int, drafted: bool = False) -> bool:
        return self._ready or self._uses[size, drafted] > EAGER_STEPS

    def used(self, size: int, drafted: bool) -> bool:
        """Count a use, and return whether it captures the graph."""
        self._uses[size, drafted] += 1
        captures = not self._ready and self._uses[size, drafted] == EAGER_STEPS + 1
        self.captures += captures
        return captures


@dataclass
class Machine:
    """Step times in seconds.

    ``scale`` is the model's work as a share of the measured model's. ``sync``, ``per_seq`` and ``per_draft`` are the
    host time of a drafted step, which nothing overlaps. ``launch`` is the host time until a step with prompts is
    launched. ``jitter`` is the relative standard deviation of a step's time, ``outliers`` the share of steps that take
    1.6 times as long.
    """

    scale: float = 1.0
    sync: float = 0.37e-3
    per_seq: float = 13e-6
    per_draft: float = 1e-6
    launch: float = 0.0
    jitter: float = 0.02
    outliers: float = 0.004

    def linear(self, rows: int) -> float:
        sizes = list(LINEAR)
        if rows >= sizes[-1]:
            return (LINEAR[sizes[-1]] + (rows - sizes[-1]) * ROW) * 1e-3
        at = bisect_left(sizes, rows)
        if sizes[at] == rows:
            return LINEAR[rows] * 1e-3
        low, high = sizes[at - 1], sizes[at]
        return (LINEAR[low] + (LINEAR[high] - LINEAR[low]) * (rows - low) / (high - low)) * 1e-3

    def decodes(self, graphs: Graphs, seqs: int, context: int, drafts: int, drafted: bool) -> float:
        """Seconds that decodes take on the device.

        In a graph each drafted row reads its keys itself; otherwise the rows of a sequence share the read.
        """
        rows, keys = seqs + drafts, context * KV_BYTES / BANDWIDTH
        if rows <= (graphs.most_drafted if drafted else graphs.buckets[-1]):
            return self.scale * (self.linear(graphs.bucket(rows)) + keys * (1 + 0.6 * drafts / seqs))
        return self.scale * (self.linear(rows) + 1.2 * keys) + EAGER

    def mixed(self, rows: int, context: int) -> float:
        return self.scale * (3.6e-3 + rows * PROMPT_ROW + 1.2 * context * KV_BYTES / BANDWIDTH) + EAGER

    def host(self, seqs: int, drafts: int) -> float:
        return self.sync + self.per_seq * seqs + self.per_draft * drafts

    def noisy(self, seconds: float, rng: random.Random) -> float:
        return seconds * max(0.9, rng.gauss(1.0, self.jitter)) * (1.6 if rng.random() < self.outliers else 1.0)


class Coins(Drafter):
    """Drafter of chains in which each token is right with a set probability. Repeated proposals for a position are the
    same.

    ``boast`` is the confidence that it claims instead of the true probability. ``call`` and ``each`` are the seconds of
    a call and of each sequence in it.
    """

    def __init__(
        self,
        clock: Clock,
        accept: Accept,
        *,
        name: str = "coins",
        boast: float | None = None,
        call: float = 0.0,
        each: float = 0.0,
        place: str = "cpu",
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.name, self.place = name, place
        self._clock, self._accept, self._boast = clock, accept, boast
        self._call, self._each, self._seed = call, each, seed

    def open(self, seq: Sequence) -> None:
        index, rng = int(seq.request.id), random.Random(f"{self._seed} {self.name} {seq.request.id}")
        chances = [self._accept(index, i) for i in range(seq.max_output)]
        seq.state[self.name] = [RIGHT if rng.random() < chance else WRONG for chance in chances], chances

    def propose(self, asks: list[Ask]) -> list[DraftTree]:
        self._clock.now += self._call + self._each * len(asks)
        trees = []
        for ask in asks:
            tokens, chances = ask.seq.state[self.name]
            part = slice(ask.seq.num_output, ask.seq.num_output + min(ask.max_nodes, ask.max_depth))
            trees.append(DraftTree.chain(tokens[part], chances[part] if self._boast is None else self._boast))
        return trees


@dataclass(frozen=True)
class Load:
    """``count`` sequences (0: ``batch``), at most ``batch`` of them at once.

    Each has ``prompt`` prompt tokens and the next of ``outputs`` as its number of output tokens. ``spread`` is in
    seconds between arrivals; 0 means that all arrive at once.
    """

    batch: int
    count: int = 0
    prompt: int = 256
    outputs: tuple[int, ...] = (192,)
    spread: float = 0.0


class _Runner(SimpleNamespace):
    captures = property(lambda self: self.graphs.captures)


class Simulation:
    """One simulated engine.

    ``drafter`` makes a drafter for the clock; None turns drafts off. ``depth`` is the most tokens drafted for a
    sequence, ``control`` the setting ``draft_control``. ``shape`` is the model shape that the controller's step-time
    model starts from; it should agree with the machine's ``scale``. Another call of ``run`` continues with what was
    learnt.
    """

    def __init__(
        self,
        max_seqs: int,
        drafter: Callable[[Clock], Drafter] | None,
        *,
        machine: Machine | None = None,
        depth: int = 8,
        control: str = "goodput",
        ready: bool = True,
        seed: int = 0,
        shape: str = "llama-8b",
    ) -> None:
        self.clock, self.machine, self.graphs = Clock(), machine or Machine(), Graphs(max_seqs, ready)
        self._rng = random.Random(f"noise {seed}")
        spec = build_spec(SHAPES[shape])
        runner = _Runner(
            graphs=self.graphs,
            device=SimpleNamespace(type="cuda"),
            parts=SimpleNamespace(taps=None, packer=SimpleNamespace(states=())),
            capture=lambda: None,
            sampler=SimpleNamespace(num_top=0),
            model=SimpleNamespace(
                spec=spec, weight_bytes=2, place=SimpleNamespace(dtype=SimpleNamespace(itemsize=2), exact=False)
            ),
        )
        self.drafting = None
        if drafter is not None:
            config = SpeculationConfig(drafter="coins", max_draft_tokens=depth, draft_control=control)
            self.drafting = Drafting(config, drafter(self.clock), runner, MAX_ROWS, 1 << 17, self.clock)
        self._step = 0
        self._device_free = self._once = 0.0
        self._compiled: Counter[tuple] = Counter()
        # Launched steps: the plan, whether it verifies drafts, and when it ends.
        self._flight: deque[tuple[Plan, bool, float]] = deque()

    def run(self, load: Load) -> float:
        """Simulate a load. Returns its seconds, without those for compiling and capturing."""
        began, once = self.clock.now, self._once
        total = load.count or load.batch
        waiting = deque((began + i * load.spread, self._sequence(load, i)) for i in range(total))
        running: list[Sequence] = []
        while waiting or running or self._flight:
            while waiting and len(running) < load.batch and waiting[0][0] <= self.clock.now:
                seq = waiting.popleft()[1]
                seq.status, seq.seat = Status.RUNNING, 0
                running.append(seq)
            if not running and not self._flight:
                self.clock.now = max(self.clock.now, waiting[0][0])
                continue
            self._turn(running)
            running = [seq for seq in running if seq.status is Status.RUNNING]
        return self.clock.now - began - (self._once - once)

    def _sequence(self, load: Load, i: int) -> Sequence:
        length = load.outputs[i % len(load.outputs)]
        return Sequence(
            Request(
                id=str(i),
                prompt_ids=[RIGHT] * load.prompt,
                params=SamplingParams(ignore_eos=True),
                seed=i,
                max_tokens=length,
            )
        )

    # ------------------------------------------------------------------------- the engine's loop: plan, launch, read

    def _turn(self, running: list[Sequence]) -> None:
        drafting = self.drafting is not None and self.drafting.wanted(running)
        if self._flight and (drafting or self._flight[0][1]):
            self._resolve()
            running = [seq for seq in running if seq.status is Status.RUNNING]
        if drafting:
            self.drafting.propose(running)
        spans = self._plan(running)
        if spans:
            self._launch(spans)
        while len(self._flight) > (1 if spans else 0):
            self._resolve()

    def _plan(self, running: Iterable[Sequence]) -> list[Span]:
        spans, left = [], MAX_ROWS
        for seq in running:
            needed = rows_left(seq)
            if seq.num_output + seq.num_drawn >= seq.max_output:
                continue  # its last token is being drawn
            length = min(left, needed + (len(seq.draft) if needed == 1 and not seq.num_ahead else 0))
            if length > 0:
                spans.append(next_span(seq, length))
                left -= length
        for span in spans:
            span.seq.num_ahead += span.length
            span.seq.num_drawn += "sample" in span.want
        return spans

    def _launch(self, spans: list[Span]) -> None:
        self._step += 1
        plan, rows = Plan(self._step, spans), sum(span.length for span in spans)
        context, drafted = sum(span.start for span in spans), any(span.commit == "walk" for span in spans)
        once = 0.0
        prompts = any(span.length > 1 and span.commit != "walk" for span in spans)
        if prompts:
            self.clock.now += self.machine.launch
            seconds = self.machine.mixed(rows, context)
        else:
            drafts = rows - len(spans)
            seconds = self.machine.decodes(self.graphs, len(spans), context, drafts, drafted)
            if rows <= (self.graphs.most_drafted if drafted else self.graphs.buckets[-1]):
                size = self.graphs.bucket(rows)
                if not self.graphs.replays(size, drafted):
                    seconds += EAGER
                    once = CAPTURES if self.graphs.used(size, drafted) else 0.0
            else:
                kind = "eager", (rows + 37) // 128
                self._compiled[kind] += 1
                once = COMPILES if self._compiled[kind] == 1 else 0.0
            if drafted:
                self.clock.now += self.machine.host(len(spans), drafts) / 2  # the rest follows when it is read
        self._once += once
        seconds = seconds if prompts else self.machine.noisy(seconds, self._rng)
        self._device_free = max(self._device_free, self.clock.now) + seconds + once
        self._flight.append((plan, drafted, self._device_free))
        if self.drafting is not None:
            self.drafting.launched(plan)

    def _resolve(self) -> None:
        plan, drafted, end = self._flight.popleft()
        self.clock.now = max(self.clock.now, end)
        if drafted:
            self.clock.now += self.machine.host(len(plan.spans), plan.num_rows - len(plan.spans)) / 2
        for span in plan.spans:
            self._commit(span)
        if self.drafting is not None:
            self.drafting.charge(plan)

    def _commit(self, span: Span) -> None:
        seq = span.seq
        seq.num_ahead -= span.length
        if "sample" not in span.want:
            seq.num_computed += span.length
            return
        seq.num_drawn -= 1
        result = None
        if span.commit == "walk":
            right = next((i for i, token in enumerate(seq.draft) if token != RIGHT), len(seq.draft))
            result = SpanResult([RIGHT] * (right + 1), path=list(range(right + 1)))
            seq.num_computed += right + 1
            seq.draft = []
        else:
            seq.num_computed += span.length
        seq.tokens += ([RIGHT] if result is None else result.tokens)[: seq.max_output - seq.num_output]
        if result is not None:
            self.drafting.observe(span, result)
        if seq.num_output >= seq.max_output:
            seq.status = Status.FINISHED
            if self.drafting is not None:
                self.drafting.ended(seq, "stop")


def constant(accept: float) -> Accept:
    return lambda sequence, token: accept


def coins(accept: float | Accept, **options: Any) -> Callable[[Clock], Drafter]:
    chosen = accept if callable(accept) else constant(accept)
    return lambda clock: Coins(clock, chosen, **options)


@dataclass(frozen=True)
class Compared:
    """Rates of output tokens relative to a run without drafts, with the prompts' time taken off.

    ``rounds`` are consecutive rounds of one engine under the controller, which starts without any observation.
    ``fixed`` maps a fixed depth to its rate.
    """

    rounds: list[float]
    fixed: dict[int, float]

    @property
    def best(self) -> float:
        """The rate of the best fixed setting; 1.0 where no drafts are best."""
        return max([1.0, *self.fixed.values()])


def compare(
    load: Load,
    drafter: Callable[[Clock], Drafter],
    *,
    seed: int = 0,
    rounds: int = 2,
    depths: Iterable[int] = (1, 2, 4, 8),
    **options: Any,
) -> Compared:
    """Compare the controller, fixed depths and no drafts on the same tokens. ``options`` go to ``Simulation``."""

    def seconds(made: Callable[[Clock], Drafter] | None, number: int, times: int = 1, **more: Any) -> list[float]:
        simulation = Simulation(load.batch, made, seed=100 * seed + number, **more, **options)
        return [simulation.run(load) - prompts for _ in range(times)]

    prompts = 0.0
    if not load.spread and load.count in (0, load.batch):
        prompts = Simulation(load.batch, None, **options).run(replace(load, outputs=(1,)))
    plain = sum(seconds(None, number)[0] for number in range(4)) / 4
    controlled = seconds(drafter, 10, rounds)
    fixed = {depth: plain / seconds(drafter, 20 + depth, depth=depth, control="fixed")[0] for depth in depths}
    return Compared([plain / found for found in controlled], fixed)
