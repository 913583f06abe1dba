"""Which bucket and form a decode step runs in: by arithmetic, without a model."""

from types import SimpleNamespace

import pytest

from kvasir.decoding.sampler import StepOutput
from kvasir.engine.schedule.spans import ONE_SAMPLE
from kvasir.engine.ways.capture import EAGER_STEPS
from kvasir.engine.ways.graph_buckets import DECODES, DRAFT_ROWS, ROW_BY_ROW, STAND_INS, Buckets, GraphKey, buckets

DRAWS, REPORTS = StepOutput.DRAWS, StepOutput.REPORTS


def span(length: int = 1, parents=None, guests=()):
    want = ONE_SAMPLE if length == 1 else {"sample": range(length - len(guests))}
    return SimpleNamespace(length=length, want=want, parents=parents, guests=list(guests))


@pytest.mark.parametrize("most", [1, 3, 8, 20, 256, 300, 640])
def test_sizes_ascend_to_the_largest(most):
    sizes = buckets(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most
    assert all(b <= 2 * a or b - a <= 32 for a, b in zip(sizes, sizes[1:]))


def test_prompts_and_too_many_rows_are_refused():
    choice = Buckets((), 4, 0)
    assert choice.takes([span()] * 4) and not choice.takes([span()] * 5)
    assert not choice.takes([SimpleNamespace(length=9, want={"sample": range(8, 9)}, parents=None, guests=[])])


def test_the_form_is_the_smallest_that_holds_the_longest_span():
    choice = Buckets((16, 64), 8, 15)
    assert choice.usual_form == 16
    assert [choice.form([span(), span(n)]) for n in (1, 2, 16, 17, 64)] == [DECODES, 16, 16, 64, 64]
    assert choice.form([span(65)]) == ROW_BY_ROW and choice.form([span(65, parents=[-1])]) is None
    assert choice.form([span(DRAFT_ROWS + 1)]) is None


def test_without_shared_keys_only_chains_run_and_row_by_row():
    choice = Buckets((), 8, 4)
    assert choice.usual_form == ROW_BY_ROW and choice.takes([span(), span(5)])
    assert not choice.takes([span(3, parents=[-1, 0, 0])])


def test_a_larger_captured_bucket_stands_in_until_a_size_has_come_often():
    choice = Buckets((16, 64), 20, 15)
    key, captured = GraphKey(2, DRAWS, 16), {GraphKey(4, DRAWS, 64), GraphKey(8, DRAWS, 16), GraphKey(2, REPORTS, 16)}
    assert choice.fit(key, {key}) == key
    assert choice.fit(key, {GraphKey(8, DRAWS, 16), GraphKey(4, DRAWS, DECODES)}) == key, "too large, or another form"
    assert [choice.fit(key, captured) for _ in range(STAND_INS)] == [GraphKey(4, DRAWS, 64)] * STAND_INS
    assert choice.fit(key, captured) == key
    assert [choice.is_due(key) for _ in range(2)] == [False, True], "one eager step, and it is captured"
    other = GraphKey(16, DRAWS, DECODES)
    assert [choice.is_due(other) for _ in range(EAGER_STEPS + 1)] == [False] * EAGER_STEPS + [True]


def test_an_idle_engine_captures_stand_ins_first():
    choice = Buckets((16,), 24, 3)
    order = list(choice.by_worth(False))
    assert len(order) == len(set(order)) and {key.output for key in order} == {DRAWS}
    assert [key.size for key in order if key.form == DECODES] == [1, 2, 4, 8, 16, 24]
    assert {key.size for key in order if key.form == 16} == set(choice.drafted)
    assert len(list(choice.by_worth(True))) == 2 * len(order) <= choice.num_graphs
