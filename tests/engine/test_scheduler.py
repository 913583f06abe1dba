"""The scheduler's rules, one by one: spans, the budget of a step, and that its checks can fail."""

from __future__ import annotations

import pytest

from kvasir.config import SchedulerConfig
from kvasir.engine.schedule.schedulers.priority import Config, Priority
from kvasir.types import Sequence, Status
from tests.engine.fake import expected_output, request, sequence
from tests.engine.scheduling import driver, rows, running, unique

# ------------------------------------------------------------------------------------------------------------ spans


def test_a_prompt_is_computed_in_chunks_that_end_at_pages_and_then_decodes():
    d = driver(max_rows=10)
    seq = d.add(unique(23, "a", max_tokens=3))
    spans = [d.step().spans[0] for _ in range(5)]
    assert [(s.start, s.length) for s in spans] == [(0, 8), (8, 8), (16, 7), (23, 1), (24, 1)]
    assert [dict(s.want) for s in spans] == [
        {},
        {},
        {"sample": range(6, 7)},
        {"sample": range(1)},
        {"sample": range(1)},
    ]
    assert seq.finish_reason == "length" and seq.output == expected_output(seq) and not d.scheduler.has_work(0)


def test_a_budget_below_a_page_still_gets_on():
    d = driver(max_rows=3, page_slots=8)
    d.add(unique(20, "a", max_tokens=2))
    assert [d.step().num_rows for _ in range(4)] == [3, 3, 2, 3]
    d.drain()
    d.assert_outputs()


def test_long_prompts_are_bounded_a_step():
    d = driver(max_rows=32, long_prefill_token_threshold=8)
    d.add(unique(20, "a"))
    d.add(unique(20, "b"))
    assert rows(d.step()) == {"a": 8, "b": 8}


def test_a_draft_is_verified_in_one_span():
    d = driver()
    seq = d.add(unique(5, "a", max_tokens=20))
    d.step()
    right = expected_output(seq)
    seq.draft = [*right[1:3], (right[3] + 1) % 7, 0, 0, 0, 0, 0]
    span = d.step().spans[0]
    assert (span.start, span.length, span.commit, dict(span.want)) == (5, 9, "walk", {"sample": range(9)})
    assert seq.output == right[:4] and seq.num_computed == seq.num_tokens - 1 and seq.draft == []
    assert len(seq.tables[0]) == 3, "nine tokens; the look-ahead page of a rejected draft went back"
    d.drain()
    d.assert_outputs()


@pytest.mark.parametrize(("emitted", "computed"), [([1], 6), ([1, 2], 7), ([1, 2, 3, 4], 9), ([], 5)])
def test_advance_keeps_what_was_accepted(emitted, computed):
    d = driver()
    seq = d.add(unique(5, "a", max_tokens=20))
    d.step()
    assert seq.num_computed == 5
    seq.draft = [1, 2, 3]
    plan = d.scheduler.plan(0.0)
    d.scheduler.advance(plan.spans[0], emitted)
    assert seq.num_computed == computed and seq.num_output == 1 + len(emitted)
    d.scheduler.complete(plan)
    d.scheduler.check()


def test_advance_refuses_more_tokens_than_rows():
    d = driver()
    d.add(unique(5, "a"))
    plan = d.scheduler.plan(0.0)
    with pytest.raises(AssertionError):
        d.scheduler.advance(plan.spans[0], [1, 2])


def test_advance_refuses_a_span_whose_sequence_ended_meanwhile():
    d = driver()
    seq = d.add(unique(5, "a"))
    plan = d.scheduler.plan(0.0)
    d.scheduler.finish(seq, "cancelled")
    assert not plan.spans[0].valid
    with pytest.raises(AssertionError):
        d.scheduler.advance(plan.spans[0], [3])
    assert seq.num_output == 0 and seq.finish_reason == "cancelled"
    d.scheduler.complete(plan)
    d.scheduler.check()


