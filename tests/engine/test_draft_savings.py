"""Time saved, tokens for each forward, and acceptance by drafter and depth: by arithmetic, and in a run."""

from __future__ import annotations

import pytest

from kvasir.api.http.metrics import Metrics
from kvasir.engine.drafts.draft_savings import Savings
from kvasir.engine.drafts.drafting import MAX_FAILURES
from tests.speculation.helpers import driver, requests


def test_what_plain_steps_would_have_taken_less_what_was_spent():
    saved = Savings(lambda decodes, context: 0.010 if decodes == 4 else None)
    saved.drafted(2, 50, 5, 0.001)  # no plain step of this sort was measured
    saved.behind(4, 100, 0.030)
    assert saved.seconds is None
    saved.drafted(4, 100, 11, 0.012)  # six right drafts: the tokens of 2.5 plain steps
    assert saved.seconds == pytest.approx(0.025 - 0.012)
    saved.drafted(0, 0, 20, 0.500)  # the step also computes a prompt
    saved.behind(4, 100, 0.013)
    assert saved.seconds == pytest.approx(0.025 - 0.012 - 0.003)
    saved.behind(4, 100, 1.0)  # something else happened
    assert saved.seconds == pytest.approx(0.025 - 0.012 - 0.003 - 0.010)
    saved.drafted(4, 100, 20, 0.040)  # no draft was right
    assert saved.seconds == pytest.approx(-0.030)


def test_a_run_counts_forwards_and_crosses_depth_with_drafter():
    d = driver("ngram:min_match=1+suffix:min_match=1")
    d.run(requests(d, 0.0, 2))
    stats = d.engine.stats()
    assert (
        stats.accepted_tokens > 10
        and stats.forwards + stats.accepted_tokens >= stats.generation_tokens > stats.forwards
    )
    assert set(stats.drafted_by_depth) == set(stats.drafted_by) and len(stats.drafted_by) == 2
    for depth, counts in enumerate(stats.accepted_by_depth):
        assert counts == [
            sum(of[depth][i] for of in stats.drafted_by_depth.values() if depth < len(of)) for i in (0, 1)
        ]
    assert {name: sum(right for _, right in of) for name, of in stats.drafted_by_depth.items()} == {
        n: c[1] for n, c in stats.drafted_by.items()
    }
    assert stats.draft_saved_seconds is None, "every step drafts: nothing is known of plain ones"
    page = Metrics().render(stats, "nano").decode()
    assert (
        f"kvasir:tokens_per_forward {stats.generation_tokens / stats.forwards}" in page
        and "draft_saved_seconds" not in page
    )
    assert 'kvasir:draft_tokens_by_drafter_and_depth_total{drafter="suffix",position="0",right="yes"}' in page
    d.close()


def test_a_run_that_also_decodes_without_drafts_knows_what_was_saved():
    """If every step takes the same time, the saving is the steps that were not needed."""
    d, now = driver("replay", max_num_seqs=4), [0.0]
    drafting, step = d.engine.proposals.drafting, d.engine.step
    drafting._clock = lambda: now[0]

    def timed():
        now[0] += 0.010
        return step()

    d.engine.step = timed
    drafting._failures = MAX_FAILURES  # the drafter is off
    given = requests(d, 0.0, max_tokens=40)
    d.run(given)
    plain = d.engine.stats().step
    drafting._failures = 0
    drafting.drafter.load({tuple(r.prompt_ids): d.outputs[r.id, 0].tokens for r in given}, 1)
    d.run(requests(d, 0.0, tag="again", max_tokens=40))
    stats = d.engine.stats()
    assert stats.accepted_tokens > 100
    assert stats.draft_saved_seconds == pytest.approx(0.010 * (2 * plain - stats.step), rel=0.1)
    assert "kvasir:draft_saved_seconds " in Metrics().render(stats, "nano").decode()
    d.close()
