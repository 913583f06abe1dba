"""The study of trained judges: its arms, and its comparisons at equal tokens."""

from __future__ import annotations

import argparse

from kvasir.lab.lookup import load_task
from kvasir.scaling.strategy import load_strategy
from tools import judge_study as study

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
