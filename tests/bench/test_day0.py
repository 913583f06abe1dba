"""Day 0: what is read from the curve, and a run through the engine."""

from __future__ import annotations

import json

import pytest

from kvasir.bench import day0
from kvasir.bench.day0 import Window
from kvasir.cli.options import build_settings
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError

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


@pytest.mark.slow
def test_plain_and_learning_are_measured(capsys):
    given = {"model": "nano", "drafter": "medusa:model=new", "learn": "on", "learn_tenants": ("all",)}
    day0.run(build_settings(given, EngineConfig), output=None, commit="x", **OPTIONS | {"minutes": 0.3})
    plain, learning = json.loads(capsys.readouterr().out)["arms"]
    assert plain["metrics"]["tokens_per_s"] > 0 and learning["metrics"]["learning"]["ended"] == ""
