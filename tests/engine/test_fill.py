"""A fixed row budget is FastGen's Dynamic SplitFuse: under backlog every step is full of decodes and prompts."""

from __future__ import annotations

import random

import pytest

from kvasir.types import Status
from tests.engine.scheduling import driver, rows, running, unique

PAGE, DECODES = 16, 20


def shares(budget: int, **options) -> tuple[float, float]:
    """Shares of the steps with a backlog that are full but for a page, and that hold every decode."""
    rng, d = random.Random(5), driver(num_pages=700, page_slots=PAGE, max_rows=budget, max_num_seqs=40, **options)
    running(d, DECODES)
    prompts = [d.add(unique(rng.choice((30, 90, 700, 1500)), f"p{i}", max_tokens=1)) for i in range(12)]
    full = whole = steps = 0
    while sum(seq.num_prompt - seq.num_computed for seq in prompts if seq.status is not Status.FINISHED) > 2 * budget:
        plan = rows(d.step())
        steps += 1
        full += sum(plan.values()) > budget - PAGE
        whole += sum(name.startswith("d") for name in plan) == DECODES
    assert steps > 5
    return full / steps, whole / steps


@pytest.mark.parametrize("budget", [784, 530, 300])
def test_steps_are_full_while_prompts_wait(budget):
    full, whole = shares(budget)
    assert full >= 0.95 and whole == 1.0, "decodes are in every step, prompts fill the rest"


def test_a_budget_of_whole_tiles_is_rounded_down_once_more():
    """Chunks end at pages, so a step of 768 rows is hardly reached; it is cut to 640 then."""
    assert shares(768)[0] < 0.8


def test_the_share_can_fail():
    assert shares(784, long_prefill_token_threshold=64)[0] < 0.95, (
        "pieces of bounded length leave rows empty at the end"
    )
