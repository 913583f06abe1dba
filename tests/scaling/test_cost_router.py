"""Routing by predicted difficulty: its limits, its control, and what it costs."""

from __future__ import annotations

import pytest

from kvasir.errors import ConfigError
from kvasir.scaling.endpoint import Score
from kvasir.scaling.strategy import load_strategy
from tests.scaling.rewarded import Reward
from tests.scaling.tabular import Tabular
from tests.scaling.test_layer import run


class Expects(Reward):
    """Thinks that the cheap model solves every second problem that it is asked about."""

    async def score(self, prompt, sample, usage) -> Score:
        await super().score(prompt, sample, usage)
        self.asked = getattr(self, "asked", 0) + 1
        return Score(0.0, 0.0, 1, reward=0.9 if self.asked % 2 else 0.1)


def models() -> list[Tabular]:
    return [Tabular("small"), Tabular("large"), Expects()]


def tiers(solution) -> list[int]:
    return [s.result.stats["tier"] for s in solution.solved]


def test_problems_go_where_the_classifier_says_for_one_prompt_each():
    found = run("cost_router:prm=prm", 8, models())
    assert sorted(tiers(found)) == [0] * 4 + [1] * 4
    assert all((s.result.stats["chance"] >= 0.5) == (s.result.stats["tier"] == 0) for s in found.solved)
    spent = found.ledger.by_endpoint()
    assert spent["small"]["generated"] and spent["large"]["generated"] and not spent["prm"]["generated"]


def test_thresholds_at_the_ends_are_one_model_alone():
    assert set(tiers(run("cost_router:prm=prm,threshold=0", 6, models()))) == {0}
    assert set(tiers(run("cost_router:prm=prm,threshold=1.1", 6, models()))) == {1}


def test_the_control_asks_nobody_and_keeps_its_share():
    found = run("cost_router:by=random,share=0.3", 200, models()[:2])
    assert 0.2 < sum(tiers(found)) / 200 < 0.4
    assert set(tiers(run("cost_router:by=random,share=0", 6, models()[:2]))) == {0}


@pytest.mark.parametrize(
    "spec, endpoints, error",
    [
        ("cost_router", models(), "needs a classifier"),
        ("cost_router:prm=prm", models()[1:], "needs two models"),
        ("cost_router:prm=nobody", models(), "no model named"),
        ("cost_router:prm=small", models(), "writes and is no reward model"),
    ],
)
def test_what_cannot_work_is_refused(spec, endpoints, error):
    with pytest.raises(ConfigError, match=error):
        load_strategy(spec).check(endpoints, None)
