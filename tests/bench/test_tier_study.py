"""The study of two models: its arms, its speed-up, and a router against chance."""

from __future__ import annotations

import pytest

from kvasir.scaling.strategy import load_strategy
from tools import tier_study as study


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
