"""``kvasir bench processors``: what logit processors and forced tokens cost a decode step, in one engine.

Each kind of request decodes alone, ``batch`` sequences after prompts of ``prompt`` tokens: without processors, with one
that reads the index, with one that reads tokens, with a budget that is far away, and with penalties, which wait for
tokens as well. Then one of the sequences has 8 tokens forced: ``forced8.steps`` is the time from its last free token to
the last forced one, in steps of the budget's kind. Weights may be random: every step costs the same.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvasir.bench.loaded import load_engine
from kvasir.bench.offline import described
from kvasir.bench.result import arm, finish, result, spread
from kvasir.bench.workloads import Batch, shape_folder
from kvasir.client.admission import admit
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError
from kvasir.types import ProcessorParams, SamplingParams, Thinking

if TYPE_CHECKING:
    from kvasir.engine.engine import Engine

WARMUP, TIMED, FORCED = 24, 32, 8
WORDS = (300, 301, 302, 303, 304, 305, 306, 307, 308, 309)
IDS = "|".join(map(str, WORDS))
MARKED = Thinking((310,), (311,), "inside")
# Free tokens before the forced ones: enough for all sequences to decode.
FREE = 128


def budget(limit: int) -> ProcessorParams:
    """A budget whose end has ``FORCED`` tokens, the mark included."""
    ids = {"first": tuple(range(320, 320 + FORCED - 1)), "last": (), "wait": ()}
    return ProcessorParams(f"budget:num_ignore=0,max_thinking={limit}", ids, MARKED)


# Parameters and processors that each arm adds to a plain request.
KINDS: dict[str, tuple[dict[str, Any], list[ProcessorParams]]] = {
    "plain": ({}, []),
    "index": ({}, [ProcessorParams(f"cyclic_reflex:ids={IDS}", {"words": WORDS}, MARKED)]),
    "tokens": ({}, [ProcessorParams(f"tip:ids={IDS}", {"words": WORDS}, MARKED)]),
    "budget": ({}, [budget(1 << 30)]),
    "penalties": ({"presence_penalty": 0.5, "frequency_penalty": 0.5}, []),
}


class Loads:
    """The loads of one engine. ``repeats``: times that each kind is measured, in turns."""

    def __init__(self, engine: Engine, batch: int, prompt: int, repeats: int) -> None:
        self.engine, self.batch, self.prompt, self.repeats = engine, batch, prompt, repeats
        self._names = 0
        self._draw = random.Random(0)

    def run(self) -> dict[str, Any]:
        walls: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(self.repeats):
            for kind in KINDS:
                walls[kind] += self._step_ms(kind)
        middles = {kind: statistics.median(values) for kind, values in walls.items()}
        metrics: dict[str, Any] = {f"{kind}.step_ms": spread(values) for kind, values in walls.items()}
        metrics |= {f"{k}.over_plain": round(v / middles["plain"], 4) for k, v in middles.items() if k != "plain"}
        metrics["tokens.over_penalties"] = round(middles["tokens"] / middles["penalties"], 4)
        forced = [self._forced_ms() for _ in range(self.repeats)]
        metrics[f"forced{FORCED}.ms"] = spread(forced)
        metrics[f"forced{FORCED}.steps"] = round(statistics.median(forced) / middles["budget"], 3)
        return metrics

    def _submit(self, kind: str, one: list[ProcessorParams] | None = None) -> list[str]:
        """Submit a batch of one kind. ``one``: the processors of the first request, if they are others."""
        more, processors = KINDS[kind]
        info, names = self.engine.info, []
        params = SamplingParams(
            temperature=0.0, max_tokens=info.max_model_len - self.prompt, ignore_eos=True, detokenize=False, **more
        )
        for ids in Batch("processors", self.batch, self.prompt, 2).prompts(info.tokenizer_size, self._draw):
            self._names += 1
            request = admit(ids, params, info, id=f"bench-{self._names}", arrival=time.monotonic())
            request.processors = processors if one is None or names else one
            if any(event.kind == "error" for event in self.engine.submit(request)):
                raise ConfigError(f"{self.batch} requests of {self.prompt} tokens do not fit this engine")
            names.append(request.id)
        return names

    def _step(self) -> dict[str, int]:
        """Run a step. Returns the number of new tokens by request."""
        events = self.engine.step()
        if failed := next((event for event in events if event.kind == "error"), None):
            raise ConfigError(f"a request failed: {failed.message}")
        return {event.request_id: len(event.token_ids) for event in events if event.token_ids}

    def _decode(self, names: list[str]) -> None:
        begun: set[str] = set()
        while len(begun) < len(names):
            begun |= self._step().keys()
        for _ in range(WARMUP):
            self._step()

    def _end(self, names: list[str]) -> None:
        for name in names:
            self.engine.cancel(name)
        while self.engine.has_work():
            self.engine.step()

    def _step_ms(self, kind: str) -> list[float]:
        names = self._submit(kind)
        self._decode(names)
        started = time.perf_counter()
        for _ in range(TIMED):
            self._step()
        found = 1000 * (time.perf_counter() - started) / TIMED
        self._end(names)
        return [found]

    def _forced_ms(self) -> float:
        """Milliseconds from the last free token of a sequence to the last of its forced ones."""
        limit = FREE + FORCED - 1  # tokens of thinking, of which the text before the mark is the end
        names = self._submit("budget", [budget(limit)])
        count = 0
        while count < FREE:
            count += self._step().get(names[0], 0)
        began = time.perf_counter()
        while count < FREE + FORCED:
            count += self._step().get(names[0], 0)
        ended = time.perf_counter()
        self._end(names)
        return 1000 * (ended - began)


def run(
    config: EngineConfig,
    *,
    shape: str | None,
    batch: int,
    prompt: int,
    repeats: int,
    output: Path | None,
    commit: str | None = None,
) -> None:
    """Measure and show the result. Raises ConfigError where the batch does not fit."""
    with contextlib.ExitStack() as stack:
        if shape:
            folder = stack.enter_context(shape_folder(shape))
            config = config.replace(
                model=folder, load_format="dummy", skip_tokenizer_init=True, served_model_name=shape
            )
        llm = stack.enter_context(load_engine(config))
        needed = prompt + FREE + WARMUP + TIMED + FORCED + 8
        if needed > llm.info.max_model_len or batch > config.scheduler.max_num_seqs:
            raise ConfigError(
                f"{batch} requests of {needed} tokens do not fit: the context is {llm.info.max_model_len}, "
                f"max_num_seqs {config.scheduler.max_num_seqs}"
            )
        metrics = Loads(llm.engine, batch, prompt, repeats).run()
    name = f"processors-{shape or config.model.model or 'embedded'}-{batch}x{prompt}"
    settings = described(config, shape) | {"batch": batch, "prompt": prompt}
    finish(result(name, [arm("kvasir", settings, metrics)]), output, commit)
