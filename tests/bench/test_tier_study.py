"""The study of two models: its arms, its speed-up, and a router against chance."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvasir.scaling.strategy import load_strategy
from kvasir_lab.studies import tier_study as study
from tests.bench.test_result import check


def made(bits: str, ms: float, **more) -> dict:
    models = {"base": {"output": 40, "discarded": 0, "prompt": 8, "gflop": 2.0}}
    return {"right": bits, "median_ms": ms, "p90_ms": 2 * ms, "s": 1.0, "models": models} | more


def test_every_arm_loads_and_has_its_own_name():
    for task in study.TASKS:
        planned = study.arms(task)
        assert len({one.name for one in planned}) == len(planned)
        for one in planned:
            load_strategy(one.spec.replace("prm=easy", "prm=x"))
        assert any(one.timed for one in planned) and any(one.routes for one in planned)
    assert study.Arm("cost_router:prm=easy", "rater").models("path") == ["nano", "rater-path", "easy-path"]


def test_a_router_is_held_against_chance_with_its_own_share():
    small, large = (f"majority:n=1,model={name}" for name in ("nano", "base"))
    router = study.Arm("cost_router:prm=easy,threshold=0.5", routes=True)
    of = {small: {0: made("1100", 1.0)}, large: {0: made("1111", 4.0)}}
    of[router.name] = {0: made("1111", 2.0, large="0011")}
    found = study.metrics_of(router, of)
    assert found["share"] == 0.5 and found["speedup"] == 2 and found["over base"] == 0
    assert found["over chance"] == pytest.approx(0.25), "chance with this share is right for three quarters"
    assert found["base.output"] == 10
    of[router.name] = {0: made("1100", 2.0, large="0000")}
    assert study.metrics_of(router, of)["over chance"] == 0


def test_accepted_steps_are_a_share_of_all():
    one = study.Arm("specreason:threshold=0.7")
    found = study.metrics_of(one, {one.name: {0: made("11", 1.0, steps=8, accepted=6)}})
    assert found["accepted"] == 0.75 and "speedup" not in found


@pytest.mark.parametrize("part", ["quality", "timed"])
def test_arms_that_need_no_training_run_before_it(part, tmp_path, monkeypatch):
    """The rater takes more than all the time, and everything that does not ask it is measured."""
    now, told, out = [0.0], list[str](), tmp_path / "tiers.json"

    def train(name: str, folder: Path, *_) -> None:
        told.append(f"train {name}")
        now[0] += 900 if name.startswith("rater") else 5
        folder.mkdir(parents=True)
        (folder / "reward.json").write_text(json.dumps({"seconds": now[0]}))

    async def cell(one: study.Arm, endpoints: list[str], *_) -> dict:
        told.append(one.name)
        more = {"steps": 4, "accepted": 2} if "specreason" in one.spec else {}
        return made("01", 1.0, **more, **({"large": "01"} if "cost_router" in one.spec else {}))

    async def engines(self, names) -> list[str]:
        assert set(names) <= set(self.models)
        return list(names)

    monkeypatch.setattr(study.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(study, "train", train)
    monkeypatch.setattr(study, "cell", cell)
    monkeypatch.setattr(study.Engines, "__call__", engines)
    command = [str(out), "--minutes", "2", "--parts", part, "--tasks", "countdown", "--seeds", "1", "--own"]
    assert study.main(command) == 0
    untrained = {one.name for one in study.arms("countdown") if one.models("countdown") == ["nano", "base"]}
    easy = told.index("train easy-countdown") if part == "quality" else told.index("train rater-countdown")
    expected = {one.name for one in study.arms("countdown") if one.timed} & untrained
    assert set(told[:easy]) == (untrained if part == "quality" else expected)
    assert told[-1] == "train rater-countdown" and ("train easy-countdown" in told) == (part == "quality")
    found = json.loads(out.read_text())
    check(found)
    left = found["cells"]["left"]
    assert left == sum(one.large == "rater" and (part == "quality" or 2 * one.timed) for one in study.arms("countdown"))
    told.clear()
    assert study.main(command) == 0
    assert told and all("(rater)" in name for name in told), "the same command goes on"
    assert json.loads(out.read_text())["cells"]["left"] == 0
