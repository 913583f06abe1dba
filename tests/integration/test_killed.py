"""The engine process is killed in the middle of ten streams: every reader gets the tokens of an undisturbed run.

Exact mode, the model in the package. The requests differ in all that a replay has to rebuild: temperature, branches, a
grammar in mid-parse, penalties that count earlier tokens, log-probabilities, biases, bad words, stop ids, hooks.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from pathlib import Path

from kvasir.client.admission import admit
from kvasir.client.engine_client import AsyncEngine
from kvasir.config import EngineConfig
from kvasir.hooks.hook import Gate, Hook
from kvasir.types import Event, Grammar, ModelInfo, Request, SamplingParams
from kvasir_lab import export
from kvasir_lab.tokenizer import shipped_tokenizer
from tests.hooks import write_hooks
from tests.lab.test_hybrid import lively

OUTPUT = 70
SCHEMA = '{"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 30, "maxItems": 40}'
PARAMS = [
    dict(temperature=0.0),
    dict(temperature=1.0, seed=2),
    dict(temperature=0.0, n=3),  # the same three times
    dict(temperature=1.0, seed=4, n=3, logprobs=2),
    dict(temperature=1.0, seed=5, ignore_eos=False, grammar=Grammar("json_schema", SCHEMA)),
    dict(temperature=1.0, seed=6, presence_penalty=1.0, frequency_penalty=0.7, repetition_penalty=1.2, logprobs=0),
    dict(temperature=0.0, frequency_penalty=0.9, logprobs=1, prompt_logprobs=1),
    dict(temperature=0.8, seed=8, top_p=0.9, top_k=40, logit_bias={400: 3.0}, n=3),
    dict(temperature=1.0, seed=9, hook="turn", hook_strength=8.0),
    dict(temperature=1.0, seed=9, hook="turn", hook_strength=0.5),  # the same prompt, steered less
]


def requests(info: ModelInfo, params: list[dict]) -> list[Request]:
    def request(i: int, changes: dict) -> Request:
        params = SamplingParams(**{"max_tokens": OUTPUT, "ignore_eos": True, **changes})
        which = min(i, 8)
        prompt = [300 + (which * 31 + j * 7) % 900 for j in range(10 + 9 * which)]
        return admit(prompt, params, info, id=f"r{i}", arrival=time.monotonic(), encode=None)

    return [request(i, changes) for i, changes in enumerate(params)]


@dataclasses.dataclass
class Read:
    """The events that the reader of one request saw."""

    tokens: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    logprobs: dict[int, list[tuple]] = dataclasses.field(default_factory=dict)
    prompt: list | None = None
    ends: dict[int, str] = dataclasses.field(default_factory=dict)

    def take(self, event: Event) -> None:
        if event.kind != "tokens":
            return
        mine = self.tokens.setdefault(event.branch, [])
        assert event.index == len(mine) and event.branch not in self.ends, (
            "a gap, a duplicate, or an event after the end"
        )
        mine += event.token_ids
        self.logprobs.setdefault(event.branch, []).extend(
            (p.id, p.logprob, p.rank, p.top) for p in event.logprobs or []
        )
        self.prompt = self.prompt or event.prompt_logprobs
        if event.finish_reason:
            self.ends[event.branch] = event.finish_reason


async def read_all(engine: AsyncEngine, kill_at: tuple[int, ...] = (), params: list[dict] = PARAMS) -> list[Read]:
    """Run a request for each of ``params`` at once, and kill the engine process whenever the readers together have as
    many tokens as ``kill_at`` says."""
    reads, seen, kills = [Read() for _ in params], 0, list(kill_at)

    async def read(request: Request, into: Read) -> None:
        nonlocal seen
        async for event in engine.generate(request):
            into.take(event)
            seen += len(event.token_ids)
            if kills and seen >= kills[0]:
                kills.pop(0)
                os.kill(engine.replica.child.pid, signal.SIGKILL)

    await asyncio.gather(*(read(r, into) for r, into in zip(requests(engine.info, params), reads)))
    assert not kills, "the streams ended before the last kill"
    return reads


def write_turn(folder: Path) -> tuple[str, ...]:
    """Write the hooks that two requests name; returns the setting that serves them."""
    hooks = [Hook("head_out", (0, 1, 2, 3), "rotate:c=-1", Gate(answers=True))]
    return (f"turn={write_hooks(folder / 'turn', hooks)}",)


def test_a_killed_engine_loses_nothing(tmp_path):
    async def run() -> None:
        engine = AsyncEngine(
            EngineConfig.of(
                model="nano",
                batch_invariant=True,
                num_threads=1,
                max_num_batched_tokens=64,
                cpu_cache_bytes=1 << 24,
                page_slots=16,
                max_model_len=512,
                hook=write_turn(tmp_path),
            )
        )
        await engine.start()
        try:
            calm = await read_all(engine)
            assert engine.num_restarts == 0
            # The second kill makes suspects of everybody, who are then tried one at a time.
            stormy = await read_all(engine, kill_at=(120, 500))
            assert engine.num_restarts == 2 and engine.num_quarantined == 0
            for params, a, b in zip(PARAMS, calm, stormy):
                assert a == b, params
                assert sorted(a.ends) == list(range(params.get("n", 1)))
            assert calm[2].tokens[0] == calm[2].tokens[1] and calm[3].tokens[0] != calm[3].tokens[1], (
                "the seeds do matter"
            )
            assert calm[8].tokens != calm[9].tokens, "a hook does matter"
            assert [len(p) for p in calm[3].logprobs.values()] == [OUTPUT] * 3 and len(calm[6].prompt) == 64
        finally:
            await engine.stop(0.0)

    asyncio.run(run())


def test_states_are_built_again(tmp_path):
    """A hybrid, whose states die with the process: prompts in chunks, snapshots, branches, and drafts in flight."""
    export.export(lively(), shipped_tokenizer(), tmp_path)
    params = [PARAMS[i] for i in (0, 1, 3, 5)]

    async def run() -> None:
        options = dict(batch_invariant=True, num_threads=1, max_num_batched_tokens=24, max_model_len=200)
        engine = AsyncEngine(
            EngineConfig.of(
                model=str(tmp_path),
                cpu_cache_bytes=1 << 24,
                page_slots=8,
                state_interval=16,
                drafter="suffix:min_match=1",
                draft_control="fixed",
                **options,
            )
        )
        await engine.start()
        try:
            calm = await read_all(engine, params=params)
            stormy = await read_all(engine, kill_at=(150,), params=params)
            assert engine.num_restarts == 1
            assert stormy == calm
            assert calm[2].tokens[0] != calm[2].tokens[1], "the seeds do matter"
        finally:
            await engine.stop(0.0)

    asyncio.run(run())
