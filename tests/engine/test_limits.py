"""Limits that nothing else would notice: pages, rows and tokens that a sequence must not take. Each test names a mutation
of the source that it alone detects."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvasir.engine.engine import Engine
from kvasir.engine.room import MAX_PREEMPTIONS
from kvasir.engine.spans import Step
from kvasir.engine.steps import RECOVERY_STEPS, StepRunner
from kvasir.types import Plan, Status
from tests.engine.fake import FULL, expected_output, sequence, window_group
from tests.engine.scheduling import crowd, driver, rows, running, unique

EOS, STOP = 2, 9


@pytest.mark.parametrize(
    ("drawn", "params", "found"),
    [
        ([5], dict(max_tokens=4), ([5], None, None)),
        ([5, 6, 7, 8], dict(max_tokens=4), ([5, 6, 7, 8], "length", None)),
        ([5, 6, 7, 8, 3], dict(max_tokens=4), ([5, 6, 7, 8], "length", None)),
        ([5, 6, 7, STOP], dict(max_tokens=4), ([5, 6, 7, STOP], "stop", STOP)),
        ([5, 6, 7, EOS], dict(max_tokens=4), ([5, 6, 7, EOS], "stop", None)),
        ([STOP], dict(max_tokens=1), ([STOP], "stop", STOP)),
        ([5, STOP, 6], dict(max_tokens=4), ([5, STOP], "stop", STOP)),
        ([STOP, 6], dict(max_tokens=4, min_tokens=2), ([STOP, 6], None, None)),
        ([5, STOP], dict(max_tokens=4, min_tokens=2), ([5, STOP], "stop", STOP)),
        ([STOP], dict(max_tokens=1, min_tokens=2), ([STOP], "length", None)),
        ([5, EOS], dict(max_tokens=4, ignore_eos=True, stop_token_ids=(STOP, EOS)), ([5, EOS], "stop", EOS)),
        ([5], dict(max_tokens=0), ([], "length", None)),
        ([], dict(max_tokens=0), ([], None, None)),
    ],
)
def test_where_a_sequence_ends(drawn, params, found):
    """Mutation: ask for the length before the stop tokens, so that a stop token drawn last ends as ``length``."""
    max_tokens = params.pop("max_tokens")
    seq = sequence(3, max_tokens=max_tokens, **{"stop_token_ids": (STOP,)} | params)
    seq.stop_ids |= {EOS}
    assert Engine._until_stop(SimpleNamespace(_eos_ids=frozenset([EOS])), seq, drawn) == found


def test_the_row_budget_is_halved_for_some_steps_after_out_of_memory(monkeypatch):
    """Mutations: leave the budget whole; never restore it; restore it one step early or late."""
    fails = []

    def launch(plan):
        if fails:
            raise fails.pop()
        return SimpleNamespace(read=lambda: [])

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    steps = StepRunner(SimpleNamespace(launch=launch, forget=lambda: None), 64)

    def step() -> int:
        steps.launch(Plan(0, []))
        list(steps.resolve())
        return steps.max_rows

    assert step() == 64
    fails.append(torch.OutOfMemoryError("injected"))
    seq = sequence(3)
    steps.launch(Plan(0, [SimpleNamespace(seq=seq, valid=True, start=0, length=2)]))
    assert [results for _, results in steps.resolve()] == [[None]] and steps.max_rows == 32
    assert [step() for _ in range(RECOVERY_STEPS)] == [32] * (RECOVERY_STEPS - 1) + [64]


def test_pages_are_promised_to_a_prompt_admitted_in_the_same_step():
    """Mutation: do not add the pages that an admitted prompt still lacks to ``promised``."""
    d = driver(num_pages=14, page_slots=4, max_rows=16, long_prefill_token_threshold=8)
    d.add(
        unique(36, "a", arrival=0.0, max_tokens=2)
    )  # nine pages and one to go on with, of thirteen; two are taken now
    late = d.add(unique(20, "b", arrival=1.0, max_tokens=2))
    assert rows(d.step()) == {"a": 8} and late.status is Status.WAITING
    d.drain()
    assert d.scheduler.preemptions == 0
    d.assert_outputs()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_nobody_takes_pages_of_a_higher_rank(rank):
    """Mutation: ``Room.make`` looks for victims among all who run, not only among those ranked below."""
    d, seqs = crowd()
    for seq in seqs[rank:]:
        seq.num_preempted = MAX_PREEMPTIONS  # spared while there is another, but not at the cost of a higher rank
    step = Step(d.now, 64)
    assert not d.scheduler.room.make(step, seqs[rank], 4 * 30), "no pool of nine pages has thirty"
    assert step.preempted == seqs[:rank:-1] + [seqs[rank]], "from the lowest rank up, the sequence itself last"


@pytest.mark.parametrize("groups", [(FULL,), (window_group(6),), (FULL, window_group(6))])
def test_a_sequence_holds_no_more_pages_than_it_computes(groups):
    """Mutations: ``truncate`` keeps a page too many; ``grow`` takes one too many; a window keeps pages it has left."""
    d = driver([60] * len(groups), 4, groups, max_num_seqs=4)
    d.draft_length = 7
    for i in range(4):
        d.add(unique(9 + 4 * i, f"s{i}", max_tokens=30))
    while d.scheduler.has_work(0.0):
        d.step()
        for seq in d.scheduler.running:
            for pool, table in zip(d.scheduler.pages.pools, seq.tables):
                assert len(table) <= -(-seq.num_tokens // 4), f"{seq} holds look-ahead that it did not keep"
                first = 0 if pool.window is None else max(0, seq.num_computed - pool.window + 1) // 4
                assert not any(table[:first]), f"{seq} holds a page that its window has left"
    d.assert_outputs()


def test_no_draft_goes_beyond_the_context():
    """Mutation: ``trim_draft`` looks at ``max_tokens`` only, or at a limit that is one or two positions too far."""
    d = driver(max_model_len=12)
    seq = d.add(unique(5, "a", max_tokens=100))
    seq.max_output = 12 - 5
    d.step()
    right = expected_output(seq)
    for known, longest in ((6, 5), (8, 3), (10, 1), (11, 0)):
        while seq.num_tokens < known:
            d.step()
        seq.draft = right[seq.num_output : seq.num_output + longest + 1]
        plan = d.scheduler.plan(0.0)
        assert rows(plan) == {"a": 1}, "a draft that is one token too long is dropped"
        d.scheduler.complete(plan)
        seq.draft = right[seq.num_output : seq.num_output + longest]
        plan = d.scheduler.plan(0.0)
        span = plan.spans[0]
        assert span.length == 1 + longest and span.start + span.length <= 12 - (longest == 0)
        d.scheduler.complete(plan)
        seq.drop_draft()


def test_leased_pages_are_counted_down():
    """Mutations: ``Room`` does not subtract the pages of a lease that has ended, or leaves its places; ``check`` sees both."""
    d = driver(num_pages=40)
    s = d.scheduler
    for i in range(3):
        seq = d.add(unique(9, f"s{i}", max_tokens=3, lease=5.0 + i))
        while seq.status is not Status.FINISHED:
            d.step()
    assert s.room.num_leased_pages == 9
    s.room.begin(d.now + 5.5)
    assert s.room.num_leased_pages == 6
    s.check()
    s.room.begin(d.now + 100.0)
    assert s.room.num_leased_pages == 0 and not list(s.room.leased())
    s.check()
    running(d, 1)
    s.room._leased_pages[1] += 1
    with pytest.raises(AssertionError, match="leased"):
        s.check()
