"""``kvasir bench steps``: terms of a step's time, the runtimes that follow from them, and their errors."""

from __future__ import annotations

import dataclasses
import json
import random
from types import SimpleNamespace

import numpy as np
import pytest

from kvasir.api.offline.llm import LLM
from kvasir.bench.workloads import Batch
from kvasir.config import EngineConfig
from kvasir.engine.schedule.step_time import Roofline, StepShape, StepTimeModel
from kvasir.errors import ConfigError
from kvasir_lab.bench import steps
from kvasir_lab.bench.steps import Idealised, Timed, fit
from tests.bench.test_result import check

ROOFLINE = Roofline(4e12, 8e14, 16e9, 15e9, 5e5, 1.3e5)
RUNS = [Batch("p16", 1, 16, 2), Batch("p300", 1, 300, 2), Batch("d1", 1, 20, 6), Batch("d6", 6, 90, 6)]


@pytest.fixture(scope="module")
def engine():
    config = EngineConfig.of(model="nano", device="cpu", num_threads=1, enable_prefix_caching=False)
    with LLM(config=config) as llm:
        yield llm.engine


def planted(noise: float = 0.0) -> tuple[np.ndarray, list[Timed]]:
    """Terms, and steps that take exactly as long as these say, give or take ``noise``."""
    terms = np.array([5e-3, 3e-5, 2e-9, 4e-8, 2e-5])
    rng, model, found = random.Random(2), StepTimeModel(ROOFLINE), []
    for _ in range(400):
        decodes = rng.choice((1, 4, 30, 200))
        spans = [(rng.randrange(10, 20_000), 1) for _ in range(decodes)]
        spans += [(rng.randrange(4000), rng.randrange(2, 2000)) for _ in range(rng.randrange(3))]
        shape = StepShape.of(spans)
        seconds = float(model.roofline.vector(shape) @ terms) * (1 + noise * rng.uniform(-1, 1))
        found.append(Timed(shape, len(spans) == decodes, seconds))
    return terms, found


def errors(model: StepTimeModel, found: list[Timed]) -> list[float]:
    return [abs(model.predict(s.shape, graph=s.decodes) / s.seconds - 1) for s in found]


def test_terms_that_are_there_are_found():
    terms, found = planted(noise=0.05)
    model = fit(ROOFLINE, found[:200])
    assert np.mean(errors(model, found[200:])) < 0.05
    assert model.coefficients(graph=False)[1] == pytest.approx(terms[1], rel=0.1), "a row of a step with prompts"
    assert model.coefficients(graph=True)[3] == pytest.approx(terms[3], rel=0.1), "a key of a decode"


def test_times_of_other_steps_are_not_fitted():
    """The control: without the relation of shape and time, the error must be large."""
    _, found = planted()
    seconds = [step.seconds for step in found]
    random.Random(3).shuffle(seconds)
    mixed = [dataclasses.replace(step, seconds=s) for step, s in zip(found, seconds)]
    assert np.mean(errors(fit(ROOFLINE, mixed), found)) > 0.3


@pytest.mark.parametrize("run", [*RUNS, Batch("mixed", 12, 150, 9)], ids=lambda run: run.name)
def test_what_is_planned_is_what_is_computed(engine, run):
    model = fit(ROOFLINE, planted()[1])
    plans = steps.planned(engine, run, model)
    assert steps._kinds(plans) == steps._kinds(steps._round(engine, run)) and not engine.has_work()
    assert all(step.seconds == model.predict(step.shape, graph=step.decodes) for step in plans)
    assert sum(step.shape.rows for step in plans) == run.batch * (run.prompt + run.output - 1)


def test_a_step_counts_with_its_least_time(engine, monkeypatch):
    rounds = [[0.5, 0.25], [0.25, 0.5], [1.0, 1.0]]
    shapes = [Timed(StepShape(5, 12.5, 0, 1), False), Timed(StepShape(1, 0.0, 5, 1), True)]
    left = [[dataclasses.replace(s, seconds=t) for s, t in zip(shapes, times)] for times in rounds]
    monkeypatch.setattr(steps, "_round", lambda engine, run: left.pop(0))
    found, walls = steps.denoised(engine, RUNS[0])
    assert [step.seconds for step in found] == [0.25, 0.25] and walls == [0.75, 0.75, 2.0]


class Cold:
    """A worker on a clock of its own whose first round of each run compiles for 50 s; the others take 1 ms a
    prompt token. It is also the module ``time`` of the code under test."""

    def __init__(self) -> None:
        self.now, self.seen = 0.0, set()
        self.clock = SimpleNamespace(model=StepTimeModel(ROOFLINE))

    def perf_counter(self) -> float:
        return self.now

    def idle(self) -> bool:
        return False

    def compute(self, engine, run: Batch) -> list[Timed]:
        self.now += (run not in self.seen) * 50.0 + run.batch * run.prompt / 1000
        self.seen.add(run)
        return [Timed(StepShape(run.prompt, 1.0, 0, 1), False, 0.1), Timed(StepShape(1, 0.0, run.prompt, 1), True, 0.1)]


