"""Forced chains: text that a grammar forces comes in one step, with plain decoding's tokens and log-probabilities."""

from __future__ import annotations

import json
from itertools import cycle

import pytest

from kvasir.decoding.matcher import Matcher
from kvasir.engine.drafts.chain_times import FIRST_SHARE
from kvasir.types import Grammar
from tests.engine.driver import Driver

SCHEMA = {
    "type": "object",
    "properties": {
        "the first rather long key": {"enum": ["alpha", "beta"]},
        "another key that is long": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["the first rather long key", "another key that is long"],
    "additionalProperties": False,
}
FORCED = Grammar("regex", "[ab]{2} the whole tail is fixed text, and long [0-9] end")
KINDS = [
    dict(grammar=Grammar("json_schema", json.dumps(SCHEMA))),
    dict(grammar=FORCED, logprobs=2),
    dict(grammar=FORCED, temperature=0, logprobs=1, logprobs_mode="processed"),
    dict(grammar=FORCED, repetition_penalty=1.2, frequency_penalty=0.3),
    dict(grammar=FORCED, max_tokens=7),
    dict(grammar=FORCED, stop_token_ids=list(range(260, 760, 4))),
    dict(grammar=FORCED, n=3),
    dict(top_p=0.9),
    dict(grammar=Grammar("regex", "[a-z ]{5,20}")),
]


def fleet(driver: Driver, kinds: list[dict] = KINDS):
    for i, kind in enumerate(kinds):
        prompt = [300 + (7 * i + 3 * j) % 900 for j in range(3 + 5 * i)]
        yield driver.request(f"r{i}", prompt, **(dict(temperature=1.0, max_tokens=80, seed=i) | kind))


def outcome(driver: Driver) -> dict:
    assert not driver.errors
    return {key: (out.tokens, out.finish_reason, out.logprobs) for key, out in driver.outputs.items()}


@pytest.fixture(scope="module")
def plain():
    """Outputs of each request alone, one token a step."""
    driver = Driver(overlap=False)
    driver.engine.proposals.forcing.wanted = lambda drafting: False
    for request in fleet(driver):
        driver.run([request])
    assert driver.engine.stats().forced_tokens == 0
    assert driver.engine.stats().forwards == driver.engine.stats().generation_tokens
    return outcome(driver)


def by_share(driver: Driver) -> Driver:
    """The driver, whose engine measures no times, so that how busy this machine is decides about no step."""
    driver.engine.proposals.forcing.times.ended = lambda step, now: None
    return driver


HOW = {
    "alone": dict(),
    "overlap": dict(overlap=True),
    "graphs": dict(overlap=True, static=True),
    "pieces": dict(overlap=True, pieces=True),
    "few rows": dict(max_num_batched_tokens=9),
    "drafter": dict(drafter="ngram", draft_control="fixed"),
    "static drafter": dict(drafter="ngram", draft_control="fixed", static=True),
}


@pytest.mark.parametrize("how", HOW)
def test_tokens_and_logprobs_are_those_of_plain_decoding(how, plain):
    driver = by_share(Driver(**HOW[how]))
    driver.run(list(fleet(driver)), gap=1)
    assert outcome(driver) == plain
    stats = driver.engine.stats()
    if how != "few rows":
        assert stats.forced_tokens > 0.3 * stats.generation_tokens
    assert stats.forwards <= stats.generation_tokens - stats.forced_tokens
    driver.close()


@pytest.mark.parametrize("static", [False, True])
def test_steps_with_chains_and_without_may_take_turns(static, plain):
    driver, turns = Driver(overlap=True, static=static), cycle([True, True, False, True, False, False])
    driver.engine.proposals.forcing.times.pays = lambda decodes, share: next(turns)
    driver.run(list(fleet(driver)), gap=1)
    assert outcome(driver) == plain and driver.engine.stats().forced_tokens > 20
    driver.close()


def test_preemption_and_chunks_change_nothing(plain):
    driver = Driver(max_num_batched_tokens=32)
    driver.run(list(fleet(driver)), preempt_every=3)
    assert outcome(driver) == plain
    driver.close()


def test_a_run_costs_one_step(plain):
    driver = Driver()
    [request] = fleet(driver, KINDS[1:2])
    driver.run([request])
    found = driver.outputs["r0", 0]
    # Two free letters, a digit, and EOS are drawn; every run comes with the draw behind it.
    assert driver.engine.stats().forwards <= 5 < len(found.tokens) / 3
    driver.close()


@pytest.mark.parametrize("extra", [0, 1])
def test_a_run_one_token_too_long_is_seen(monkeypatch, plain, extra):
    """Negative control: with one more token than the grammar forces, the output is not that of plain decoding."""
    found = Matcher.forced

    def longer(self):
        run = found(self)
        twin = self.copy()
        if not run or not extra or not twin.accept(run):
            return run
        return [*run, 300]

    monkeypatch.setattr(Matcher, "forced", longer)
    driver = Driver()
    driver.run(list(fleet(driver, KINDS[:2])))
    right = not driver.errors and outcome(driver) == {key: plain[key] for key in [("r0", 0), ("r1", 0)]}
    assert right == (not extra)
    driver.close()


def test_reading_first_follows_the_share_of_forced_text():
    """Free text is decoded without reading first, and chains come back with the text that is forced."""
    driver = by_share(Driver(overlap=True))
    forcing = driver.engine.proposals.forcing
    driver.run(list(fleet(driver, [dict(grammar=Grammar("regex", "[a-z ]{120}"), max_tokens=130)])))
    assert forcing.num_forced == 0 and not forcing._share >= FIRST_SHARE
    tail = Grammar("regex", "[a-z]{3}" + " the tail of it is fixed," * 8)
    driver.run([driver.request("tail", [301, 302, 303], grammar=tail, max_tokens=200)])
    assert forcing.num_forced > 10 and forcing._share >= FIRST_SHARE
    driver.close()
