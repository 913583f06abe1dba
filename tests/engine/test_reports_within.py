"""Decode steps that report on what they draw: they say what the sampler's pipeline says, and only report where all rows
can."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from kvasir.decoding.sampler import NUMERIC_ERROR, Sampler, StepOutput
from kvasir.engine.schedule.spans import ONE_SAMPLE
from kvasir.engine.ways import graphs as graphs_file
from kvasir.engine.ways.capture import call_through
from kvasir.engine.ways.graph_buckets import DECODES, ROW_BY_ROW
from kvasir.engine.ways.graph_handle import DecodeHandle
from kvasir.types import Request, SamplingParams, Sequence, Span
from tests.decoding.helpers import decode_span, sequence
from tests.engine.driver import Driver, use_ways
from tests.engine.test_draft_graphs import use_graphs
from tests.speculation.helpers import Hostile, driver, install, plain, requests

HIDDEN, DRAWS, REPORTS = StepOutput
ASKED = [
    dict(logprobs=0),
    dict(confidence=20),
    dict(confidence=2, top_p=0.9),
    dict(confidence=5, temperature=0),
    dict(),
    dict(logprobs=0, n=2, top_k=5),
    dict(confidence=20, stop_token_ids=list(range(300, 428)), min_tokens=3),
]


def fleet(d: Driver, kinds: list[dict], **params) -> list:
    return [
        d.request(
            f"r{i}",
            [300 + (7 * i + 3 * j) % 900 for j in range(3 + 5 * i)],
            **dict(temperature=1.0, max_tokens=12, ignore_eos=True, seed=i) | kind | params,
        )
        for i, kind in enumerate(kinds)
    ]


def outcome(d: Driver) -> dict:
    assert not d.errors
    found = {
        key: (
            out.tokens,
            out.finish_reason,
            [(e.id, e.rank, e.top, e.confidence is None) for e in out.logprobs],
            [(e.logprob, e.confidence or 0.0) for e in out.logprobs],
        )
        for key, out in d.outputs.items()
    }
    d.close()
    return found


def same(found: dict, want: dict) -> None:
    assert found.keys() == want.keys()
    for key, (*exact, values) in want.items():
        assert (*found[key][:3],) == (*exact,), key
        np.testing.assert_allclose(np.array(found[key][3]).ravel(), np.array(values).ravel(), rtol=1e-5, atol=1e-5)


def static(**options) -> tuple[Driver, Counter]:
    """An engine over static buffers, and the number of steps by what they put out."""
    d = Driver(static=True, **dict(overlap=True, max_num_seqs=16) | options)
    graphs, seen = d.engine.runner.graphs, Counter()
    compute = graphs._run

    def counted(key):
        seen[key.output] += 1
        compute(key)

    graphs._run = counted
    return d, seen


@pytest.fixture(scope="module")
def alone():
    """Run every request by itself, by the sampler's pipeline."""
    d = Driver(overlap=False, max_num_batched_tokens=512, enable_prefix_caching=False)
    for request in fleet(d, ASKED):
        d.run([request])
    return outcome(d)


@pytest.mark.parametrize("gap, preempt_every", [(0, 0), (2, 5)])
def test_same_reports_as_the_pipeline(gap, preempt_every, alone):
    d, seen = static()
    d.run(fleet(d, ASKED), gap=gap, preempt_every=preempt_every)
    assert seen[REPORTS] > 8
    found = outcome(d)
    same(found, alone)
    assert not found["r4", 0][2] and all(len(found[key][0]) == len(found[key][2]) for key in found if key != ("r4", 0))
    assert any(rank > 1 for found_one in found.values() for _, rank, _, _ in found_one[2])


def test_a_report_of_another_token_would_show(alone, monkeypatch):
    real = graphs_file.report_rows
    monkeypatch.setattr(graphs_file, "report_rows", lambda x, tokens, *rest: real(x, tokens + 1, *rest))
    d, _ = static()
    d.run(fleet(d, ASKED))
    with pytest.raises(AssertionError):
        same(outcome(d), alone)


def test_logits_a_slice_at_a_time(alone, monkeypatch):
    d, seen = static()
    monkeypatch.setattr(graphs_file, "LOGIT_BYTES", 4 * 3 * d.engine.runner.sampler.vocab_size)
    d.run(fleet(d, ASKED))
    assert seen[REPORTS] > 8
    same(outcome(d), alone)


@pytest.mark.parametrize(
    "other",
    [
        dict(logprobs=2),
        dict(logprobs=0, logprobs_mode="processed"),
        dict(repetition_penalty=1.3, logprobs=0),
        dict(allowed_token_ids=list(range(300, 400)), confidence=5),
    ],
    ids=lambda kind: next(iter(kind)),
)
def test_a_request_that_needs_the_pipeline_takes_the_others_along(other):
    """While it runs, the sampler draws for all."""
    want = Driver(overlap=False)
    want.run(fleet(want, [*ASKED[:2], other | dict(max_tokens=5)]))
    d, seen = static()
    d.run(fleet(d, [*ASKED[:2], other | dict(max_tokens=5)]))
    assert seen[HIDDEN] >= 3 and seen[REPORTS] >= 5 and not seen[DRAWS]
    same(outcome(d), outcome(want))


def test_steps_that_nobody_asks_of_report_nothing(monkeypatch):
    monkeypatch.setattr(graphs_file, "report_rows", None)
    d, seen = static()
    d.run(fleet(d, [dict(), dict(top_p=0.9)]))
    assert seen[DRAWS] > 8 and not seen[REPORTS]
    assert not any(entries for _, _, entries, _ in outcome(d).values())