def test_a_draft_never_goes_beyond_the_end():
    d = driver(max_model_len=12)
    a, b = d.add(unique(5, "a", max_tokens=4)), d.add(unique(8, "b", max_tokens=100))
    d.step()
    a.draft, b.draft = [1, 1], [1, 1]
    plan = d.scheduler.plan(0.0)
    assert rows(plan) == {"a": 3, "b": 3}
    d.scheduler.complete(plan)
    a.draft, b.draft = [1, 1, 1], [1, 1, 1]
    assert rows(d.scheduler.plan(0.0)) == {"a": 1, "b": 1}


@pytest.mark.parametrize("room", range(5))
@pytest.mark.parametrize("busy", [False, True], ids=["only decodes", "with a prompt"])
def test_a_draft_ends_with_the_context(room, busy):
    """Mutations: ``trim_draft`` lets a draft go one token too far; it only looks at ``max_tokens``; it drops drafts
    that fit.

    ``room``: number of tokens that still fit the context.
    """
    for length in range(1, 7):
        d = driver(max_model_len=20, num_pages=80)
        seq = d.add(unique(19 - room, "a", max_tokens=100))
        d.step()
        assert d.scheduler.max_model_len - seq.num_tokens == room
        if busy:
            d.add(unique(30, "prompt", arrival=1.0))
        seq.draft = [1] * length
        plan = d.scheduler.plan(0.0)
        spans = [span for span in plan.spans if span.seq is seq]
        # Each row draws a token, and the last one drawn must still be in the context.
        assert [span.length for span in spans] == [1 + length if length < room else 1] or room == 0 and not spans
        assert all(span.start + span.length < d.scheduler.max_model_len for span in spans) or not room
        d.scheduler.complete(plan)
        d.scheduler.check()


@pytest.mark.parametrize("room", range(1, 6))
def test_guests_end_with_the_context(room):
    """Mutation: ``trim_draft`` does not look at the context for guests, whose slots would lie beyond the last page."""
    for length in range(1, 6):
        d = driver(max_model_len=20, num_pages=80)
        seq = d.add(unique(19 - room, "a", max_tokens=100))
        d.step()
        seq.guests = {-1: (tuple(range(length)),)}
        plan = d.scheduler.plan(0.0)
        (span,) = plan.spans
        assert span.start + span.length <= d.scheduler.max_model_len
        assert len(span.guests) == (length if length <= room else 0)
        d.scheduler.complete(plan)
        d.scheduler.check()


def test_prompt_rows_are_scored_once():
    d = driver(max_rows=8)
    seq = d.add(unique(19, "a", prompt_logprobs=0, max_tokens=2))
    wants = [dict(d.step().spans[0].want) for _ in range(4)]
    assert wants == [
        {"score": range(8)},
        {"score": range(8)},
        {"score": range(2), "sample": range(2, 3)},
        {"sample": range(1)},
    ]
    assert seq.state["num_scored"] == 18


def test_scoring_takes_no_hit_but_what_was_scored_before_a_preemption():
    d = driver(max_rows=8)
    d.add(sequence(19, name="first", max_tokens=1))
    d.drain()
    seq = d.add(sequence(19, name="scored", prompt_logprobs=0))
    assert d.step().spans[0].start == 0 and seq.num_cached == 0
    d.step()
    d.scheduler.block(seq)  # loses its pages, as in a preemption
    d.scheduler.unblock(seq)
    span = d.step().spans[0]
    assert (span.start, dict(span.want)) == (16, {"score": range(2), "sample": range(2, 3)})


def test_a_replayed_sequence_computes_its_output_as_a_prompt():
    d = driver()
    fresh = sequence(5, max_tokens=9)
    replay = request(5, max_tokens=9)
    replay.emitted = [expected_output(fresh)[:4]]
    seq = d.add(Sequence(replay))
    assert dict(d.step().spans[0].want) == {"sample": range(8, 9)}
    d.drain()
    assert seq.output == expected_output(fresh)


