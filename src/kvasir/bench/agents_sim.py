"""Agents without a device: the real scheduler, pages and prefix index, with steps that take predicted time.

Time is virtual. A step takes what ``StepTimeModel`` predicts for the Llama-8B shape on one H200, with the terms that
``kvasir bench steps`` fitted there; nothing is computed, and every drawn token is ``TOKEN``. The same load gives the
same result each time. Every arm runs with a pool of pages that is too small, and the first one with a pool that never
fills as well.

``belady_share`` is the bound of ``kvasir.bench.belady`` on the uses of pages that the run recorded: no rule of eviction
finds more of these prompts in a pool of this size, as long as they come in this order.

What is left out: the time that HTTP, tokenizers and the scheduler itself take, and the overlap of a step's plan with
the step before. So waits are those of pages and rows alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

from kvasir import technique
from kvasir.bench.agents_load import AgentLoad, Session, every, pages_needed
from kvasir.bench.agents_report import Asked, metrics, share
from kvasir.bench.belady import PageUses, optimal_hits
from kvasir.bench.client import Reply
from kvasir.bench.result import arm, ratios_of, result
from kvasir.bench.workloads import SHAPES
from kvasir.config import EngineConfig
from kvasir.engine.pages.eviction import EVICTIONS, Eviction
from kvasir.engine.pages.page_pool import pages_for
from kvasir.engine.pages.pages import PageManager
from kvasir.engine.schedule.pace import Pace, mixed_rows
from kvasir.engine.schedule.policy import POLICIES, SchedulerPolicy
from kvasir.engine.schedule.scheduler import Scheduler
from kvasir.engine.schedule.step_time import Roofline, StepShape, StepTimeModel
from kvasir.errors import ConfigError
from kvasir.models import cost
from kvasir.models.families import build_spec
from kvasir.progress import Progress
from kvasir.types import CacheGroup, CacheRow, Request, SamplingParams, Sequence, Status

# The shape and the device whose step times are known here.
SHAPE = "llama-8b"
# Seconds of a step's terms on one H200, as bench/results/h200/steps-llama-8b.json has them: the launch, a row, a key of
# a chunk's row, a token of context of a decode, and a sequence. For steps of decodes alone, and for those with prompts.
DECODES = (3.981215e-3, 12.584456e-6, 0.883532e-9, 33.833302e-9, 0.874003e-6)
PROMPTS = (4.336326e-3, 19.962096e-6, 0.847046e-9, 47.383549e-9, 0.512073e-6)
# Bytes and FLOP a second of an H200 by its data sheet, and bytes of a number in bf16.
BANDWIDTH, FLOPS, WIDTH = 4.8e12, 989e12, 2
# Rows of a step where the settings name none, as on a GPU of 80 GB or more; and tokens of a page, which are 16 there.
# Larger pages make a run four times as quick, and move shares by less than a hundredth.
ROWS, PAGE = 8192, 64
# Share of the pages that the sessions need at once, as the size of the small pool where the settings name none. It
# always holds the longest prompt.
ROOM = 1 / 3
# The token that every simulated step draws. No prompt of a load holds it, so no answer is found in the cache again.
TOKEN = 0
# Name of the run whose pool never fills.
UNLIMITED = "unlimited"
# Steps between two updates of the progress bar.
SHOWN = 200


def step_times() -> StepTimeModel:
    """The fitted model of step times of the Llama-8B shape on one H200."""
    spec = build_spec(SHAPES[SHAPE])
    active = cost.active_params(spec)
    roofline = Roofline(
        BANDWIDTH,
        FLOPS,
        float(active * WIDTH),
        2.0 * (active - spec.vocab_size * spec.hidden_size),
        sum(layer.mixer.pair_flops() for layer in spec.layers),
        sum(cost.kv_bytes_per_token(spec, WIDTH).values()),
    )
    return StepTimeModel.fitted(roofline, decodes=DECODES, prompts=PROMPTS)


class Simulation:
    """One run of the ``sessions`` of a load. ``config``: the settings of the scheduler and of pages; ``num_pages``: of
    the pool, without the one that is never handed out."""

    def __init__(self, load: AgentLoad, sessions: list[Session], config: EngineConfig, num_pages: int) -> None:
        self.model = step_times()
        self.size = config.cache.page_slots or PAGE
        self.rows = config.scheduler.max_num_batched_tokens or ROWS
        self.output = output = load.output
        self.until = load.seconds or float("inf")
        group = CacheGroup("full", (0,), (CacheRow(1, 8, 8),))
        eviction = technique.load(EVICTIONS, config.cache.prefix_eviction, Eviction)
        self.pages = PageManager([group], [num_pages + 1], self.size, b"agents", eviction=eviction)
        longest = max(s.prompts[-1] for s in every(sessions)) + output
        if not self.pages.fits(longest, self.rows):
            raise ConfigError(
                f"a prompt of the load and its answer have {longest} tokens, but the pool holds "
                f"{num_pages * self.size}: raise --num-pages, or draw shorter sessions"
            )
        target = config.scheduler.target_itl
        self.scheduler = Scheduler(
            config.scheduler,
            self.pages,
            technique.load(POLICIES, config.scheduler.scheduling_policy, SchedulerPolicy),
            max_rows=self.rows,
            max_model_len=longest,
            pace=Pace(self.model, target, mixed_rows(self.model.roofline)),
        )
        self.now = 0.0
        self.steps = 0
        self.uses = PageUses()
        self.asked: list[Asked] = []
        self._live: dict[Sequence, Asked] = {}
        self._then: dict[Sequence, Callable[[], None]] = {}
        self._started: dict[Sequence, int] = {}  # sequences with pages -> how often they had been preempted before
        self._due: list[tuple[float, int, Session, int, Callable[[], None]]] = []
        self._order = count()
        self._total = sum(len(s.prompts) for s in every(sessions))
        for session in sessions:
            self._wait(session, 0, lambda: None)

    def run(self, title: str) -> list[Asked]:
        """Serve the load to its end."""
        scheduler = self.scheduler
        with Progress(title, brief=True) as bar:
            while self._due or self._live:
                if not self._live:
                    self.now = max(self.now, self._due[0][0])
                self._send()
                plan = scheduler.plan(self.now)
                if not plan.spans:
                    if not self._due:
                        raise ConfigError(f"{len(self._live)} requests wait for pages that nobody gives back")
                    self.now = max(self.now, self._due[0][0])
                    continue
                self._note_hits(plan.spans)
                shape = StepShape.of((span.start, span.length) for span in plan.spans)
                self.now += self.model.predict(shape, graph=shape.rows == len(plan.spans))
                for span in plan.spans:
                    self._advance(span)
                scheduler.complete(plan)
                self.steps += 1
                if self.steps % SHOWN == 0:
                    bar.show(len(self.asked) - len(self._live), self._total, f"{self.now:.0f} s")
        return self.asked

    def bound(self) -> int:
        """Most prompt tokens that a pool of this size can give in the recorded order (see ``belady``)."""
        return optimal_hits(self.uses.numbers, self.pages.num_total) * self.size

    # -------------------------------------------------------------------------------------------------------- sessions

    def _wait(self, session: Session, turn: int, then: Callable[[], None]) -> None:
        """Send a turn after its pause, unless the time of the load is over then. ``then``: called when the session has
        ended."""
        due = self.now + session.pauses[turn]
        if due < self.until:
            heapq.heappush(self._due, (due, next(self._order), session, turn, then))
        else:
            then()

    def _send(self) -> None:
        """Queue the turns that are due."""
        while self._due and self._due[0][0] <= self.now:
            due, _, session, turn, then = heapq.heappop(self._due)
            params = SamplingParams(temperature=0.0, max_tokens=self.output, ignore_eos=True, detokenize=False)
            request = Request(
                id=f"{session.name} {turn}",
                prompt_ids=session.prompt(turn),
                params=params,
                seed=0,
                max_tokens=self.output,
                arrival=due,
            )
            seq = Sequence(request)
            reply = Reply(due, sent=due, status=200)
            self.asked.append(Asked(session, turn, reply))
            self._live[seq] = self.asked[-1]
            self._then[seq] = then
            self.scheduler.add(seq)

    def _answered(self, seq: Sequence) -> None:
        """A turn is answered: start its sub-agents and wait for them, then for the tool."""
        one, then = self._live.pop(seq), self._then.pop(seq)
        self._started.pop(seq)
        one.reply.ended, one.reply.completion, one.reply.cached = self.now, seq.num_output, seq.num_cached
        session, after = one.session, one.turn + 1
        if after == len(session.prompts):
            then()
            return
        agents = session.agents.get(one.turn, [])
        left = len(agents)

        def ended() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self._wait(session, after, then)

        for agent in agents:
            self._wait(agent, 0, ended)
        if not agents:
            self._wait(session, after, then)

    # ----------------------------------------------------------------------------------------------------------- steps

    def _advance(self, span: Any) -> None:
        seq = span.seq
        if not span.valid or seq.status is not Status.RUNNING:
            return
        drawn = "sample" in span.want
        before = seq.num_computed
        self.scheduler.advance(span, [TOKEN] if drawn else [])
        for page in range(before // self.size, seq.num_computed // self.size):
            self.uses.add(self.pages.page_key(seq, page))
        if drawn:
            self._live[seq].reply.events.append(self.now)
            if seq.num_output >= self.output:
                self.scheduler.finish(seq, "length")
                self._answered(seq)

    def _note_hits(self, spans: list[Any]) -> None:
        """Record the pages that sequences found in the cache when they started in this step."""
        for span in spans:
            seq = span.seq
            if self._started.get(seq) != seq.num_preempted:
                self._started[seq] = seq.num_preempted
                for page in range(span.start // self.size):
                    self.uses.add(self.pages.page_key(seq, page))


def simulate(
    loads: dict[str, AgentLoad],
    arms: dict[str, dict[str, Any]],
    *,
    name: str,
    keep: Callable[[dict[str, Any]], None] = lambda so_far: None,
) -> dict[str, Any]:
    """The result of a simulation of every load with every arm, and with the first arm in an unlimited pool.

    An arm's pool has ``num_pages`` of its settings, or a third of what the sessions need at once. ``keep`` gets the
    result so far after each run.
    """
    first, settings = next(iter(arms.items()))
    plans = {first: (settings, True), UNLIMITED: (settings, False)}
    plans |= {label: (changed, True) for label, changed in arms.items()}
    if UNLIMITED in arms:
        raise ConfigError(f"an arm is named like the run with an unlimited pool: {UNLIMITED}")
    described = {n: load.described for n, load in loads.items()}
    found: dict[str, dict[str, Any]] = {}  # arm -> metrics of all loads

    def outcome() -> dict[str, Any]:
        entries = []
        for label, values in found.items():
            config = {"shape": SHAPE, "device": "simulated H200", **plans[label][0], "loads": described}
            entries.append(arm(label, config, values))
        pairs = [(label, UNLIMITED) for label in arms] + [(label, first) for label in list(arms)[1:]]
        return result(name, entries, ratios=shown_ratios(ratios_of(entries, pairs)))

    for label, (settings, limited) in plans.items():
        config = EngineConfig.of(**settings)
        for n, load in loads.items():
            values = _run(load, config, limited, f"{n}, {label}")
            found.setdefault(label, {}).update({f"{n}.{key}": value for key, value in values.items()})
            keep(outcome())
    return outcome()


def _run(load: AgentLoad, config: EngineConfig, limited: bool, title: str) -> dict[str, Any]:
    """Metrics of one run of a load, in the pool of the settings or in an unlimited one."""
    size = config.cache.page_slots or PAGE
    sessions = load.draw(1)  # those of the first run against a server
    needed = pages_needed(sessions, size)
    if not limited:  # every page that is ever written, those of answers included
        pages = needed + sum(len(s.prompts) for s in every(sessions)) * (pages_for(load.output, size) + 1)
    elif config.cache.num_pages:
        pages = config.cache.num_pages - 1  # like the engine's, they count one that is never handed out
    else:
        longest = max(s.prompts[-1] for s in every(sessions)) + load.output
        pages = max(int(ROOM * needed), pages_for(longest, size))
    return run_once(sessions, load, config, pages, title) | {"needed_tokens": needed * size}


def run_once(
    sessions: list[Session], load: AgentLoad, config: EngineConfig, pages: int, title: str = "agents"
) -> dict[str, Any]:
    """Metrics of one simulated run in a pool of so many pages."""
    simulation = Simulation(load, sessions, config, pages)
    asked = simulation.run(title)
    values = metrics(asked, load.output, simulation.size)
    most = min(share(simulation.bound(), values["prompt_tokens"]), values["unlimited_share"])
    return values | {
        "belady_share": most,
        "cache_tokens": pages * simulation.size,
        "steps": simulation.steps,
        "preemptions": simulation.scheduler.preemptions,
    }


def shown_ratios(ratios: dict[str, float]) -> dict[str, float]:
    """The ratios that compare arms; counts are equal or say nothing."""
    shown = ("ttft_ms_p50", "ttft_ms_p90", "ttft_ms_p99", "itl_ms_p99", "output_tok_s", "turns_s", "cached_share")
    return {key: value for key, value in ratios.items() if key.split(" ")[0].rpartition(".")[2] in shown}
