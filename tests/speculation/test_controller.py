"""The controller's choices; its promise is kept in ``test_control_simulated.py``."""

from __future__ import annotations

import random

from kvasir.speculation.controller import MAX_PAUSE, START_GAIN, TRIAL_STEPS, Controller
from kvasir.speculation.tree import DraftTree


def test_the_account_stops_what_the_estimates_believe_in():
    """Predictions that always call drafts cheap: the measured times decide."""
    control = Controller(lambda seqs, context, drafts, drafted: 1.0)
    clock = steps = 0
    for _ in range(20_000):
        if control.resting() or not control.wanted(4, 100):
            control.rested(1.0)
            clock, steps = clock + 1.0, steps + 1
            continue
        trees = control.allocate([DraftTree.chain(range(4), 0.9) for _ in range(4)], 100, 100, 4)
        for tree in trees:
            control.observe(tree, [0])
        control.end_step(4, 100, 3.0)  # two tokens for the time of three
        clock, steps = clock + 3.0, steps + 2
    assert clock <= 1.02 * steps


# ------------------------------------------------------------------------------------------------------------ choices


def seconds(row_cost: float, sync: float = 0.0):
    return lambda seqs, context, drafts, drafted: 1.0 + row_cost * (seqs + drafts) + sync * drafted


def drive(control: Controller, steps: int, right: float, price, seqs: int = 4) -> list[int]:
    """Simulate steps in which each drafted token is right with probability ``right`` and steps take the predicted time.
    Returns the number of slots of each step."""
    rng, slots = random.Random(0), []
    for _ in range(steps):
        if control.resting() or not control.wanted(seqs, 100):
            control.rested(price(seqs, 100, 0, False))
            slots.append(0)
            continue
        trees = control.allocate([DraftTree.chain(range(6), 0.5) for _ in range(seqs)], 100, 1000)
        for tree in trees:
            path = []
            while len(path) < len(tree) and rng.random() < right:
                path.append(len(path))
            if len(tree):
                control.observe(tree, path)
        slots.append(sum(map(len, trees)))
        control.end_step(seqs, 100, price(seqs, 100, slots[-1], True))
    return slots


def test_good_drafts_where_rows_are_cheap_are_verified_whole():
    assert set(drive(Controller(seconds(0.001)), 200, 0.95, seconds(0.001))[100:]) == {24}


def test_bad_drafts_are_left_out_but_for_rare_trials():
    price = seconds(0.02, sync=0.1)
    control = Controller(price)
    assert control.gain is None
    slots = drive(control, 3 * MAX_PAUSE, 0.0, price)
    assert control.gain < 1.0, "what is shown says why nothing is drafted"
    drafted = sum(1 for s in slots[MAX_PAUSE:] if s)
    assert 0 < drafted <= 6 * TRIAL_STEPS, "they are tried again, at long intervals"
    assert set(drive(control, 3 * MAX_PAUSE, 0.95, price)[-100:]) != {0}, "and pay when they get better"
    assert control.gain > START_GAIN


def test_slots_follow_the_price_of_a_row():
    means = [
        sum(drive(Controller(seconds(price)), 300, 0.7, seconds(price))[100:]) for price in (0.001, 0.05, 0.15, 5.0)
    ]
    assert means == sorted(means, reverse=True) and means[0] > means[2] and means[-1] < 200


def test_the_better_sequence_gets_the_slots():
    price = seconds(0.1)
    control = Controller(price)
    drive(control, 50, 0.5, price)
    control._trial = 0
    good, bad = DraftTree.chain(range(6), 0.95), DraftTree.chain(range(6), 0.02)
    for _ in range(300):
        control.observe(good, list(range(6)))
        control.observe(bad, [])
    cut = control.allocate([bad, good], 100, 1000)
    assert len(cut[1]) == 6 and len(cut[0]) == 0
    assert len(control.allocate([bad, good], 100, 3)[1]) == 3, "never beyond the budget"


def test_in_a_large_batch_a_trial_drafts_for_a_few():
    control = Controller(seconds(0.01))
    for _ in range(100):
        if not control.resting() and control.wanted(200, 1000):
            break
        control.rested(1.0)
    assert control.trying
    steps = 0
    while control.wanted(200, 1000) and control.trying:
        steps += 1
        assert not control.wanted(200, 1000, alone=False) and control.wanted(200, 1000), (
            "prompts beside it would blur what it costs"
        )
        control.end_step(200, 1000, 4.0, known=False)
    assert 0 < steps <= TRIAL_STEPS