# ----------------------------------------------------------------------------------------------------------- budget


def test_drafts_yield_before_a_decode_stalls():
    d = driver(max_rows=6)
    seqs = running(d, 4)
    for seq in seqs:
        seq.draft = [0, 0]
    assert sorted(rows(d.step()).values()) == [1, 1, 1, 3]


def test_max_rows_of_one_step():
    d = driver(max_rows=20)
    running(d, 4)
    d.add(unique(30, "p"))
    assert rows(d.step(max_rows=8)) == {"d0": 1, "d1": 1, "d2": 1, "d3": 1, "p": 4}
    assert d.step().num_rows == 20
    assert d.step(max_rows=2).num_rows == 2


def test_with_prompts_first_decodes_sit_out_while_prompts_fill_whole_steps():
    d = driver(num_pages=80, max_rows=20)
    d.scheduler.prompts_first = True
    for i in range(5):
        d.add(unique(10, f"p{i}", arrival=float(i), max_tokens=3))
    assert [rows(d.step()) for _ in range(4)] == [
        {"p0": 10, "p1": 10},
        {"p2": 10, "p3": 10},
        {"p4": 10, **{f"p{i}": 1 for i in range(4)}},
        {f"p{i}": 1 for i in range(5)},
    ], "a step that prompts do not fill takes the decodes along"
    d.drain()
    d.assert_outputs()


def test_with_prompts_first_decodes_go_on_where_prompts_find_no_pages_or_seats():
    for options in ({"num_pages": 18}, {"max_num_seqs": 2, "num_pages": 80}):
        d = driver(max_rows=20, **options)
        running(d, 2, length=9)
        d.scheduler.prompts_first = True
        for i in range(4):
            d.add(unique(60, f"p{i}", max_tokens=2))
        assert sum({"d0", "d1"} <= set(rows(d.step())) for _ in range(8)) >= 4, options
        d.drain()
        d.assert_outputs()


def test_with_prompts_first_decodes_do_not_sit_out_for_prompts_that_are_there():
    """A branch computes one row of its prompt and a cache hit leaves less than a page: neither fills a step."""
    d = driver(num_pages=80, max_rows=16, max_num_seqs=3)
    d.scheduler.prompts_first = True
    shared = request(42, n=5, max_tokens=9)
    branches = [Sequence(shared, b) for b in range(5)]
    for seq in branches:
        seq.parent = branches[0] if seq.branch else None
        d.add(seq)
    again = d.add(sequence(42, name="again", arrival=1.0))
    while not branches[2].num_output:
        d.step()
    for seq in branches[1:4]:
        d.scheduler.finish(seq, "stop")
        assert len(d.step().spans) == 3, "two decodes and the sequence that took the seat"
    assert again.num_cached == 40
    d.drain()
    d.assert_outputs()


def test_decodes_without_a_row_come_first_next_time():
    d = driver()
    running(d, 5)
    served = [set(rows(d.step(max_rows=2))) for _ in range(30)]
    assert served[:3] == [{"d0", "d1"}, {"d2", "d3"}, {"d4", "d0"}]
    assert all(set().union(*served[i : i + 4]) == set(served[0] | served[1] | {"d4"}) for i in range(26)), (
        "nobody waits four steps"
    )


def test_the_oldest_prompt_has_a_claim_once_it_has_waited():
    d = driver(num_pages=80, max_rows=40, max_num_seqs=8)
    seqs = running(d, 4)

    def fill() -> None:
        for seq in seqs:
            seq.draft = [0] * 9  # decodes and drafts alone fill the budget

    d.add(unique(30, "old", arrival=0.0))
    fill()
    assert "old" not in rows(d.step())
    d.now = 0.9
    fill()
    assert "old" not in rows(d.step())
    d.now = 1.1
    fill()
    plan = rows(d.step())
    assert plan["old"] >= 4 and len(plan) == 5, "a page of rows, and no decode stalls"