@pytest.mark.parametrize("warms", [True, False], ids=["warm", "cold"])
def test_compiling_takes_no_time_from_the_fit(monkeypatch, caplog, warms):
    """Four runs of a few seconds each are measured however long each size takes to compile. Control: without the
    untimed round, compiling uses up the limit and runs are left out."""
    worker = Cold()
    monkeypatch.setattr(steps, "time", worker)
    monkeypatch.setattr(steps, "_round", worker.compute)
    if not warms:
        monkeypatch.setattr(steps, "warm", lambda engine, run: None)
    runs = [Batch(f"p{n}", 1, n, 2) for n in (100, 200, 300, 400)]
    metrics = steps.measure(worker, runs, [])
    assert (metrics["fit_runs"] == len(runs)) == warms
    if warms:
        assert metrics["fit_s"] == pytest.approx(3 * 1.0) and metrics["warm_s"] == pytest.approx(4 * 50 + 1.0)
    assert ("had no time" in caplog.text) != warms


def test_the_limit_of_the_fit_still_leaves_out_long_runs(monkeypatch):
    """A run that would take longer than the limit is neither measured nor warmed up."""
    worker = Cold()
    monkeypatch.setattr(steps, "time", worker)
    monkeypatch.setattr(steps, "_round", worker.compute)
    runs = [Batch("short", 1, 1000, 2), Batch("long", 1, int(1000 * steps.FIT_SECONDS / steps.ROUNDS), 2)]
    assert steps.measure(worker, runs, [])["fit_runs"] == 1 and worker.seen == {runs[0]}


def test_the_idealised_runtime_is_f_of_the_prompt_and_a_slope():
    def alone(prompt: int, first: float) -> list[Timed]:
        return [Timed(StepShape(prompt), False, first), *[Timed(StepShape(1), True, 0.01)] * 3]

    ideal = Idealised({Batch(f"p{n}", 1, n, 4): alone(n, n / 1000) for n in (100, 300)})
    assert ideal.seconds(200, 11) == pytest.approx(0.2 + 0.1) and ideal.seconds(600, 1) == pytest.approx(0.6)
    with pytest.raises(ConfigError):
        Idealised({})


def test_one_result(monkeypatch, capsys):
    monkeypatch.setattr(steps, "fitted_runs", lambda *room: RUNS)
    config = EngineConfig.of(model="nano", device="cpu", num_threads=1)
    steps.run(config, shape=None, workloads=["one:1:100:8", "four:4:60:6"], output=None, commit=None)
    found = json.loads(capsys.readouterr().out)
    check(found)
    metrics = found["arms"][0]["metrics"]
    assert metrics["fit_runs"] == len(RUNS) and set(metrics["decode_terms"]) == {name for name, _ in steps.TERMS}
    assert metrics["one"]["error"] == pytest.approx(
        metrics["one"]["predicted_ms"] / metrics["one"]["denoised_ms"] - 1, abs=0.01
    )
    assert "idealised_error" in metrics["one"] and "idealised_error" not in metrics["four"]
    assert metrics["error_most"] >= metrics["error_mean"] >= 0
    with pytest.raises(ConfigError, match="do not fit at once"):
        steps.run(config, shape=None, workloads=["long:1:100000:8"], output=None, commit=None)


def test_a_run_that_is_cut_keeps_the_fit_and_what_was_predicted(monkeypatch, tmp_path):
    """The second prediction is cut off while it is measured."""
    monkeypatch.setattr(steps, "fitted_runs", lambda *room: RUNS)
    real = steps.denoised

    def cut(engine, run):
        if run.name == "second":
            raise KeyboardInterrupt
        return real(engine, run)

    monkeypatch.setattr(steps, "denoised", cut)
    config, file = EngineConfig.of(model="nano", device="cpu", num_threads=1), tmp_path / "steps.json"
    for workloads, kept in ((["second:1:50:4"], set()), (["first:1:60:4", "second:1:50:4"], {"first", "error_mean"})):
        with pytest.raises(KeyboardInterrupt):
            steps.run(config, shape=None, workloads=workloads, output=file, commit=None)
        found = json.loads(file.read_text())
        check(found)
        metrics = found["arms"][0]["metrics"]
        assert {"decode_terms", "prompt_terms", "idealised"} | kept <= set(metrics) and "second" not in metrics
        assert kept or "error_mean" not in metrics


def test_runs_fit_the_engine():
    for longest, capacity, most in ((4096, 32_752, 256), (128, 500, 4), (131_072, 500_000, 256)):
        for runs in (steps.fitted_runs(longest, capacity, most), steps.held_out(longest, capacity, most)):
            assert runs and len({run.name for run in runs}) == len(runs)
            for run in runs:
                steps._check(run, longest, capacity, most)
