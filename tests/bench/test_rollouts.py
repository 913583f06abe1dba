"""The rollout benchmark end to end on the smallest model: forwards fall as problems recur, outputs stay the same."""

import json

import pytest

from kvasir.config import EngineConfig
from kvasir.errors import ConfigError
from kvasir.types import SamplingParams
from kvasir_lab.bench import rollouts

COMMON = dict(
    problems=2,
    samples=2,
    rounds=2,
    tasks=["chain"],
    max_tokens=24,
    checkpoints=[],
    noise=0.0,
    only=["suffix fixed"],
    output=None,
    commit="x",
)


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
    assert found["arms"][1]["metrics"]["rounds"]["same_outputs"] == [1, 1], (
        "every arm sees the same weights in the same round"
    )


def test_every_step_reads_the_noise(monkeypatch):
    """Native calls copy matrices, torch's products read them in place: after noise, both give the same tokens."""
    prompt = [300, 307]  # short enough that one call runs every step, on any processor
    tokens = []
    for native in (True, False):
        if not native:
            monkeypatch.setattr("kvasir.engine.start.build.why_not", lambda *_: "not wanted")
        bench = rollouts.Rollouts(
            config(), [prompt], [prompt[::-1]], 1, samples=1, rounds=2, max_tokens=24, checkpoints=[], noise=0.2
        )
        try:
            for r in (0, 1, 0):
                bench.weights(r)
                out = bench.llm.generate([{"prompt_token_ids": prompt}], [SamplingParams(**bench.params, seed=1)])
                tokens.append(out[0].outputs[0].token_ids)
        finally:
            bench.llm.close()
    first, noisy, back = tokens[:3]
    assert tokens[3:] == tokens[:3] and noisy != first and back == first


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="no arm named"):
        rollouts.run(config(), **COMMON | {"only": ["prefix"]})
    with pytest.raises(ConfigError, match="not from both"):
        rollouts.run(config(), **COMMON | {"checkpoints": ["nano"], "noise": 0.1})
