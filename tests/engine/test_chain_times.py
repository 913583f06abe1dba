"""When chains pay: by the time of steps with and without them, without a model."""

import random

from kvasir.engine.drafts.chain_times import FIRST_SHARE, STALE, SURE, ChainTimes


class Steps:
    """Steps whose true times are given, run as `ChainTimes` says."""

    def __init__(self, plain: float, chains: float, noise: float = 0.1) -> None:
        self.times, self.true = ChainTimes(), {False: plain, True: chains}
        self.step, self.now, self.noise, self.random = 0, 0.0, noise, random.Random(3)

    def run(self, count: int, share: float, decodes: int = 64) -> int:
        """Run ``count`` steps. Returns the number of those with chains."""
        return sum(self._one(self.times.pays(decodes, share), decodes) for _ in range(count))

    def _one(self, chains: bool, decodes: int, captures: int = 0, more: float = 0.0) -> bool:
        self.step += 1
        self.now += self.true[chains] * (1 + self.noise * self.random.random()) + more
        self.times.launched(self.step, decodes, chains, captures)
        self.times.ended(self.step, self.now)
        return chains


def test_the_faster_way_in_tokens_a_second_wins():
    """A third of the text is forced: a step with chains gives 1.5 tokens a sequence, and may take 1.5 times as long."""
    for ratio, pays in [(1.05, True), (1.3, True), (1.8, False), (5.0, False)]:
        steps = Steps(5.6e-3, ratio * 5.6e-3)
        steps.run(50, 1 / 3)
        assert steps.run(200, 1 / 3) == 200 * pays, ratio


def test_the_share_that_is_needed_follows_the_cost():
    steps = Steps(5.6e-3, 12e-3)  # a share of 0.53 is needed
    steps.run(50, 0.7)
    assert [steps.run(20, share) for share in (0.7, 0.33, 0.7, 0.45)] == [20, 0, 20, 0]


def test_free_text_is_never_planned_with_chains():
    steps = Steps(5e-3, 6e-3)
    assert steps.run(3 * STALE, FIRST_SHARE / 2) == 0


def test_both_ways_are_measured_first_and_now_and_then():
    steps = Steps(5e-3, 6e-3)
    assert steps.run(3 * SURE, 0.7) == 2 * SURE - 1, "the first of a kind follows another kind, and tells nothing"
    first = steps.run(STALE - 2 * SURE, 0.7)
    assert first == STALE - 2 * SURE
    again = 4 * SURE - steps.run(4 * SURE, 0.7)
    assert SURE <= again <= SURE + 1, "steps without chains are measured anew"


def test_what_was_dear_once_gets_another_chance():
    steps = Steps(5e-3, 50e-3)
    steps.run(20, 0.7)
    steps.true[True] = 6e-3
    assert steps.run(STALE - 50, 0.7) == 0 and steps.run(200, 0.7) > 100


def test_sizes_are_measured_apart():
    steps = Steps(5e-3, 30e-3)
    steps.run(30, 0.5, decodes=64)
    assert not steps.times.pays(50, 0.5) and steps.times.pays(1, 0.5)


def test_captures_outliers_and_steps_with_prompts_tell_nothing():
    steps = Steps(5e-3, 6e-3, noise=0.0)
    steps.run(60, 0.7)
    before = steps.times._mean(True, 64)
    steps._one(True, 64, captures=1, more=9.0)
    steps._one(True, 0, captures=1, more=9.0)
    steps._one(True, 64, captures=1)
    assert steps.times._mean(True, 64) == before
    steps._one(True, 64, captures=1, more=9.0)
    assert before < steps.times._mean(True, 64) < 1.03 * before
    steps.times.ended(10**6, steps.now)  # a step that was launched while no grammar ran


def test_a_rule_that_forgets_the_price_is_seen():
    """Negative control: by the share alone, chains are planned where they cost twice what they save."""
    steps = Steps(5.6e-3, 12e-3)
    steps.times.pays = lambda decodes, share: share >= FIRST_SHARE
    assert steps.run(200, 1 / 3) == 200