def test_one_that_waits_for_its_prompt_changes_no_step_of_the_others():
    d, seen = static()
    d.run([*fleet(d, [dict(max_tokens=9)]), d.request("late", [301] * 4, max_tokens=1, logprobs=0)], gap=4)
    assert seen[DRAWS] >= 6 and not seen[REPORTS] and len(d.outputs["late", 0].logprobs) == 1
    d.close()


def test_reporting_buckets_are_captured_once_a_step_reported():
    d, _ = static(max_num_seqs=4, check=False)
    graphs = d.engine.runner.graphs
    d.run(fleet(d, [dict(max_tokens=3)]))
    while d.engine.idle():
        pass
    assert set(graphs._ready) == {(size, DRAWS, DECODES) for size in (1, 2, 4)} and graphs.replays(4)
    d.run([d.request("asks", [301] * 4, max_tokens=4, logprobs=0)])
    assert not graphs.replays(4), "those of the last kind"
    while d.engine.idle():
        pass
    assert set(graphs._ready) == {
        (size, output, DECODES) for size in (1, 2, 4) for output in (DRAWS, REPORTS)
    } and graphs.replays(4)
    d.close()


@pytest.mark.parametrize("trees", [True, False])
def test_drafted_steps_report_the_path(trees):
    """Trees and chains run in one kind of step, or chains alone run row by row."""
    free = dict(confidence=5, allowed_token_ids=None)
    wanted = plain(1.0, 2, **free)
    d = driver("replay", max_num_batched_tokens=96, max_num_seqs=5)
    install(d, Hostile({key: tokens for key, (tokens, _) in wanted.items()}))
    if trees:
        use_graphs(d)
    else:
        use_ways(d.engine.runner, call_through, 8)
    graphs, seen = d.engine.runner.graphs, set()
    run = graphs._run
    graphs._run = lambda key: seen.add(key[1:]) or run(key)
    d.run(requests(d, 1.0, 2, **free), preempt_every=7)
    assert {output for output, _ in seen} == {REPORTS} and {form for _, form in seen} >= (
        {4, 16} if trees else {ROW_BY_ROW}
    )
    assert not d.errors and d.engine.stats().accepted_tokens > 20
    for key, (tokens, entries) in wanted.items():
        out = d.outputs[key]
        assert out.tokens == tokens and [(e.id, e.rank) for e in out.logprobs] == [(i, rank) for i, _, rank in entries]
        np.testing.assert_allclose(
            [e.logprob for e in out.logprobs], [logprob for _, logprob, _ in entries], rtol=1e-5, atol=1e-5
        )
        assert all(e.confidence > 0 for e in out.logprobs)
    d.close()


def test_what_a_step_must_put_out():
    sampler = Sampler(64, 60, 8, "cpu", (1,))
    kinds = [
        dict(),
        dict(logprobs=0),
        dict(logprobs=0, confidence=20),
        dict(logprobs=1),
        dict(logprobs=0, logprobs_mode="processed"),
        dict(logprobs=0, min_tokens=2),
        dict(logprobs=0, bad_words=("x",)),
    ]
    spans = []
    for row, kind in enumerate(kinds):
        seq = sequence(row, **kind)
        seq.request.bad_words = [[5]] if "bad_words" in kind else []
        sampler.open(seq)
        spans.append(replace(decode_span(seq), seat=row))
    assert [sampler.output([span]) for span in spans] == [DRAWS, REPORTS, REPORTS, HIDDEN, HIDDEN, HIDDEN, HIDDEN]
    assert sampler.output(spans[:3]) == REPORTS and sampler.output(spans[:4]) == HIDDEN
    sampler.num_top = 2
    assert sampler.output(spans[:1]) == HIDDEN, "a drafter wants to see the likeliest tokens"
    sampler.num_top = 0
    for row in range(1, len(kinds)):
        sampler.close(row)
    assert sampler.output(spans[:1]) == DRAWS and not sampler._num_reporting and not sampler._num_odd


class Read:
    """What a step left."""

    def __init__(self, numbers: np.ndarray) -> None:
        self.numbers = numbers

    def read(self, size: int) -> np.ndarray:
        return self.numbers[:3]

    def reports(self, size: int) -> np.ndarray:
        return self.numbers[3:]


def test_rows_that_failed_have_no_report():
    spans = [
        Span(
            Sequence(
                Request(id=str(row), prompt_ids=[1, 2, 3], params=SamplingParams(**params), seed=0, max_tokens=20)
            ),
            2,
            1,
            want=ONE_SAMPLE,
            seat=row,
        )
        for row, params in enumerate([dict(logprobs=0), dict(logprobs=0, confidence=4), dict(logprobs=0), dict()])
    ]
    numbers = np.array(
        [
            [5, 6, 7, 8, 0],
            [np.nan, 1, -np.inf, 1, 0],
            [1, 1, -np.inf, 1, 0],
            [-1, -2, -3, -4, 0],
            [1, 2, 3, 4, 0],
            [9, 8, 7, 6, 0],
        ],
        np.float32,
    )
    first, second, third, fourth = DecodeHandle(Read(numbers), 5, spans, None, True).read()
    assert (
        (first.error, third.error) == (NUMERIC_ERROR, NUMERIC_ERROR)
        and first.logprobs is None
        and third.logprobs is None
    )
    (entry,) = second.logprobs
    assert (entry.id, entry.logprob, entry.rank, entry.top, entry.confidence) == (6, -2.0, 2, [], 8.0)
    assert isinstance(entry.rank, int) and fourth.tokens == [8] and fourth.logprobs is None
