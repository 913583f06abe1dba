"""Scores of a text do not depend on the prefix cache, the chunks, or where they start around page borders."""

from __future__ import annotations

import math

import pytest

from kvasir.decoding.confidence import summed_up
from tests.engine.driver import Driver

PAGE, LENGTH, K, WINDOW = 16, 70, 5, 8
PROMPT = [3 + i * i % 61 for i in range(LENGTH)]
OFFSETS = sorted({1, 2, LENGTH - 1, *(b * PAGE + d for b in range(1, 5) for d in (-1, 0, 1, 2))})


def score(driver: Driver, name: str, at: int, *, tenant: str = "", prompt=PROMPT, **params):
    request = driver.request(
        name,
        prompt,
        max_tokens=1,
        temperature=0.0,
        **{"score_from": at, "confidence": K, "confidence_window": WINDOW} | params,
    )
    request.max_tokens, request.tenant = 0, tenant
    driver.run([request])
    return driver.outputs[name, 0]


@pytest.fixture(scope="module")
def driver():
    d = Driver()
    yield d
    d.close()


@pytest.fixture(scope="module")
def whole(driver):
    """Every token's own entry, from the list that the scalar sums up."""
    request = driver.request("whole", PROMPT, max_tokens=1, prompt_logprobs=K, confidence=K)
    request.tenant = "alone"
    driver.run([request])
    entries = driver.outputs["whole", 0].prompt_logprobs
    assert entries[0] is None and all(
        math.isclose(e.confidence, -sum(p for _, p in e.top) / K, rel_tol=1e-6) for e in entries[1:]
    )
    return entries


@pytest.mark.parametrize("at", OFFSETS)
def test_cold_and_warm_say_the_same(driver, whole, at):
    sure = [e.confidence for e in whole[at:]]
    cold = score(driver, f"cold{at}", at, tenant=f"t{at}")
    warm = score(driver, f"warm{at}", at, tenant=f"t{at}")
    assert cold.num_cached == 0 and warm.num_cached == (at - 1) // PAGE * PAGE, (
        "the row before the first scored token must run again"
    )
    for found in (cold.score, warm.score):
        assert found.tokens == LENGTH - at
        assert found.logprob == sum(e.logprob for e in whole[at:])
        assert (found.confidence, found.lowest) == summed_up(sure, WINDOW)
    assert cold.finish_reason == "length" and cold.prompt_logprobs is None and not cold.tokens


def test_only_scored_rows_pass_the_head(driver):
    """A cached prompt whose last ten tokens are scored sends ten rows through the head, and the row that draws."""
    seen = []
    model, before = driver.engine.runner.model, driver.engine.runner.model.logits
    model.logits = lambda hidden: (seen.append(len(hidden)), before(hidden))[1]
    try:
        score(driver, "rows", LENGTH - 10)
    finally:
        del model.logits
    assert sum(seen) == 11


@pytest.mark.parametrize("options", [dict(max_num_batched_tokens=16), dict(max_num_batched_tokens=24, overlap=True)])
def test_chunks_and_preemption_change_nothing(whole, options):
    d = Driver(**options)
    try:
        for at in (1, 17, 40):
            request = d.request(f"r{at}", PROMPT, max_tokens=1, score_from=at, confidence=K, confidence_window=WINDOW)
            d.run([request], preempt_every=2)
            found = d.outputs[f"r{at}", 0].score
            assert (found.tokens, found.logprob) == (LENGTH - at, sum(e.logprob for e in whole[at:]))
            assert (found.confidence, found.lowest) == summed_up([e.confidence for e in whole[at:]], WINDOW)
    finally:
        d.close()


def test_decoding_gives_the_confidence_that_scoring_gives(driver):
    request = driver.request("draw", PROMPT, max_tokens=24, seed=5, confidence=K, n=2, ignore_eos=True)
    driver.run([request])
    for branch in range(2):
        drawn = driver.outputs["draw", branch]
        assert all(e.top == [] for e in drawn.logprobs), "one number a token, no list"
        found = score(driver, f"again{branch}", LENGTH, prompt=PROMPT + drawn.tokens).score
        assert found.logprob == pytest.approx(sum(e.logprob for e in drawn.logprobs), rel=1e-6)
        assert (found.confidence, found.lowest) == pytest.approx(
            summed_up([e.confidence for e in drawn.logprobs], WINDOW), rel=1e-6
        )


def test_a_score_without_confidence(driver, whole):
    found = score(driver, "plain", 33, confidence=0, confidence_window=0).score
    assert found.confidence is None is found.lowest and found.logprob == sum(e.logprob for e in whole[33:])


def test_confidence_changes_no_token(driver):
    for name, params in (("without", {}), ("with", dict(confidence=20))):
        driver.run([driver.request(name, PROMPT, max_tokens=20, seed=8, **params)])
    assert driver.outputs["with", 0].tokens == driver.outputs["without", 0].tokens
