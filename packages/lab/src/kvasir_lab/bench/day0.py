"""``kvasir bench day0``: a drafter that begins with random weights and learns from the traffic, beside plain decoding.

``batch`` requests run at a time, each ended one replaced by the next problem of the tasks, once without drafts and
then with ``--learn on``. The output is a curve: tokens a second and tokens a forward in windows of ten seconds, with
the version that was served; and after how many seconds and tokens the windows reached 1.2 and 1.5 times plain. It is
written after every window.

The curve also says why drafts are made or not: the tokens that verified drafts gave, and the gain that the engine
predicted of drafting.

Steps without drafts are measured for themselves, after a third of the time: what they lose to those without learning is
what the trainer takes, for example of the engine's own GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvasir.bench.loaded import load_engine
from kvasir.bench.offline import described
from kvasir.bench.result import arm, finish, percentile, result, save
from kvasir.client.admission import admit
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError
from kvasir.types import SamplingParams

if TYPE_CHECKING:
    from kvasir.engine.engine import Engine

TASKS = ("chain", "schema", "story")
WINDOW = 10.0  # seconds of a point of the curve
GOALS = (1.2, 1.5)
PROBLEMS = 2048  # different problems of each task, before they come again


@dataclasses.dataclass(slots=True)
class Window:
    """A point of the curve: seconds since the start at its end, tokens and forwards in it, and the version of the
    weights at its end. ``drafts`` and ``accepted``: verified drafts in it, and their accepted tokens; ``gain``: of
    drafting, as the engine predicted it last (`EngineStats.draft_gain`)."""

    seconds: float
    tokens: int
    forwards: int
    version: int
    drafts: int = 0
    accepted: int = 0
    gain: float | None = None


@dataclasses.dataclass(slots=True)
class Undrafted:
    """Steps in which no draft was verified: their seconds, tokens, and seconds between two arrivals of a request."""

    seconds: float = 0.0
    tokens: int = 0
    gaps: list[float] = dataclasses.field(default_factory=list)

    def metrics(self) -> dict[str, float]:
        """Tokens a second, and milliseconds between tokens; {} where there were no such steps."""
        if not self.gaps:
            return {}
        gaps = {f"gap_p{share}_ms": round(1000 * percentile(self.gaps, share / 100), 3) for share in (50, 99)}
        return {"tokens_per_s": round(self.tokens / self.seconds, 1), "seconds": round(self.seconds, 1), **gaps}


class Load:
    """A constant number of running requests of one engine."""

    def __init__(self, engine: Engine, prompts: Iterator[list[int]], batch: int, max_tokens: int) -> None:
        self._engine, self._prompts, self._batch, self._max_tokens = engine, prompts, batch, max_tokens
        self._names = itertools.count()
        self._running: dict[str, float] = {}  # name -> when its last tokens came
        self.gaps: list[float] = []  # seconds between two arrivals of tokens of one request
        self.undrafted = Undrafted()

    def run(self, seconds: float, note: Callable[[list[Window]], None] = lambda windows: None) -> list[Window]:
        """Serve for ``seconds``. ``note`` gets the windows so far after each. Raises ConfigError where a request
        fails."""
        windows: list[Window] = []
        stats = self._engine.stats()
        tokens, drafted = 0, stats.drafted_tokens
        before = stats.forwards, stats.drafts, stats.accepted_tokens
        self.gaps.clear()
        self.undrafted = Undrafted()
        begun = mark = now = time.perf_counter()
        while (last := now) - begun < seconds:
            while len(self._running) < self._batch:
                self._submit()
            count, gaps = self._step()
            now, stats = time.perf_counter(), self._engine.stats()
            tokens += count
            self.gaps += gaps
            if stats.drafted_tokens == drafted and now - begun >= seconds / 3:
                self.undrafted.seconds += now - last
                self.undrafted.tokens += count
                self.undrafted.gaps += gaps
            drafted = stats.drafted_tokens
            if now - mark >= min(WINDOW, seconds / 2):
                version = stats.learning.version if stats.learning else 0
                counted = stats.forwards, stats.drafts, stats.accepted_tokens
                forwards, drafts, accepted = (count - then for count, then in zip(counted, before))
                windows.append(Window(now - begun, tokens, forwards, version, drafts, accepted, stats.draft_gain))
                mark, tokens, before = now, 0, counted
                note(windows)
        return windows

    def _step(self) -> tuple[int, list[float]]:
        """Run a step. Returns its tokens, and the seconds since the last ones of each request that has some."""
        tokens, gaps = 0, []
        for event in self._engine.step():
            if event.kind == "error":
                raise ConfigError(f"a request failed: {event.message}")
            now = time.perf_counter()
            if event.token_ids and event.request_id in self._running:
                tokens += len(event.token_ids)
                if last := self._running[event.request_id]:
                    gaps.append(now - last)
                self._running[event.request_id] = now
            if event.finish_reason:
                self._running.pop(event.request_id, None)
        return tokens, gaps

    def _submit(self) -> None:
        name = f"day0-{next(self._names)}"
        params = SamplingParams(temperature=0.0, max_tokens=self._max_tokens, detokenize=False)
        request = admit(next(self._prompts), params, self._engine.info, id=name, arrival=time.monotonic())
        self._running[name] = 0.0
        self._engine.submit(request)


def metrics_of(windows: list[Window], gaps: list[float], plain: float = 0.0) -> dict[str, Any]:
    """The curve, its last third, and when it reached the goals over ``plain`` tokens a second."""
    spans = [now.seconds - before for now, before in zip(windows, [0.0, *(w.seconds for w in windows)])]
    rates = [w.tokens / span for w, span in zip(windows, spans)]
    last = rates[-max(1, len(rates) // 3) :]
    found: dict[str, Any] = {
        "tokens_per_s": round(sum(last) / len(last), 1),
        "gap_p99_ms": round(1000 * percentile(gaps, 0.99), 2) if gaps else None,
        "curve": {
            "seconds": [round(w.seconds, 1) for w in windows],
            "tokens_per_s": [round(rate, 1) for rate in rates],
            "tokens_per_forward": [round(w.tokens / max(1, w.forwards), 3) for w in windows],
            "version": [w.version for w in windows],
            "tokens_per_draft": [round(1 + w.accepted / w.drafts, 3) if w.drafts else None for w in windows],
            "predicted_gain": [None if w.gain is None else round(w.gain, 3) for w in windows],
        },
    }
    for goal in GOALS if plain else ():
        at = next((i for i, rate in enumerate(rates) if rate >= goal * plain), None)
        found[f"seconds_to_{goal}x"] = None if at is None else round(windows[at].seconds, 1)
        found[f"tokens_to_{goal}x"] = None if at is None else sum(w.tokens for w in windows[: at + 1])
    return found


def problems(model: str, tasks: list[str]) -> list[list[int]]:
    """Prompts of the tasks in turns. They are made before any clock runs, which takes a while."""
    from kvasir.models.checkpoint import resolve
    from kvasir_lab import tokenizer as lab_tokenizer
    from kvasir_lab.lookup import load_task

    tokenizer = lab_tokenizer.load(resolve(model))
    drawn = zip(*(load_task(task).problems("test", 0, PROBLEMS) for task in tasks))
    return [tokenizer.encode(p.prompt, add_special_tokens=False).ids for row in drawn for p in row]


def run(
    config: EngineConfig,
    *,
    tasks: list[str],
    batch: int,
    minutes: float,
    plain_minutes: float,
    max_tokens: int,
    output: Path | None,
    commit: str | None,
) -> None:
    """Measure plain decoding, then learning, and show both. Raises ConfigError without ``--learn on``."""
    if config.speculation.learn == "off":
        raise ConfigError("bench day0 measures learning: add --learn on --learn-tenants all --drafter eagle:model=new")
    none: dict[str, Any] = {"drafter": "", "learn": "off", "learn_tenants": (), "learn_out": None}
    shared = {"tasks": tasks, "batch": batch, "max_tokens": max_tokens, "temperature": 0.0}
    prompts = problems(config.model.model, tasks)
    outcome = result(f"day0-{Path(config.model.model or 'embedded').name}", [])

    def measure(name: str, engine: Engine, given: EngineConfig, length: float) -> None:
        """Measure an arm. Nothing of the engine is held afterwards: the next one needs its memory."""
        done = list(outcome["arms"])
        load = Load(engine, itertools.cycle(prompts), batch, max_tokens)
        if name == "plain":
            load.run(min(WINDOW, 60 * length / 4))  # graphs are captured

        def note(windows: list[Window]) -> None:
            metrics = metrics_so_far(load, engine, windows, done)
            outcome["arms"] = [*done, arm(name, described(given, None) | shared, metrics)]
            save(outcome, output, commit)

        note(load.run(60 * length, note))

    for name, given, length in (("plain", config.replace(**none), plain_minutes), ("learning", config, minutes)):
        with load_engine(given) as llm:
            measure(name, llm.engine, given, length)
    finish(outcome, output, commit)


def metrics_so_far(load: Load, engine: Engine, windows: list[Window], done: list[dict[str, Any]]) -> dict[str, Any]:
    """Metrics of the arm that runs. ``done``: the arms before it, of which the first is plain."""
    plain = done[0]["metrics"] if done else {}
    metrics = metrics_of(windows, load.gaps, plain.get("tokens_per_s", 0.0))
    learned = engine.stats().learning
    if undrafted := load.undrafted.metrics():
        metrics["undrafted"] = undrafted
        if "undrafted" in plain:
            metrics["undrafted_over_plain"] = round(undrafted["tokens_per_s"] / plain["undrafted"]["tokens_per_s"], 3)
    if learned is not None:
        metrics["over_plain"] = round(metrics["tokens_per_s"] / plain["tokens_per_s"], 3)
        metrics["learning"] = dataclasses.asdict(learned)
    return metrics
