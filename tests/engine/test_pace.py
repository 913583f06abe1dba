"""Pace: prompt rows in steps with decodes, timing of steps, and refusal of requests that would wait too long."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kvasir.config import SchedulerConfig
from kvasir.engine.schedule.pace import SEVERAL_DECODES, MixedRows, Pace, mixed_rows
from kvasir.engine.schedule.scheduler import Scheduler
from kvasir.engine.schedule.schedulers.fcfs import Fcfs
from kvasir.engine.schedule.step_time import Roofline, StepShape, StepTimeModel
from kvasir.engine.ways.capture import call_through
from kvasir.engine.ways.step_clock import ALIKE_SHARE, StepClock
from tests.engine.driver import Driver
from tests.engine.fake import manager, sequence

# Predictions of a model that has learnt nothing yet: 10 ms a step, 20 us a row, 1 ns a pair.
MODEL = StepTimeModel(Roofline(1e12, 1e12, 8e9, 1.2e7, 600.0, 0.0))
ROWS = 1024


def make(target: float | None, num_decodes: int = 20, mixed: MixedRows | None = None) -> Scheduler:
    """A scheduler with sequences that draw a token a step."""
    pages = manager(4000, page_slots=16)
    s = Scheduler(
        SchedulerConfig(max_num_seqs=64),
        pages,
        Fcfs(),
        max_rows=ROWS,
        max_model_len=50_000,
        pace=Pace(MODEL, target, mixed),
    )
    for i in range(num_decodes):
        s.add(sequence([i, 1], max_tokens=1000, name=f"d{i}"))
    if num_decodes:
        step(s, 0.0)
    return s


def step(s: Scheduler, now: float) -> dict[str, int]:
    """Plan a step, commit it and return its rows by request."""
    plan = s.plan(now)
    for span in plan.spans:
        s.advance(span, [5] if "sample" in span.want else [])
    if plan.spans:
        s.complete(plan)
    s.check()
    return {span.seq.request.id: span.length for span in plan.spans}


def seconds(rows: dict[str, int], start: int) -> float:
    """Predicted seconds of a step of decodes and the prompt ``p`` from position ``start``."""
    return MODEL.predict(StepShape.of([(2, n) for name, n in rows.items() if name != "p"] + [(start, rows["p"])]))


@pytest.mark.parametrize("target", [0.02, 0.025])
def test_a_prompt_gets_the_rows_that_the_time_allows(target):
    s = make(target)
    s.add(sequence(6000, max_tokens=4, arrival=1.0, name="p"))
    start, lengths = 0, []
    while start < 6000:
        rows = step(s, 1.1)
        assert len(rows) == 21, "every decode and the prompt"
        assert seconds(rows, start) <= 0.9 * target
        if start + rows["p"] < 6000:
            assert seconds({**rows, "p": rows["p"] + 144}, start) > 0.9 * target, "a tile more would have been too many"
        start += rows["p"]
        lengths.append(rows["p"])
    assert lengths[0] > lengths[-2], "further into the prompt a row costs more"


def test_the_oldest_prompt_has_a_claim_whatever_the_time():
    s = make(0.005)  # less than a step of decodes takes
    s.add(sequence(3000, max_tokens=4, arrival=10.0, name="p"))
    assert "p" not in step(s, 10.5), "nothing fits"
    for now in (11.1, 11.2, 11.3):
        assert step(s, now)["p"] == 128, "a tile is more than a tenth of the rows; also at admission"
    s.add(sequence(3000, max_tokens=4, arrival=11.3, name="q"))
    rows = step(s, 11.4)
    assert rows["p"] == 128 and "q" not in rows and len(rows) == 21


@pytest.mark.parametrize("target", [0.05, None])
def test_a_target_goes_before_prompts_first(target):
    s = make(target)
    s.prompts_first = True
    s.add(sequence(6000, max_tokens=4, arrival=0.1, name="p"))
    assert ("d0" in step(s, now=0.5)) == (target is not None)


def test_without_a_target_or_without_decodes_nothing_is_held_back():
    for s in (make(None), make(0.0101, num_decodes=0)):
        s.add(sequence(3000, max_tokens=4, name="p"))
        assert step(s, 0.1)["p"] >= ROWS - 2 * 128
    assert Scheduler(SchedulerConfig(), manager(), Fcfs(), max_rows=8, max_model_len=10).pace.target is None


MIXED = MixedRows(304, 160)
FEW, SEVERAL, MANY = SEVERAL_DECODES.start - 1, SEVERAL_DECODES.start, SEVERAL_DECODES.stop


def test_prompts_beside_decodes_are_bounded_without_a_target():
    s = make(None, FEW, MIXED)
    for name in "pq":
        s.add(sequence([ord(name), *range(500)], max_tokens=4, arrival=0.1, name=name))
    rows = step(s, 0.1)
    assert len(rows) == FEW + 1 and rows["p"] == 304, "no other prompt gets rows"
    rows = step(s, 0.2)
    assert rows["p"] == 197 and rows["q"] == 96, "the rows that the first leaves, in whole pages"
    crowd = make(None, FEW, MIXED)
    for i in range(9):
        crowd.add(sequence([i] * 500, max_tokens=4, arrival=0.1, name=f"p{i}"))
    assert sorted(step(crowd, 0.1).values())[FEW:] == [48, 500], (
        "more where so many wait; not for a dozen rows of a third"
    )
    s.prompts_first = True
    s.add(sequence([7] * 900, max_tokens=4, arrival=0.4, name="r"))
    assert step(s, 0.4).get("r", 0) > 304, "no request waits for a token"
    alone = make(None, num_decodes=0, mixed=MIXED)
    alone.add(sequence([7] * 900, max_tokens=4, arrival=0.1, name="p"))
    assert step(alone, 0.1)["p"] == 900, "nobody decodes"
    timed = make(0.025, mixed=MIXED)
    assert timed.pace.mixed is None, "a target replaces the bound"


def test_what_the_cache_has_and_what_is_set_aside_does_not_wait():
    """Nine prompts of 500 tokens that differ in their last page, so that 20 tokens of each are to be computed."""
    s = make(None, FEW, MIXED)
    s.add(sequence(500, max_tokens=4, arrival=0.1, name="first"))
    while step(s, 0.1).get("first") != 1:
        pass
    asked, most = [], s.pace.most
    s.pace.most = lambda *a: asked.append(a[-1]) or most(*a)
    for i in range(9):
        s.add(sequence([*range(480), *[i] * 20], max_tokens=4, arrival=0.2, name=f"p{i}"))
    away = sequence([9] * 400, max_tokens=4, arrival=0.3, name="its grammar is being compiled")
    s.add(away)
    s.block(away)
    step(s, 0.3)
    assert asked == [9 * 20]


@pytest.mark.parametrize(
    ("prompt", "long", "short"),
    [
        (160, [160], [160]),
        (300, [300], [160, 140]),  # equal shares, in whole tiles
        (480, [304, 176], [160, 160, 160]),
        (500, [304, 196], [304, 128, 68]),  # more than three short steps: a long one, then less waits
        (1000, [304, 304, 304, 88], [304, 304, 160, 128, 104]),
    ],
)
def test_several_decodes_wait_for_shorter_steps(monkeypatch, prompt, long, short):
    monkeypatch.setattr("kvasir.engine.schedule.pace.TILE_ROWS", 32)
    for num_decodes, expected in ((FEW, long), (SEVERAL, short), (MANY, long)):
        s, lengths = make(None, num_decodes, MIXED), []
        s.add(sequence([7] * prompt, max_tokens=4, arrival=0.1, name="p"))
        while sum(lengths) < prompt:
            rows = step(s, 0.1)
            assert len(rows) == num_decodes + 1
            lengths.append(rows["p"])
        assert lengths == expected


@pytest.mark.parametrize(
    ("ahead", "expected"),
    [
        (0, 1212),
        (1, 1212),
        (1152, 1212),
        (1153, 700),
        (2304, 1212),
        (3456, 1212),
        (3457, 2108),
        (16_384, 2108),
        (20_000, 2560),
        (100_000, 8192),
    ],
)
def test_rows_of_a_step_by_what_waits(ahead, expected):
    assert Pace(None, None, MixedRows(2048, 1152)).most(30, 60, 8192, ahead) == expected


def test_rows_beside_decodes_follow_from_the_device():
    hopper = Roofline(4.8e12, 989e12, 15e9, 2 * 7e9, 4 * 32 * 128 * 32, 2 * 8 * 128 * 2 * 32)
    assert mixed_rows(hopper) == MixedRows(2048, 1152)
    assert mixed_rows(replace(hopper, weight_bytes=30e9, row_flops=4 * 7e9)) == MixedRows(2048, 1152), (
        "the same for a model twice as large"
    )
    assert mixed_rows(replace(hopper, weight_bytes=120e9, routed=((0.875, 120e9),))) == MixedRows(2048, 1152), (
        "the same for a mixture that reads as much a row"
    )
    assert mixed_rows(replace(hopper, flops=hopper.flops / 2)) == MixedRows(1024, 512)


def test_the_wait_for_a_first_token_knows_the_pace():
    running = StepShape.of([(100, 1)] * 20)
    free, paced = Pace(MODEL, None), Pace(MODEL, 0.02)
    assert free.first_token(running, 0, 100, ROWS) == MODEL.time_to_first_token(0, 100, running, ROWS)
    assert (
        paced.first_token(running, 5000, 100, ROWS)
        > free.first_token(running, 5000, 100, ROWS)
        > free.first_token(running, 0, 100, ROWS)
    )
    bounded = Pace(MODEL, None, mixed=MixedRows(200, 200))
    assert bounded.first_token(running, 5000, 100, ROWS) > free.first_token(running, 5000, 100, ROWS)
    full = StepShape.of([(100, 1)] * ROWS)
    assert free.first_token(full, 0, 1020, ROWS) < 11 * MODEL.predict(
        StepShape(ROWS + 102, 102 * 1020, 100 * ROWS, ROWS + 1)
    ), "a tenth a step"


class Model:
    def __init__(self) -> None:
        self.seen: list[tuple[StepShape, bool]] = []

    def observe(self, shape: StepShape, seconds: float, graph: bool) -> None:
        assert seconds >= 0
        self.seen.append((shape, graph))


def test_replays_are_learnt_from_with_their_padding_and_captures_never():
    spans = [SimpleNamespace(start=10 + i, length=1) for i in range(5)]
    ready = set()
    graphs = SimpleNamespace(
        takes=lambda spans: all(s.length == 1 for s in spans), bucket=lambda n: 8, replays=lambda size: size in ready
    )
    clock = StepClock(
        Model(), SimpleNamespace(graphs=graphs, chains=graphs, native=None, device=torch.device("cpu"), captures=0)
    )

    def run(spans, captures=0) -> bool:
        lap = clock.start(spans)
        clock._runner.captures += captures
        if lap is not None:
            clock.stop(lap)
            clock.learn(lap, spans)
        return lap is not None

    assert not any(run(spans) for _ in range(2 * ALIKE_SHARE)), "the bucket is not captured"
    ready.add(8)
    assert sum(run(spans) for _ in range(2 * ALIKE_SHARE)) == 2
    mixed = [*spans, SimpleNamespace(start=0, length=30)]
    assert run(mixed) and run(mixed, captures=1), "pieces of the second were captured before they ran"
    replay = (StepShape(8, 0.0, 60, 5), True)
    assert clock.model.seen == [replay, replay, (StepShape(35, 450.0, 60, 6), False)]


@pytest.mark.parametrize("drafter", [True, False])
def test_replays_that_verify_drafts_are_not_taken_for_decodes(drafter):
    """Steps that verify drafts or chains replay graphs of their own, so they say nothing about other steps."""
    chains = SimpleNamespace(takes=lambda spans: True, bucket=lambda n: 8, replays=lambda size: True)
    graphs = chains if drafter else SimpleNamespace(takes=lambda spans: False)
    clock = StepClock(Model(), SimpleNamespace(graphs=graphs, chains=chains, native=None, device=torch.device("cpu")))
    spans = [SimpleNamespace(start=10, length=1), SimpleNamespace(start=20, length=4)]
    assert all(clock.start(spans) is None for _ in range(2 * ALIKE_SHARE))


def test_an_engine_learns_how_long_its_steps_take():
    d = Driver(max_num_batched_tokens=64)
    assert d.engine.stats().step_time_error == {}
    d.run([d.request(f"r{i}", [300 + i] * 40, max_tokens=30, ignore_eos=True) for i in range(6)], gap=5)
    error = d.engine.stats().step_time_error
    assert error.keys() == {"eager"} and 0 < error["eager"] < 1
    shape = StepShape.of([(50, 1)] * 4)
    assert 1e-5 < d.engine.clock.model.predict(shape) < 1.0
    d.close()


def test_replays_have_coefficients_of_their_own():
    d = Driver(static=True, overlap=True)
    assert d.engine.runner.graphs._capture is call_through
    d.run([d.request(f"r{i}", [300 + i] * 9, max_tokens=60, ignore_eos=True) for i in range(4)])
    assert d.engine.stats().step_time_error.keys() == {"eager", "graph"} or d.engine.stats().step_time_error.keys() == {
        "graph"
    }
    d.close()


def test_the_load_is_what_is_left_to_compute():
    """The report for a router: uncached prompt tokens, decodes, and a rate that falls with them."""
    d = Driver(max_num_batched_tokens=64)
    d.engine.pace.model = MODEL
    idle = d.engine.load()
    assert (idle.queued_tokens, idle.decodes) == (0, 0) and idle.prompt_rate > 0
    prompt = list(range(300, 500))
    d.submit(d.request("a", prompt, max_tokens=30, ignore_eos=True))
    assert d.engine.load().queued_tokens == 200
    d.step()
    left = d.engine.load().queued_tokens
    assert 0 < left < 200
    while d.engine.load().queued_tokens:
        d.step()
    d.step()
    busy = d.engine.load()
    assert busy.decodes == 1 and busy.prompt_rate < idle.prompt_rate
    d.run([])
    d.submit(d.request("b", [*prompt, 1, 2, 3], max_tokens=2))
    assert d.engine.load().queued_tokens < 64, "the prefix is cached"
    d.run([])
    d.close()


def test_requests_that_would_wait_too_long_are_refused_with_a_time():
    d = Driver(max_ttft=1.0, max_num_batched_tokens=64)
    d.engine.pace.model = MODEL  # 10 ms a step and more
    prompt = list(range(300, 700))
    for i in range(40):
        d.submit(d.request(f"r{i}", [300 + i, *prompt], max_tokens=2, ignore_eos=True))
    refused = list(d.errors.values())
    assert 0 < len(refused) < 40 and all(
        (e.status, e.code) == (429, "overloaded") and e.retry_after >= 1 for e in refused
    )
    assert "max_ttft" in refused[0].message
    d.run([])
    assert len(d.outputs) == 40 - len(refused)
    d.errors.clear()
    d.submit(d.request("late", prompt, max_tokens=2))
    assert not d.errors, "the queue is empty again"
    d.close()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_who_goes_first_does_not_wait_for_the_queue(policy):
    d = Driver(max_ttft=1.0, max_num_batched_tokens=64, scheduling_policy=policy)
    d.engine.pace.model = MODEL
    prompt = list(range(300, 700))

    def send(name: str, priority: int) -> bool:
        d.submit(
            replace(
                d.request(name, [len(name), *prompt], max_tokens=2, ignore_eos=True),
                priority=priority,
                arrival=len(d.outputs),
            )
        )
        return name not in d.errors

    queued = sum(send(f"r{i:02}", 5) for i in range(40))
    assert 1 < queued < 40 and not send("as the rest", 5)
    assert send("urgent", 1) is (policy == "priority")
    assert send("between", 3) is (policy == "priority"), "behind the urgent one only"
    d.run([])
    d.close()


def test_those_that_are_refused_leave_no_trace_in_the_order():
    """A refused request must not stay in the queue's counts, which would grow for ever."""
    d = Driver(max_ttft=0.1, max_num_batched_tokens=64, scheduling_policy="shortest")
    d.engine.pace.model = MODEL
    for i in range(4):
        d.submit(d.request(f"r{i}", [*range(300, 700)], max_tokens=2, ignore_eos=True))
        d.engine.scheduler.backlog.waiting.ordered(0.0)
    assert len(d.errors) == 3 and [seq.request.id for seq in d.engine.scheduler.policy._policy._last] == ["r0"]
    d.run([])
    d.close()


