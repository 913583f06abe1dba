"""Prompt tokens count when they have been computed, once a request."""

from __future__ import annotations

import pytest

from tests.engine.driver import Driver

PROMPT = list(range(5, 105))


@pytest.fixture(scope="module")
def driver():
    found = Driver(max_num_batched_tokens=32)
    yield found
    found.close()


def test_a_prompt_that_waits_or_is_half_read_does_not_count(driver):
    before = driver.engine.stats().prompt_tokens
    driver.submit(driver.request("a", PROMPT, max_tokens=4))
    assert driver.engine.stats().prompt_tokens == before, "it waits"
    driver.step()
    assert driver.engine.stats().prompt_tokens == before, "32 of its 100 tokens were read"
    driver.run([])
    assert driver.engine.stats().prompt_tokens == before + len(PROMPT)


def test_branches_share_their_prompt(driver):
    before = driver.engine.stats().prompt_tokens
    driver.run([driver.request("b", PROMPT[:-1] + [200], n=3, temperature=1.0, seed=1, max_tokens=8)])
    assert driver.engine.stats().prompt_tokens == before + len(PROMPT)
