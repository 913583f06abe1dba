"""DAS's optimal budgets: the closed form against brute force, the fitted curve, and the order of budgets."""

from __future__ import annotations

import numpy as np
import pytest

from kvasir.speculation.budgets import Optimal, curve, drafted, forwards
from tests.speculation.test_lengths import sequence


def cost(lengths, alpha, k, ratio, count):
    """The makespan in units of c_tok; infinite where some sequence cannot end within ``count`` forwards."""
    if ((1 - count / lengths) >= k).any():
        return np.inf
    return ratio * count + drafted(lengths, alpha, k, count).sum()


@pytest.mark.parametrize("share", [0.5, 0.8, 1.3])
@pytest.mark.parametrize("ratio", [2.0, 20.0, 200.0])
def test_no_number_of_forwards_is_better(share, ratio):
    rng = np.random.default_rng(1)
    for _ in range(4):
        lengths, alpha = rng.lognormal(5, 1, 12), rng.uniform(0.3, 2.0, 12)
        k = share * rng.uniform(0.8, 1.2, 12)  # of each problem
        best = forwards(lengths, alpha, k, ratio)
        grid = np.linspace(lengths.max() * 1e-3, lengths.max(), 4001)
        least = min(cost(lengths, alpha, k, ratio, count) for count in grid)
        assert cost(lengths, alpha, k, ratio, best) <= least * (1 + 1e-9)
        wrong = drafted(lengths, alpha, 1 / k, best)  # k multiplies, as the paper's text has it
        accepted = k * lengths * -np.expm1(-alpha * drafted(lengths, alpha, k, best) / lengths)
        late = lengths > best
        assert accepted[late] == pytest.approx((lengths - best)[late]) and (accepted[~late] == 0).all()
        if late.any() and (1 - best / lengths < 1 / k).all():
            assert not np.allclose(wrong[late], drafted(lengths, alpha, k, best)[late])


def test_the_curve_passes_through_what_was_seen():
    by_depth = [[10_000, 7_000], [7_000, 4_900], [4_900, 3_430], [3_430, 2_401]] + [[10_000, 7_000]] * 4
    alpha, k = curve(np.array(by_depth))
    tokens = sum(0.7**d for d in range(1, 9))
    for drafts, right in ((1, 0.7), (8, tokens)):
        x, y = drafts / (1 + right), right / (1 + right)
        assert k * -np.expm1(-alpha * x) == pytest.approx(y, rel=0.01)


def test_no_sequence_needs_more_drafts_a_forward_than_it_can_have():
    lengths, alpha, k = np.array([400.0, 30.0]), np.array([0.6, 0.3]), np.array([1.4, 0.9])
    assert (drafted(lengths, alpha, k, forwards(lengths, alpha, k, 1e9)) > 8 * forwards(lengths, alpha, k, 1e9)).any()
    for ratio in (1e9, 100.0):
        count = forwards(lengths, alpha, k, ratio, most=8)
        assert (drafted(lengths, alpha, k, count) <= 8 * count * (1 + 1e-9)).all()


def test_long_sequences_get_the_drafts():
    lengths = Optimal()
    for _ in range(8):
        for prompt, length in ((1, 10), (2, 60), (3, 400)):
            lengths.ended(sequence(prompt, length))
    seqs = [sequence(prompt, 5) for prompt in (1, 2, 3)]
    assert [lengths.budget(seq, 8) for seq in seqs] == [8, 8, 8], "nothing is planned yet"
    right_by_step(lengths, seqs, [2, 8, 0, 4, 8, 1, 0, 8])
    found = {}
    for name, row in (("dear", 0.2), ("cheap", 0.002)):
        lengths.plan(seqs, lambda n, context, rows, drafted, row=row: 1.0 + row * (n + rows))
        found[name] = [lengths.budget(seq, 8) for seq in seqs]
    assert found["cheap"][0] == 0 and found["cheap"] == sorted(found["cheap"]) and found["cheap"][2] >= 4
    assert sum(found["dear"]) < sum(found["cheap"])


def test_problems_that_are_hard_to_draft_for_do_not_set_the_budgets_of_others():
    lengths = Optimal()
    for prompt, length in ((1, 100), (2, 20)) * 8:
        lengths.ended(sequence(prompt, length))
    seqs = [sequence(1, 5), sequence(2, 5)]
    right_by_step(lengths, seqs[:1], [8] * 60)
    right_by_step(lengths, seqs[1:], [0] * 60)
    assert lengths._curve(lengths._key(seqs[0]))[1] > 0.8 > 0.3 > lengths._curve(lengths._key(seqs[1]))[1]
    lengths.plan(seqs, lambda n, context, rows, drafted: 1.0 + 1e-4 * (n + rows))
    assert lengths.budget(seqs[0], 8) >= 6, "it can catch up with the short one"
    right_by_step(lengths, seqs[:1], [0] * 60)
    assert lengths._curve(lengths._key(seqs[0]))[1] < 0.3, "what was right long ago is forgotten"


def right_by_step(lengths: Optimal, seqs, accepted: list[int]) -> None:
    for seq in seqs:
        for count in accepted:
            lengths.verified(seq, 8, count)
