"""The study of trained judges: its arms, and its comparisons at equal tokens."""

from __future__ import annotations

import argparse
import asyncio
import json

import pytest

from kvasir.errors import ConfigError
from kvasir.scaling.strategy import load_strategy
from kvasir_lab.lookup import load_task
from kvasir_lab.studies import judge_study as study
from kvasir_lab.studies import reward_study, tier_study
from tests.bench.test_result import check

OPTIONS = argparse.Namespace(seeds=1, problems=4)


def made(bits: str, output: int) -> dict:
    return {"right": bits, "mflop": [10] * len(bits), "output": output, "calls": 2, "s": 1.0}


def test_every_arm_loads_and_its_control_is_an_arm():
    specs = [one.spec for one in study.arms()]
    assert len(set(specs)) == len(specs)
    for one in study.arms():
        load_strategy(one.spec)
        assert not one.control or one.control in specs, one
        assert set(one.models) <= {"base", *study.TRAINED} and one.models, one
    assert all(load_task(spec).candidates for spec in study.TASKS.values())


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_all_samples_of_all_problems_at_once_may_wait(device, monkeypatch):
    """An engine whose queue is full refuses a call, and after five refusals the whole study ends."""

    class Endpoint:
        def __init__(self, config, name) -> None:
            self.most = config.scheduler.max_queued_requests

        async def start(self) -> None:
            pass

    monkeypatch.setattr(reward_study, "EngineEndpoint", Endpoint)
    (endpoint,) = asyncio.run(study.Engines({"base": "base"}, device)(["base"]))
    planned = [*study.arms(), *reward_study.arms()]
    planned += [one for task in tier_study.TASKS for one in tier_study.arms(task)]
    configs = [load_strategy(one.spec.replace("prm=easy", "prm=easy-path")).config for one in planned]
    samples = max(getattr(config, name, 0) for config in configs for name in ("n", "N", "last"))
    assert samples == 40 and endpoint.most >= samples * max(reward_study.AT_ONCE, tier_study.AT_ONCE)


def test_a_tournament_is_compared_with_the_check_that_takes_as_many_tokens():
    small, large = "best_of_n:n=8,by=judge,model=base", "best_of_n:n=20,by=judge,model=base"
    games, control = "v1:N=8,judge=pair,model=base", "v1:N=8,model=base"
    cells = {(0, small): made("1000", 40), (0, large): made("1110", 100)}
    cells |= {(0, games): made("1111", 60), (0, control): made("1100", 60)}
    found = {entry["name"]: entry["metrics"] for entry in study.summed(cells, "path", OPTIONS)}
    told = found[f"path, {games}"]
    assert told["equal_check"] == large and told[f"over {large}"] == 0.25
    assert told[f"over {control}"] == 0.5 and told["output"] == 15
    assert "equal_check" not in found[f"path, {small}"]


@pytest.mark.parametrize("worst, status", [(1e-3, 0), (0.5, 1), (float("nan"), 1)])
def test_a_distance_from_the_trainer_is_told_at_the_end_and_costs_no_cell(worst, status, tmp_path, monkeypatch):
    async def parity(*_) -> float:
        return worst

    async def cell(spec: str, *_) -> dict:
        return made("0101", 10)

    async def engines(self, names) -> list[str]:
        return list(names)

    monkeypatch.setattr(study, "parity", parity)
    monkeypatch.setattr(study, "cell", cell)
    monkeypatch.setattr(study.Engines, "__call__", engines)
    out = tmp_path / "judge.json"
    for name in study.TRAINED:
        folder = out.with_suffix(".models") / name
        folder.mkdir(parents=True)
        (folder / "reward.json").write_text(json.dumps({"kind": "pair_rl", "seconds": 1.0}))
    command = [str(out), "--problems", "4", "--seeds", "1", "--tasks", "path", "--check", "--device", "cpu"]
    assert study.main(command) == status
    found = json.loads(out.read_text())
    check(found)
    assert found["cells"] == {"done": len(study.arms()), "left": 0}
    assert found.get("parity") == ({"nats_a_token": worst} if worst == worst else None)


def test_a_model_that_solves_nothing_has_no_distance(tmp_path, monkeypatch):
    """Without a judgement the distance would be 0, below every bound."""
    monkeypatch.setattr(study.export, "load", lambda *_: None)
    monkeypatch.setattr(study.lab_tokenizer, "load", lambda *_: None)
    monkeypatch.setattr(study.pair, "held_out", lambda *_: study.pair.Held([], []))

    async def engines(names) -> list[str]:
        return list(names)

    with pytest.raises(ConfigError, match="solves none of 8 problems"):
        asyncio.run(study.parity(engines, tmp_path, argparse.Namespace(tasks=["path"]), "cpu"))
