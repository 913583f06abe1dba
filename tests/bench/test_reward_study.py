"""The study of reward models: its arms, its comparisons at equal cost, and its policy table."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import pytest

from kvasir.errors import ConfigError
from kvasir.scaling.strategy import load_strategy
from kvasir_lab.studies import reward_study as study
from tests.bench.test_result import check


def test_every_arm_loads_and_its_control_is_an_arm():
    planned = study.arms()
    specs = [one.spec for one in planned]
    assert len(set(specs)) == len(specs)
    for one in planned:
        load_strategy(one.spec)
        assert not one.control or one.control in specs, one
        assert set(one.models) <= {"base", *study.TRAINED} and one.models, one
    with_prm = {one.spec.partition(":")[0] for one in planned if "prm=" in one.spec}
    without = {one.spec.partition(":")[0] for one in planned if "prm=" not in one.spec}
    assert {"beam", "particle", "a_star", "self_eval_prune", "best_of_n", "adaptive_self_eval"} <= with_prm & without


def made(bits: str, mflop: int) -> dict:
    return {
        "right": bits, "mflop": [mflop] * len(bits), "output": 10, "discarded": 5, "calls": 2, "drawn": None, "s": 1.0
    }  # fmt: skip


OPTIONS = argparse.Namespace(seeds=1, problems=100, task="t")


def test_an_arm_is_compared_with_its_control_and_with_the_vote_that_costs_as_much():
    planned = [study.Arm(f"majority:n={n},model=base") for n in (1, 8)] + [
        study.Arm("beam:prm=x", "beam:judge=y"), study.Arm("beam:judge=y")
    ]  # fmt: skip
    given = {"majority:n=1,model=base": ("0" * 100, 1), "majority:n=8,model=base": ("10" * 50, 8)}
    given |= {"beam:prm=x": ("1" * 100, 5), "beam:judge=y": ("10" * 50, 9)}
    arms = study.summed({(0, spec): made(*told) for spec, told in given.items()}, planned, OPTIONS)
    metrics = {entry["name"]: entry["metrics"] for entry in arms}
    found = metrics["beam:prm=x"]
    assert found["over beam:judge=y"] == 0.5 and found["over beam:judge=y.low"] > 0.3
    assert found["equal_vote"] == "majority:n=8,model=base" and found["over majority:n=8,model=base"] == 0.5
    assert metrics["beam:judge=y"]["equal_vote"] == "majority:n=8,model=base", "the dearest there is"
    assert "equal_vote" not in metrics["majority:n=1,model=base"]


def test_the_table_is_judged_where_the_difficulty_and_all_its_arms_are_there():
    rng = random.Random(0)
    ease = rng.sample([i / 100 for i in range(100)], 100)
    easy = "".join("1" if e > 0.5 else "0" for e in ease)
    planned = [study.Arm("a", pooled=True), study.Arm("b", pooled=True)]
    cells = {(0, "a"): made(easy, 1000), (0, "b"): made(easy.translate({48: 49, 49: 48}), 2000)}
    assert study.policies(cells, planned, OPTIONS) == []
    told = {"scores": ease, "mflop": [100.0] * 100}
    cells[0, study.DIFFICULTY] = {"prompt": told, "pilot": told}
    last = study.policies(cells, planned, OPTIONS)[-1]["metrics"]
    assert last["table"] > last["single"] + 0.2 and last["low"] > 0.1
    assert last["table_gflop"] == pytest.approx(1.6, abs=0.15), "the prediction is paid"


def test_cells_of_other_problems_are_refused_and_a_torn_line_is_left_out(tmp_path):
    file = tmp_path / "cells.jsonl"
    file.write_text(json.dumps([[0, "a"], made("01", 1)]) + "\n" + '[[0, "b"], {"ri')
    assert list(study.load_cells(file, 2)) == [(0, "a")]
    with pytest.raises(ConfigError, match="another --problems"):
        study.load_cells(file, 3)


class Stopwatch:
    """A clock of its own for the study: models are trained, and cells filled, in as many seconds as the test says."""

    def __init__(self, monkeypatch, seconds: dict[str, float]) -> None:
        self.now, self.seconds, self.told = 0.0, seconds, list[str]()
        monkeypatch.setattr(study.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(study, "train", self.train)
        monkeypatch.setattr(study, "cell", self.cell)
        monkeypatch.setattr(study, "difficulty", self.difficulty)
        monkeypatch.setattr(study.Engines, "__call__", self.engines)

    def train(self, name: str, folder: Path, *_) -> None:
        self.told.append(f"train {name}")
        self.now += self.seconds[name]
        folder.mkdir(parents=True)
        (folder / "reward.json").write_text(json.dumps({"before": 0.5, "after": 0.6, "seconds": 1.0, "plan": {}}))

    async def engines(self, names) -> list[str]:
        return list(names)

    async def cell(self, spec: str, endpoints: list[str], *_) -> dict:
        self.told.append(spec)
        self.now += self.seconds["cell"]
        return made("01", 1)

    async def difficulty(self, *_) -> dict:
        told = {"scores": [0.1, 0.9], "mflop": [1.0, 1.0]}
        return {"prompt": told, "pilot": told}


COMMAND = ["--problems", "2", "--seeds", "1", "--device", "cpu"]
ARMS = "majority:n=1,;beam:N=8,width=4,prm"


def test_arms_run_before_the_models_that_only_later_arms_need(tmp_path, monkeypatch, capsys):
    """Labels by rollouts take more than all the time, and everything that needs none is measured."""
    clock = Stopwatch(monkeypatch, {"outcome": 5, "self": 5, "head": 5, "judge": 5, "rollouts": 900, "cell": 1})
    out = tmp_path / "reward.json"
    assert study.main([str(out), *COMMAND, "--minutes", "2", "--arms", ARMS]) == 0
    first, head, rollouts = (clock.told.index(f"train {name}") for name in ("outcome", "head", "rollouts"))
    assert first == 0 and "train self" not in clock.told, "no arm of these asks it"
    assert clock.told[1:head] == ["majority:n=1,model=base", "beam:N=8,width=4,prm=outcome,model=base"]
    assert clock.told[head + 1 : rollouts] == ["beam:N=8,width=4,prm=head,model=base"]
    found = json.loads(out.read_text())
    check(found)
    assert found["cells"] == {"done": 4, "left": 1} and "1 left; run" in capsys.readouterr().out
    assert set(found["trained"]) == {"outcome", "head", "rollouts"}
    clock.told.clear()
    assert study.main([str(out), *COMMAND, "--minutes", "2", "--arms", ARMS]) == 0
    assert clock.told == ["beam:N=8,width=4,prm=rollouts,model=base"], "the same command goes on"
    assert json.loads(out.read_text())["cells"] == {"done": 5, "left": 0}


def test_a_study_that_is_cut_has_written_the_cells_before(tmp_path, monkeypatch):
    clock, out = Stopwatch(monkeypatch, {"outcome": 5, "cell": 30}), tmp_path / "reward.json"

    async def cut(spec: str, *more) -> dict:
        if "beam" in spec:
            raise KeyboardInterrupt
        return await clock.cell(spec, *more)

    monkeypatch.setattr(study, "cell", cut)
    with pytest.raises(KeyboardInterrupt):
        study.main([str(out), *COMMAND, "--arms", ARMS])
    found = json.loads(out.read_text())
    check(found)
    assert [one["name"] for one in found["arms"]] == ["majority:n=1,model=base"] and found["cells"]["done"] == 2
