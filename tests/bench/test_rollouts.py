"""The rollout benchmark end to end on the smallest model: forwards fall as problems recur, outputs stay."""

import json

import pytest

from kvasir.bench import rollouts
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError

COMMON = dict(problems=2, samples=2, rounds=2, tasks=["chain"], max_tokens=24, checkpoints=[], noise=0.0, only=["suffix fixed"], output=None, commit="x")


def config(**options):
    return EngineConfig.of(model="nano", num_threads=1, max_model_len=512, num_pages=64, **options)


def test_arms_rounds_and_labels(capsys):
    rollouts.run(config(), **COMMON | {"checkpoints": ["nano"]})
    found = json.loads(capsys.readouterr().out)
    plain, suffix = (a["metrics"]["rounds"] for a in found["arms"])
    assert len(plain["makespan_s"]) == 2 and plain["tokens"] == suffix["tokens"] and suffix["same_outputs"] == [1, 1]
    assert sum(suffix["forwards"]) < sum(plain["forwards"])
    assert found["arms"][0]["config"]["weights"] == "1 checkpoints" and plain["length_p50"] <= plain["length_p99"]


def test_perturbed_weights_change_the_policy_and_come_back(capsys):
    rollouts.run(config(), **COMMON | {"noise": 0.5, "only": ["suffix length"]})
    found = json.loads(capsys.readouterr().out)
    assert "stand-in" in found["arms"][0]["config"]["weights"]
    assert found["arms"][1]["metrics"]["rounds"]["same_outputs"] == [1, 1], "every arm sees the same weights in the same round"


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="no arm named"):
        rollouts.run(config(), **COMMON | {"only": ["prefix"]})
    with pytest.raises(ConfigError, match="not from both"):
        rollouts.run(config(), **COMMON | {"checkpoints": ["nano"], "noise": 0.1})
