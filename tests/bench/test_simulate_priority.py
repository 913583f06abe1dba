"""The simulation of two classes: who waits under which policy, and what displacing costs."""

from __future__ import annotations

import random

import pytest

from kvasir import technique
from kvasir.engine.schedule.policy import POLICIES, SchedulerPolicy
from kvasir_lab.studies.simulate_priority import Classes

COUNT, PROMPT = 600, 40


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, float]]:
    """Figures by policy. Many more requests than there are seats come within a second; half are urgent."""
    draw = random.Random(1)
    requests = [
        (i / COUNT, [draw.randrange(1 << 40) for _ in range(PROMPT)], draw.randint(120, 180)) for i in range(COUNT)
    ]
    names = ("fcfs", "priority", "priority:threshold=11")
    return {name: Classes(requests, technique.load(POLICIES, name, SchedulerPolicy), 0.5).run() for name in names}


def test_priority_serves_the_urgent_first_and_arrival_does_not(found):
    assert sum(found["fcfs"][f"{kind}_requests"] for kind in ("urgent", "normal")) == COUNT
    fcfs, priority = found["fcfs"], found["priority"]
    assert priority["urgent_first_s_p50"] < 0.8 * priority["normal_first_s_p50"]
    assert priority["urgent_last_s_p50"] < fcfs["urgent_last_s_p50"]
    assert fcfs["urgent_first_s_p50"] > 0.8 * fcfs["normal_first_s_p50"]


def test_nobody_is_displaced_without_a_difference_of_the_threshold(found):
    """Priorities without a threshold displace some requests, whose rows are then computed again."""
    assert found["priority"]["displaced"] > 10 and found["priority"]["recomputed_share"] > 0.001
    assert found["priority:threshold=11"]["displaced"] == found["priority:threshold=11"]["recomputed_share"] == 0
