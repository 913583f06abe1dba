"""Every accepted draft token is reported with its drafter's name, and no other token is."""

from __future__ import annotations

from collections import Counter

import pytest

from kvasir.engine.drafts.drafting import Drafting
from tests.engine.driver import Driver

PROMPT = [300, 301, 302, 303] * 8


def names(driver: Driver, drafter_names: Counter, **params) -> list[str | None]:
    """Names by token of one request, counted into ``drafter_names``."""
    driver.outputs.clear()
    driver.run([driver.request("r", PROMPT, max_tokens=40, logprobs=0, ignore_eos=True, **params)])
    out = driver.outputs["r", 0]
    found = [entry.drafter for entry in out.logprobs]
    assert len(found) == len(out.tokens) == 40
    drafter_names.update(name for name in found if name)
    return found


def accepted(driver: Driver) -> dict[str, int]:
    return {name: right for name, (_, right) in driver.engine.stats().drafted_by.items() if right}


@pytest.mark.parametrize("drafter", ["ngram", "ngram+suffix", "token_recycling"])
def test_names_are_those_of_accepted_drafts(drafter):
    """Drafts end before ``max_tokens``, so that no accepted token is cut off, and the counts must agree."""
    driver = Driver(drafter=drafter, draft_control="fixed")
    counted: Counter = Counter()
    for seed in range(4):
        found = names(driver, counted, seed=seed, temperature=0.7)
        assert found[0] is None, "the first token follows a prompt, not a draft"
    total = accepted(driver)
    assert total and dict(counted) == total
    driver.close()


def test_drafts_of_one_token_name_every_copy(monkeypatch):
    """A bias makes every draft right: of each verified chain all tokens are named except the last, which is drawn."""
    driver = Driver(drafter="ngram", draft_control="fixed", max_draft_tokens=3)
    counted: Counter = Counter()
    found = names(driver, counted, temperature=0, logit_bias={300: 100})
    drawn = [i for i, name in enumerate(found) if name is None]
    assert len(found) - len(drawn) == counted["ngram"] == accepted(driver)["ngram"]
    gaps = {b - a for a, b in zip(drawn, drawn[1:])}
    assert gaps <= {1, 2, 3, 4} and 4 in gaps, "three drafted tokens lie between two drawn ones"
    # Negative control: naming one token too many leaves no drawn token behind a draft.
    name = Drafting._name_drafter

    def one_more(self, span, result):
        name(self, span, result)
        for entry in result.logprobs:
            entry.drafter = "ngram"

    monkeypatch.setattr(Drafting, "_name_drafter", one_more)
    wrong = names(driver, Counter(), temperature=0, logit_bias={300: 100})
    assert wrong.count(None) < found.count(None)
    driver.close()