def test_a_cached_prompt_is_not_counted():
    d = Driver(max_num_batched_tokens=64, max_ttft=100.0)
    prompt = list(range(300, 700))
    d.run([d.request("first", prompt, max_tokens=2, ignore_eos=True)])
    d.engine.pace.model = MODEL
    asked = []
    first_token = d.engine.pace.first_token
    d.engine.pace.first_token = lambda *a: asked.append(a[1:3]) or first_token(*a)
    d.submit(d.request("again", prompt, n=8, max_tokens=2, ignore_eos=True))
    d.submit(replace(d.request("later", prompt, max_tokens=2, ignore_eos=True), arrival=d.steps + 1.0))
    assert asked == [(0, 16), (16 + 7, 16)], "the last page is computed again, and one row for each further branch"
    d.run([])
    d.close()


def test_a_target_changes_no_token():
    found = []
    for target in (None, 1e-3, 0.02):
        d = Driver(target_itl=target, max_num_batched_tokens=64)
        d.run(
            [
                d.request(f"r{i}", [300 + i + j for j in range(10 + 20 * i)], max_tokens=12, ignore_eos=True, seed=i)
                for i in range(6)
            ],
            gap=3,
        )
        assert not d.errors
        found.append({key: out.tokens for key, out in d.outputs.items()})
        d.close()
    assert found[0] == found[1] == found[2] and len(found[0]) == 6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_times_are_predicted_on_a_gpu():
    d = Driver(
        device="cuda",
        dtype="bfloat16",
        batch_invariant=False,
        max_num_seqs=32,
        num_pages=2048,
        check=False,
        poison=False,
    )
    for turn in range(4):
        prompts = [[300 + (i * j) % 900 for j in range(20 + 9 * i)] for i in range(32)]
        d.run(
            [d.request(f"r{turn}.{i}", prompt, max_tokens=200, ignore_eos=True) for i, prompt in enumerate(prompts)],
            gap=3,
        )
    assert not d.errors
    error, model = d.engine.stats().step_time_error, d.engine.clock.model
    assert error.keys() == {"eager", "graph"}
    alone = "PYTEST_XDIST_WORKER" not in os.environ  # other workers' kernels would take time from ours
    assert error["graph"] < 0.2 or not alone, error
    shape = StepShape.of([(150, 1)] * 32)
    assert 2e-5 < model.predict(shape, graph=True) < model.predict(shape)
    d.close()