def test_the_claim_is_a_tenth_and_never_more_than_half():
    d = driver(num_pages=200, page_slots=2, max_rows=40, max_num_seqs=32)
    running(d, 30)
    d.now = 5.0
    d.add(unique(60, "old", arrival=0.0))
    d.step()
    seqs = [s for s in d.scheduler.running if s.request.id != "old"]
    for seq in seqs:
        seq.draft = [0]
    assert rows(d.step())["old"] >= 4
    assert rows(d.step(max_rows=10)).get("old", 0) >= 1
    assert rows(d.step(max_rows=1)).keys() != {"old"}, "with one row there is no claim"
    assert 0 < rows(d.step(max_rows=4))["old"] <= 2


def test_rows_kept_for_a_prompt_that_cannot_start_go_to_decodes():
    d = driver(num_pages=16, max_rows=4)
    running(d, 4)
    d.now = 5.0
    d.add(unique(40, "big", arrival=0.0))
    assert rows(d.step()) == {"d0": 1, "d1": 1, "d2": 1, "d3": 1}


def test_a_low_ranked_prompt_gets_its_claim_and_no_more():
    d = driver(num_pages=400, max_rows=40, policy=Priority(Config()), long_prefill_token_threshold=32)
    d.add(unique(600, "low", priority=5, arrival=0.0))
    d.step()
    d.now = 3.0
    d.add(unique(600, "high", priority=0, arrival=2.9))
    d.step()
    assert rows(d.step()) == {"low": 8, "high": 32}
    d.scheduler.config = SchedulerConfig(max_num_seqs=8)
    assert rows(d.step()) == {"low": 4, "high": 36}, "a page (or a tenth, here the same) is kept for the oldest"


def test_mixed_steps_are_rounded_down_to_a_tile():
    def plan_with(budget: int, prompt: int, num_decodes: int = 3):
        d = driver(num_pages=400, max_rows=budget)
        if num_decodes:
            running(d, num_decodes)
        d.add(unique(prompt, "p"))
        return rows(d.step())

    assert plan_with(256, 1000)["p"] == 124, "3 + 252 rows would touch a second tile for 127 of them"
    assert plan_with(256, 200)["p"] == 200, "a prompt that can end in this step does"
    assert plan_with(250, 1000)["p"] == 244, "a budget that is not a multiple of the tile is used as it is"
    assert plan_with(256, 1000, 0)["p"] == 256
    assert plan_with(128, 1000)["p"] == 124, "never rounded down to nothing"


def test_rounding_leaves_the_oldest_prompt_its_claim():
    d = driver(num_pages=400, max_rows=256, max_num_seqs=120, long_prefill_token_threshold=40)
    running(d, 110, length=2)
    d.add(unique(500, "p", arrival=0.0))
    assert rows(d.step())["p"] == 16, "110 + 40 rows are 22 beyond a tile"
    d.now = 3.0
    assert rows(d.step())["p"] == 40


# ----------------------------------------------------------------------------------------------- the checks can fail


def lose_a_seat(s, seq):
    s.free_seats.pop()


def wrong_status(s, seq):
    seq.status = Status.WAITING


def forget(s, seq):
    s.running.discard(seq)


def miscount(s, seq):
    s.backlog.prompt_tokens += 1


def compute_too_much(s, seq):
    seq.num_computed = seq.num_tokens


def free_its_pages(s, seq):
    s.pages.release(seq)


@pytest.mark.parametrize("damage", [lose_a_seat, wrong_status, forget, miscount, compute_too_much, free_its_pages])
def test_check_sees(damage):
    d = driver()
    seq = d.add(unique(9, "a"))
    d.step()
    damage(d.scheduler, seq)
    with pytest.raises(AssertionError):
        d.scheduler.check()
