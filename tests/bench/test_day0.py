"""Day 0: what is read from the curve, and a run through the engine."""

from __future__ import annotations

import json
import weakref
from types import SimpleNamespace

import pytest

from kvasir.api.offline.llm import LLM
from kvasir.bench import result
from kvasir.cli.options import build_settings
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError
from kvasir.learn import link
from kvasir.types import Event
from kvasir_lab.bench import day0
from kvasir_lab.bench.day0 import Window
from tests.learn.helpers import IDLE

OPTIONS = {"tasks": ["chain"], "batch": 2, "minutes": 0.05, "plain_minutes": 0.02, "max_tokens": 6}


def test_the_goals_are_reached_where_a_window_is_fast_enough():
    windows = [Window(10.0, 1000, 1000, 0), Window(20.0, 1250, 1000, 1), Window(30.0, 1600, 1000, 2)]
    found = day0.metrics_of(windows, [0.01] * 99 + [0.5], plain=100.0)
    assert (found["seconds_to_1.2x"], found["tokens_to_1.2x"]) == (20.0, 2250)
    assert (found["seconds_to_1.5x"], found["tokens_to_1.5x"]) == (30.0, 3850)
    assert found["tokens_per_s"] == 160.0 and 10 < found["gap_p99_ms"] < 500
    assert found["curve"]["tokens_per_forward"] == [1.0, 1.25, 1.6] and found["curve"]["version"] == [0, 1, 2]
    slow = day0.metrics_of(windows[:1], [], plain=100.0)
    assert slow["seconds_to_1.2x"] is None and slow["gap_p99_ms"] is None


def test_without_learning_there_is_nothing_to_measure():
    config = build_settings({"model": "nano"}, EngineConfig)
    with pytest.raises(ConfigError, match="--learn on"):
        day0.run(config, output=None, commit="x", **OPTIONS)


class Scripted:
    """An engine of two requests, whose steps take a second each by a clock of its own; every third one drafts."""

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.names, self.steps, self.drafted = clock, [], 0, 0
        self.info = None

    def submit(self, request) -> None:
        self.names.append(request)

    def step(self):
        self.steps += 1
        drafts = self.steps % 3 == 0
        self.drafted += drafts
        self.clock[0] += 2.0 if drafts else 1.0
        return [Event(kind="tokens", request_id=n, token_ids=[1] * (3 if drafts else 1)) for n in self.names]

    def stats(self):
        drafts = 2 * self.drafted
        return SimpleNamespace(
            forwards=2 * self.steps,
            drafted_tokens=self.drafted,
            drafts=drafts,
            accepted_tokens=2 * drafts,
            draft_gain=self.steps / 100,
            learning=None,
        )


def test_steps_without_drafts_are_measured_for_themselves(monkeypatch):
    clock, seen = [0.0], []
    monkeypatch.setattr(day0.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(day0, "admit", lambda prompt, params, info, id, arrival: id)
    load = day0.Load(Scripted(clock), iter([[1]] * 2), 2, 8)
    windows = load.run(120.0, lambda windows: seen.append(len(windows)))
    found = load.undrafted.metrics()
    assert found["tokens_per_s"] == 2.0 and found["gap_p50_ms"] == found["gap_p99_ms"] == 1000
    assert found["seconds"] == 40.0, "half of the last two thirds"
    curve = day0.metrics_of(windows, [])["curve"]
    assert set(curve["tokens_per_draft"]) == {3.0} and curve["predicted_gain"][-1] == pytest.approx(0.9, abs=0.05)
    rates = [w.tokens for w in windows]
    assert sum(rates) / 120 == pytest.approx(10 / 4, rel=0.1) and seen == list(range(1, len(windows) + 1))


def test_a_run_that_is_cut_keeps_its_windows(tmp_path, monkeypatch):
    """The learning arm ends in its second window, as a time limit ends it."""
    given = {"model": "nano", "num_threads": 1, "drafter": "medusa:model=new", "learn": "on", "learn_tenants": ("all",)}
    monkeypatch.setattr(link, "COMMAND", IDLE)
    monkeypatch.setattr(day0, "PROBLEMS", 8)
    file, saved = tmp_path / "day0.json", []

    def save(outcome, output, commit):
        result.save(outcome, output, commit)
        saved.append([len(a["metrics"]["curve"]["seconds"]) for a in outcome["arms"]])
        if len(saved[-1]) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(day0, "save", save)
    with pytest.raises(KeyboardInterrupt):
        day0.run(build_settings(given, EngineConfig), output=file, commit="x", **OPTIONS)
    plain, learning = json.loads(file.read_text())["arms"]
    assert plain["metrics"]["undrafted"]["tokens_per_s"] > 0 and learning["metrics"]["learning"]["ended"] == ""
    assert learning["metrics"]["tokens_per_s"] > 0 and saved[0] == [1]


def test_the_first_engine_is_gone_before_the_second_one_starts(monkeypatch):
    """On a GPU the second one finds no memory otherwise. Each arm is described by its own settings."""
    engines, arms = [], []

    class Watched(LLM):
        def __init__(self, config: EngineConfig) -> None:
            assert all(engine() is None for engine in engines)
            super().__init__(config=config)
            engines.append(weakref.ref(self.engine))

    given = {"model": "nano", "num_threads": 1, "drafter": "medusa:model=new", "learn": "on", "learn_tenants": ("all",)}
    monkeypatch.setattr("kvasir.api.offline.llm.LLM", Watched)
    monkeypatch.setattr(link, "COMMAND", IDLE)
    monkeypatch.setattr(day0, "PROBLEMS", 8)
    monkeypatch.setattr(day0, "finish", lambda outcome, output, commit: arms.extend(outcome["arms"]))
    day0.run(build_settings(given, EngineConfig), output=None, commit="x", **OPTIONS)
    assert len(engines) == 2
    plain, learning = (a["config"] for a in arms)
    assert not {"drafter", "learn", "learn_tenants"} & plain.keys() and learning["learn"] == "on"


@pytest.mark.slow
def test_plain_and_learning_are_measured(capsys):
    given = {"model": "nano", "drafter": "medusa:model=new", "learn": "on", "learn_tenants": ("all",)}
    day0.run(build_settings(given, EngineConfig), output=None, commit="x", **OPTIONS | {"minutes": 0.3})
    plain, learning = json.loads(capsys.readouterr().out)["arms"]
    assert plain["metrics"]["tokens_per_s"] > 0 and learning["metrics"]["learning"]["ended"] == ""
    assert learning["metrics"]["undrafted_over_plain"] > 0
