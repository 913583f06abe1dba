"""Drive an Engine by hand: arrivals by step, forced preemptions, and outputs by request and branch."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from kvasir.client.admission import admit
from kvasir.config import EngineConfig
from kvasir.engine.engine import Engine
from kvasir.engine.start import build
from kvasir.engine.start.build import ways_to_run
from kvasir.engine.ways.capture import call_through
from kvasir.engine.ways.runner import Runner
from kvasir.models.checkpoint import is_packaged
from kvasir.types import Event, Request, SamplingParams
from tests.engine.stepwise import Stepwise

FACTS = build._tokenizer_facts
FACTS_ONCE = functools.cache(FACTS)


def tokenizer_facts(file: Path) -> tuple[int, tuple[int, ...]]:
    """The facts that an engine asks of a tokenizer. Those of the package do not change, and loading one with its chat
    template takes twice as long as the rest of an engine's start."""
    return (FACTS_ONCE if is_packaged(file.parent) else FACTS)(file)


def use_ways(runner: Runner, *how: Any) -> None:
    """Run steps in other ways from now on. ``how``: what ``ways_to_run`` captures, and how."""
    runner.use(ways_to_run(runner.parts, *how))


@dataclass
class Output:
    tokens: list[int] = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    finish_reason: str | None = None
    num_cached: int = 0
    prompt_logprobs: list | None = None
    queued: float | None = None
    score: object = None
    forced: list[int] = field(default_factory=list)


class Driver:
    def __init__(self, model: str = "nano", static: bool = False, pieces: bool = False, **options) -> None:
        options = {
            "batch_invariant": True,
            "page_slots": 16,
            "num_pages": 256,
            "max_model_len": 512,
            "check": True,
            "poison": True,
            "max_queued_tokens": 1 << 20,
            "num_threads": 1,
        } | options
        with mock.patch.object(build, "_tokenizer_facts", tokenizer_facts):
            self.engine = Engine(EngineConfig.of(model=model, **options))
        if static or pieces:
            capture, stepwise = call_through if static else None, Stepwise() if pieces else None
            use_ways(self.engine.runner, capture, 0, stepwise, self.engine.steps.full_rows)
        self.outputs: dict[tuple[str, int], Output] = {}
        self.errors: dict[str, Event] = {}
        self.steps = 0

    def request(self, name: str, prompt: list[int], **params) -> Request:
        return admit(
            prompt, SamplingParams(**params), self.engine.info, id=name, arrival=float(self.steps), encode=None
        )

    def submit(self, request: Request) -> None:
        self._take(self.engine.submit(request))

    def _take(self, events: list[Event]) -> None:
        for e in events:
            if e.kind == "error":
                self.errors[e.request_id] = e
            elif e.kind == "tokens":
                out = self.outputs.setdefault((e.request_id, e.branch), Output())
                assert out.finish_reason is None, "an event after the last one"
                assert e.index == len(out.tokens), "a gap or a duplicate"
                out.tokens += e.token_ids
                out.logprobs += e.logprobs or []
                out.forced += e.forced
                out.prompt_logprobs, out.score = out.prompt_logprobs or e.prompt_logprobs, out.score or e.score
                out.queued = e.queued if out.queued is None else out.queued
                out.num_cached = max(out.num_cached, e.num_cached)
                out.finish_reason = e.finish_reason

    def step(self, preempt: bool = False) -> None:
        self._take(self.engine.step())
        self.steps += 1
        if preempt:
            # Each sequence at most twice: with one row a step, endless preemption would let no prompt finish.
            running = [s for s in self.engine.scheduler.running if s.state.get("forced", 0) < 2]
            if running:
                victim = running[self.steps % len(running)]
                victim.state["forced"] = victim.state.get("forced", 0) + 1
                self.preempt(victim)

    def preempt(self, seq) -> None:
        """Take everything from a running sequence, as a preemption does, and queue it again."""
        self.engine.requests.close_seat(seq)
        self.engine.scheduler.block(seq)
        self.engine.scheduler.unblock(seq)

    def run(
        self, requests: list[Request], *, gap: int = 0, preempt_every: int = 0, limit: int = 20_000
    ) -> dict[tuple[str, int], Output]:
        """Submit one request every ``gap`` steps (0: all at once) and step until all is done."""
        waiting = list(requests)
        while waiting or self.engine.has_work():
            while waiting and (gap == 0 or self.steps % gap == 0 or not self.engine.has_work()):
                self.submit(waiting.pop(0))
                if gap:
                    break
            self.step(preempt=bool(preempt_every) and self.steps % preempt_every == preempt_every - 1)
            limit -= 1
            assert limit, "no progress"
        self.assert_clean()
        return self.outputs

    def assert_clean(self) -> None:
        """Assert that all pages, seats and requests are given back, once a step in flight has ended."""
        engine = self.engine
        while engine.has_work():
            assert not engine.requests.live
            self._take(engine.step())
        assert not engine.requests.live and not engine.has_work()
        if engine.tiers is not None:
            engine.tiers.drain()
        assert engine.pages.num_free == engine.pages.num_total
        engine.scheduler.check()
        engine.scheduler.room.check()

    def close(self) -> None:
        self.engine.close()
