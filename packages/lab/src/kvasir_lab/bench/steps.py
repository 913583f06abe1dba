"""``kvasir bench steps``: fit the terms of a step's time on this machine, and predict how long other batches take.

A few runs are measured step by step, ``ROUNDS`` times, and each step counts with its least time: the *denoised* runtime
of Narayanan et al., "Cheaply Evaluating Inference Efficiency Metrics for Autoregressive Transformer APIs"
(arXiv:2305.02440), which is what the run takes on a machine that does nothing else. The terms are those of
``engine/schedule/step_time.py``, fitted once for steps of decodes alone and once for steps with prompts. A prediction
plans the batch with the engine's own scheduler, without computing it, and adds up the steps.

The *idealised* runtime of that paper, f(prompt) + slope x output of one request, is fitted beside it from the same
steps: f goes straight between the prompts that were measured. Times are wall times, so the host's work counts.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from kvasir.bench.loaded import load_engine
from kvasir.bench.offline import described
from kvasir.bench.result import arm, finish, result, save
from kvasir.bench.workloads import Batch, shape_folder
from kvasir.client.admission import admit
from kvasir.config import EngineConfig
from kvasir.engine.schedule.step_time import StepShape, StepTimeModel
from kvasir.errors import ConfigError
from kvasir.logs import log
from kvasir.types import Plan, Request, SamplingParams, Sequence

if TYPE_CHECKING:
    from kvasir.engine.engine import Engine

# Seconds that the measured rounds of the fit may take together, without warming up. A run that would probably take
# longer is left out.
FIT_SECONDS = 120.0
# Times that each run is measured.
ROUNDS = 3
# Steps of a run of the fit, from which a decode step's time at its length follows.
DECODE_STEPS = 24
# Most tokens of prompts in a run of the fit.
MOST_TOKENS = 1 << 17
# Passes over the measured steps; the fit weighs late ones a little more.
PASSES = 4
# Names of the coefficients, their units, and the factor from seconds.
TERMS = (("launch_ms", 1e3), ("row_us", 1e6), ("pair_ns", 1e9), ("context_ns", 1e9), ("sequence_us", 1e6))


@dataclass(frozen=True, slots=True)
class Timed:
    """One step: its shape, whether it holds decodes alone, and its seconds (0: it was only planned)."""

    shape: StepShape
    decodes: bool
    seconds: float = 0.0


def run(
    config: EngineConfig, *, shape: str | None, workloads: list[str] | None, output: Path | None, commit: str | None
) -> None:
    """Fit, predict, measure what was predicted, and write the result.

    ``output`` has the fit once it is there, and each prediction once it was measured. Raises ConfigError for runs that
    do not fit.
    """
    config = config.replace(enable_prefix_caching=False)
    with contextlib.ExitStack() as stack:
        if shape:
            folder = stack.enter_context(shape_folder(shape))
            config = config.replace(
                model=folder, load_format="dummy", skip_tokenizer_init=True, served_model_name=shape
            )
        engine = stack.enter_context(load_engine(config)).engine
        checked = [Batch.parse(w) for w in workloads] if workloads else held_out(*_room(engine, config))
        for batch in checked:
            _check(batch, *_room(engine, config))
        name, described_as = f"steps-{shape or config.model.model or 'embedded'}", described(config, shape)

        def outcome(metrics: dict[str, Any]) -> dict[str, Any]:
            return result(name, [arm("kvasir", described_as, metrics)])

        metrics = measure(
            engine, fitted_runs(*_room(engine, config)), checked, lambda found: save(outcome(found), output, commit)
        )
    finish(outcome(metrics), output, commit)


def _room(engine: Engine, config: EngineConfig) -> tuple[int, int, int]:
    """Longest context, tokens that the cache holds, and most sequences at once."""
    info = engine.info
    return info.max_model_len, info.kv_capacity_tokens or info.max_model_len, config.scheduler.max_num_seqs


def _check(run: Batch, longest: int, capacity: int, most: int) -> None:
    length = run.prompt + run.output
    if run.batch > most or length > longest or run.batch * length > capacity:
        raise ConfigError(
            f"{run.name}: {run.batch} sequences of {length} tokens do not fit at once: a context has {longest} tokens, "
            f"the cache {capacity}, and {most} sequences run at once. Choose a smaller run, or raise --max-num-seqs."
        )


def fitted_runs(longest: int, capacity: int, most: int) -> list[Batch]:
    """The runs that are measured for the fit, the cheapest first: prompts alone, and decodes of few to many sequences
    at short and long contexts."""
    found = []
    for prompt in (16, 64, 256, 1024, 4096, 16384):
        if prompt + 2 <= min(longest, capacity):
            found.append(Batch(f"prompt{prompt}", 1, prompt, 2))
    for batch in (1, 4, 16, 64, 256):
        for share in (0.0, 0.25, 0.7):
            room = min(longest, capacity // batch, MOST_TOKENS // batch) - DECODE_STEPS
            prompt = max(16, int(share * room))
            if batch <= most and prompt <= room:
                found.append(Batch(f"decode{batch}x{prompt}", batch, prompt, DECODE_STEPS))
    return sorted(set(found), key=lambda run: run.batch * run.prompt)


def held_out(longest: int, capacity: int, most: int) -> list[Batch]:
    """The runs that are predicted by default: batches and lengths between and beyond those of the fit."""
    room = min(longest, 4096, capacity // 16)
    wanted = [
        (1, room // 40, room // 20),
        (1, room // 3, room // 20),
        (3, room // 8, room // 10),
        (8, room // 3, room // 40),
        (10, room // 40, room // 10),
        (24, room // 10, room // 20),
        (40, room // 20, room // 40),
    ]
    fit = [(b, max(2, p), max(2, o)) for b, p, o in wanted if b <= most and b * (max(2, p) + max(2, o)) <= capacity]
    return [Batch(f"{b}x{p}+{o}", b, p, o) for b, p, o in fit]


def measure(
    engine: Engine, runs: list[Batch], checked: list[Batch], save: Callable[[dict[str, Any]], None] = lambda found: None
) -> dict[str, Any]:
    """Metrics of the fit over ``runs`` and of the predictions of ``checked``. Seconds are milliseconds there.

    ``save`` gets the metrics after the fit, and again after each prediction.
    """
    steps, alone = [], {}
    spent, warming = 0.0, 0.0  # seconds of measured rounds, and of the untimed rounds before them
    rate, done = 0.0, 0  # tokens a second of the fastest run
    for run in runs:
        tokens = ROUNDS * run.batch * (run.prompt + run.output)
        if rate and spent + tokens / rate > FIT_SECONDS:
            continue
        started = time.perf_counter()
        warm(engine, run)
        began = time.perf_counter()
        measured, _ = denoised(engine, run)
        seconds = time.perf_counter() - began
        warming, spent = warming + began - started, spent + seconds
        rate, done = max(rate, tokens / seconds), done + 1
        steps += measured
        if run.batch == 1:
            alone[run] = measured
    if done < len(runs):
        log.warning("%d of %d runs had no time within the fit's %.0f s", len(runs) - done, len(runs), FIT_SECONDS)
    began = time.perf_counter()
    model = fit(engine.clock.model.roofline, steps)
    metrics: dict[str, Any] = {
        "warm_s": round(warming, 1),
        "fit_s": round(spent + time.perf_counter() - began, 1),
        "fit_runs": done,
        "fit_steps": len(steps),
    }
    for kind, decodes in (("decode", True), ("prompt", False)):
        terms = model.coefficients(graph=decodes)
        metrics[f"{kind}_terms"] = {name: round(float(c) * unit, 6) for (name, unit), c in zip(TERMS, terms)}
        errors = [_error(model.predict(s.shape, graph=decodes), s.seconds) for s in steps if s.decodes is decodes]
        metrics[f"{kind}_step_error"] = round(mean(map(abs, errors)), 4)
    ideal = Idealised(alone)
    metrics["idealised"] = {"slope_ms": round(1e3 * ideal.slope, 4), "prompt_ms": ideal.table()}
    save(metrics)
    errors = []
    for run in checked:
        seconds = sum(step.seconds for step in planned(engine, run, model))
        measured, walls = denoised(engine, run)
        real = sum(s.seconds for s in measured)
        errors.append(abs(_error(seconds, real)))
        metrics[run.name] = {
            "batch": run.batch,
            "prompt": run.prompt,
            "output": run.output,
            "predicted_ms": round(1e3 * seconds, 2),
            "denoised_ms": round(1e3 * real, 2),
            "median_ms": round(1e3 * median(walls), 2),
            "error": round(_error(seconds, real), 4),
        }
        if run.batch == 1:
            guess = ideal.seconds(run.prompt, run.output)
            metrics[run.name] |= {
                "idealised_ms": round(1e3 * guess, 2),
                "idealised_error": round(_error(guess, real), 4),
            }
        metrics |= {"error_mean": round(mean(errors), 4), "error_most": round(max(errors), 4)}
        save(metrics)
    return metrics


def _error(predicted: float, real: float) -> float:
    return predicted / real - 1.0


def fit(roofline: Any, steps: list[Timed]) -> StepTimeModel:
    """The terms that fit ``steps`` best by relative error; decodes alone count as steps of a graph."""
    model, order, rng = StepTimeModel(roofline), list(steps), random.Random(0)
    for _ in range(PASSES):
        rng.shuffle(order)
        for step in order:
            model.observe(step.shape, step.seconds, graph=step.decodes)
    return model


class Idealised:
    """The idealised runtime of one request: f(prompt) + slope x (output - 1). ``alone``: measured runs of one request,
    with their steps."""

    def __init__(self, alone: dict[Batch, list[Timed]]) -> None:
        tokens = [step.seconds for steps in alone.values() for step in steps if step.decodes]
        if not tokens:
            raise ConfigError("no run of one request was measured: give the fit more time")
        self.slope = mean(tokens)
        self.prompts: dict[int, float] = {}  # tokens of a prompt -> seconds to its first token
        for run, steps in alone.items():
            first = sum(step.seconds for step in steps if not step.decodes)
            self.prompts[run.prompt] = min(first, self.prompts.get(run.prompt, first))

    def seconds(self, prompt: int, output: int) -> float:
        """Predicted seconds of one request."""
        import numpy as np

        lengths = sorted(self.prompts)
        first = float(np.interp(prompt, lengths, [self.prompts[n] for n in lengths]))
        if prompt > lengths[-1]:
            first *= prompt / lengths[-1]
        return first + self.slope * (output - 1)

    def table(self) -> dict[str, float]:
        return {str(n): round(1e3 * self.prompts[n], 3) for n in sorted(self.prompts)}


def warm(engine: Engine, run: Batch) -> None:
    """Compute ``run`` once, so that kernels are compiled and graphs captured for its sizes before it is timed.

    Only runs that are measured are warmed, so this takes about a third of the time of the fit, and what compiling adds.
    """
    _round(engine, run)
    _settle(engine)


def _settle(engine: Engine) -> None:
    """Capture the graphs that the last round missed."""
    while engine.idle():
        pass


def denoised(engine: Engine, run: Batch) -> tuple[list[Timed], list[float]]:
    """Each step of ``run`` with its least time in ``ROUNDS`` rounds, and the seconds of each round.

    A first round that compiles or captures is slow, which the least time leaves out. Prompts that wait long may be
    planned earlier, so rounds can differ: those count whose steps are the fastest round's.
    """
    rounds = []
    for _ in range(ROUNDS):
        rounds.append(_round(engine, run))
        _settle(engine)
    walls = [sum(step.seconds for step in steps) for steps in rounds]
    best = _kinds(rounds[walls.index(min(walls))])
    alike = [steps for steps in rounds if _kinds(steps) == best]
    return [Timed(s[0].shape, s[0].decodes, min(step.seconds for step in s)) for s in zip(*alike)], walls


def _kinds(steps: list[Timed]) -> list[tuple[StepShape, bool]]:
    return [(step.shape, step.decodes) for step in steps]


def _round(engine: Engine, run: Batch) -> list[Timed]:
    """Compute ``run`` and return its steps. Where a step is launched before the one before it is read, the seconds
    between two reads are those of the step that was read."""
    launched: list[Timed] = []
    engine.on_launch = lambda ids, slow, plan: launched.append(_shape(engine, plan))
    try:
        for i, ids in enumerate(run.prompts(engine.info.tokenizer_size or engine.info.vocab_size, random.Random(0))):
            engine.submit(admit(ids, _params(run), engine.info, id=f"steps-{i}", arrival=time.monotonic()))
        steps, before = [], time.perf_counter()
        while engine.has_work():
            for event in engine.step():
                if event.kind == "error":
                    raise ConfigError(f"{run.name}: a request failed: {event.message}")
            while len(steps) < len(launched) - engine.num_in_flight:
                now = time.perf_counter()
                step = launched[len(steps)]
                steps.append(Timed(step.shape, step.decodes, now - before))
                before = now
    finally:
        engine.on_launch = lambda ids, slow, plan: None
    return steps


def planned(engine: Engine, run: Batch, model: StepTimeModel) -> list[Timed]:
    """The steps that the engine's scheduler plans for ``run``, with predicted times. None of them is computed."""
    scheduler, left, steps, now = engine.scheduler, run.batch, [], time.monotonic()
    for i in range(run.batch):
        request = Request(
            id=f"planned-{i}",
            prompt_ids=[0] * run.prompt,
            params=_params(run),
            seed=0,
            max_tokens=run.output,
            arrival=now,
        )
        seq = Sequence(request)
        seq.max_output = run.output
        scheduler.add(seq)
    while left:
        plan = scheduler.plan(now, engine.steps.max_rows)
        step = _shape(engine, plan)
        steps.append(Timed(step.shape, step.decodes, model.predict(step.shape, graph=step.decodes)))
        now += steps[-1].seconds
        for span in plan.spans:
            scheduler.advance(span, [0] if "sample" in span.want else [])
            if span.seq.num_output >= run.output:
                scheduler.finish(span.seq, "length")
                left -= 1
        scheduler.complete(plan)
    return steps


def _shape(engine: Engine, plan: Plan) -> Timed:
    """The shape of a step, with the padding of the graph that replays it."""
    shape = StepShape.of((span.start, span.length) for span in plan.spans)
    decodes = shape.rows == len(plan.spans)
    graphs = engine.runner.graphs
    if decodes and graphs is not None and graphs.takes(plan.spans):
        rows = max(shape.rows, graphs.bucket(shape.rows))
        shape = StepShape(rows, shape.chunk_pairs, shape.decode_context, shape.sequences)
    return Timed(shape, decodes)


def _params(run: Batch) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=run.output, ignore_eos=True, detokenize=False)
