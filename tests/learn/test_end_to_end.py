"""The whole way, with a real engine, a real trainer's process and real traffic: random weights are replaced by learned
ones that draft better, and no token changes."""

from __future__ import annotations

import time

import pytest

from kvasir import LLM, SamplingParams
from kvasir_lab.lookup import load_task

SECONDS = 600  # until a version must be served; some 200 on two cores


@pytest.mark.slow
def test_a_learned_version_is_served_and_changes_no_token():
    prompts = [problem.prompt for problem in load_task("chain").problems("train", 3, 800)]
    params = SamplingParams(temperature=0.0, max_tokens=48)
    given = {"batch_invariant": True, "max_num_seqs": 8, "num_threads": 1}
    learns = {"drafter": "eagle:model=new", "learn": "on:every=25", "learn_tenants": ("all",)}
    with LLM("nano", **given) as plain:
        known = [output.outputs[0].token_ids for output in plain.generate(prompts[:8], params)]
    with LLM("nano", draft_control="fixed", **given, **learns) as llm:
        until, at, first = time.monotonic() + SECONDS, 8, 0.0
        while time.monotonic() < until:
            at = at + 8 if at + 16 <= len(prompts) else 8
            llm.generate(prompts[at : at + 8], params)
            stats = llm.engine.stats()
            first = first or stats.generation_tokens / stats.forwards
            if stats.learning.accepted or stats.learning.ended:
                break
        assert stats.learning.accepted and not stats.learning.ended, stats.learning
        before = stats.generation_tokens, stats.forwards  # the counters go on in place
        assert [output.outputs[0].token_ids for output in llm.generate(prompts[:8], params)] == known
        last = llm.engine.stats()
        drafted = (last.generation_tokens - before[0]) / (last.forwards - before[1])
    assert drafted > 1.05 * first, "the learned weights do not draft better than random ones"
