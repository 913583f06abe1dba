"""Drafts near the end of the context, through the whole engine: as long as they fit, and never further than that."""

from __future__ import annotations

import pytest

from tests.engine.driver import Driver

CONTEXT, MOST = 64, 6
ONLY = 300  # a bias lets nothing but this token be drawn, so every draft of it is right


def record(driver: Driver) -> list[tuple[int, int, int]]:
    """(known tokens, tokens of the draft, rows that the scheduler grants) of every decode."""
    found, plan = [], driver.engine.scheduler.plan

    def recorded(*args):
        before = {seq: len(seq.draft) for seq in driver.engine.scheduler.running if seq.num_output}
        made = plan(*args)
        for span in made.spans:
            assert span.start + span.length <= CONTEXT
            if span.seq in before:
                found.append((span.seq.num_tokens, before[span.seq], span.length))
        return made

    driver.engine.scheduler.plan = recorded
    return found


@pytest.mark.parametrize("max_tokens", [None, 20], ids=["context", "max_tokens"])
def test_drafts_fill_what_is_left_and_no_more(max_tokens):
    """Mutations: ``Drafting.propose`` lets a draft reach the end of the context or of the output, where the scheduler
    has to drop it; it drafts nothing, or too little, near the end; the scheduler drops drafts that fit."""
    driver = Driver(drafter="ngram", draft_control="fixed", max_draft_tokens=MOST, max_model_len=CONTEXT)
    found = record(driver)
    for extra in range(MOST + 2):  # so that the end comes at every distance from a draft
        name, length = f"r{extra}", 24 + extra
        found.clear()
        prompt = [ONLY] * length
        driver.run(
            [
                driver.request(
                    name, prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True, logit_bias={ONLY: 100}
                )
            ]
        )
        end = CONTEXT if max_tokens is None else length + max_tokens
        out = driver.outputs[name, 0]
        assert (out.tokens, out.finish_reason) == ([ONLY] * (end - length), "length")
        assert found
        for known, drafted, rows in found:
            assert drafted == min(MOST, end - known - 1), (
                "the draft leaves a place for the token that its last row draws"
            )
            assert rows == 1 + drafted, "the scheduler found no draft too long"
    driver.close()
