"""SpecReason's judges: digits as published, and who writes the first steps."""

from __future__ import annotations

import math

import pytest

from tests.scaling.tabular import Tabular
from tests.scaling.test_strategies import run, tiers


class Rater(Tabular):
    """Rates every step 7 in six cases of ten, and else 3: 5.4 on average."""

    async def choose(self, prompt, options, usage):
        if "7" not in options:
            return await super().choose(prompt, options, usage)
        self.read(prompt, usage)
        self.counts["generated"] += 1
        return {digit: math.log({"7": 0.6, "3": 0.4}.get(digit, 1e-9)) for digit in options}


@pytest.mark.parametrize(
    "options, accepts",
    [("score=digit", True), ("score=digit,threshold=0.75", False), ("score=mean", False)]
    + [("score=mean,threshold=0.5", True)],
)
def test_steps_are_rated_by_digits_as_published(options, accepts):
    found = run(f"specreason:{options}", 4, [Tabular("small"), Rater("large")])
    for solved in found.solved:
        stats = solved.result.stats
        assert stats["accepted"] == (stats["steps"] if accepts else 0)


def test_the_strong_model_may_write_the_first_steps():
    found = run("specreason:threshold=0,first=2", 4, tiers())
    assert all(max(0, s.result.stats["steps"] - 2) == s.result.stats["accepted"] for s in found.solved)
    assert found.ledger.by_endpoint()["large"]["generated"]
