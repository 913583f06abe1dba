"""Steps that are read after the next was launched give the same tokens and ends, and leave nothing behind."""

from __future__ import annotations

import pytest

from kvasir.engine.ways.graph_buckets import DECODES, ROW_BY_ROW, STAND_INS
from kvasir.types import Grammar
from tests.engine.driver import Driver, use_ways

MODES = {
    "depth0": dict(overlap=False),
    "static0": dict(overlap=False, static=True),
    "depth1": dict(overlap=True),
    "static1": dict(overlap=True, static=True),
}
KINDS = [
    dict(temperature=0),
    dict(temperature=0, max_tokens=1),
    dict(top_p=0.9),
    dict(top_k=7, temperature=0.7),
    dict(min_p=0.1),
    dict(stop_token_ids=list(range(300, 428))),
    dict(stop_token_ids=list(range(50, 178)), min_tokens=5),
    dict(logprobs=2),
    dict(n=3),
    dict(prompt_logprobs=1, logprobs=0),
    dict(top_p=0.8, top_k=30, min_p=0.02, temperature=1.3),
]
BOUND = [dict(repetition_penalty=1.3), dict(bad_words=True), dict(grammar=Grammar("regex", "[ab]{3,9}"))]


def fleet(driver: Driver, kinds: list[dict]):
    requests = []
    for i, kind in enumerate(kinds):
        params = dict(temperature=1.0, max_tokens=14, ignore_eos=True, seed=i) | kind
        words = params.pop("bad_words", None)
        request = driver.request(f"r{i}", [300 + (7 * i + 3 * j) % 900 for j in range(3 + 5 * i)], **params)
        request.bad_words = [[300 + j] for j in range(100)] if words else []
        requests.append(request)
    return requests


def outcome(driver: Driver, **how) -> dict:
    assert not driver.errors
    found = {
        key: (out.tokens, out.finish_reason, out.logprobs, out.prompt_logprobs) for key, out in driver.outputs.items()
    }
    driver.close()
    return found


@pytest.fixture(scope="module")
def alone():
    """Outputs of every request when it runs alone and each step is read at once."""
    driver = Driver(overlap=False, max_num_batched_tokens=512, enable_prefix_caching=False)
    for request in fleet(driver, KINDS + BOUND):
        driver.run([request])
    return outcome(driver)


@pytest.mark.parametrize("rows, gap", [(9, 1), (64, 0)])
@pytest.mark.parametrize("mode", MODES)
def test_same_tokens_and_ends(mode, rows, gap, alone):
    driver = Driver(**MODES[mode], max_num_batched_tokens=rows, max_num_seqs=8)
    driver.run(fleet(driver, KINDS), gap=gap)
    found = outcome(driver)
    assert found == {key: alone[key] for key in found} and len(found) == len(KINDS) + 2
    reasons = {reason for _, reason, _, _ in found.values()}
    assert reasons == {"stop", "length"}, "both ways to end must occur"


# Every mode with forced tokens and with preemptions; without either, the one that has most to go wrong.
DEPENDENT = [
    pytest.param(mode, *how, marks=[pytest.mark.slow] * (how == (False, 0) and mode != "static1"))
    for mode in MODES
    for how in ((True, 0), (False, 0), (False, 4))
]


@pytest.mark.parametrize("mode, forcing, preempt_every", DEPENDENT)
def test_requests_that_depend_on_what_was_drawn(mode, forcing, preempt_every, alone):
    driver = Driver(**MODES[mode], max_num_batched_tokens=32, max_num_seqs=16)
    if not forcing:
        driver.engine.proposals.forcing.wanted = lambda drafting: False
    driver.run(fleet(driver, KINDS + BOUND), gap=1, preempt_every=preempt_every)
    assert outcome(driver) == alone
    assert driver.engine.runner.sampler.num_bound == 0


def record(driver: Driver, holds: str = "") -> list[tuple[str, int]]:
    """Record launches, late draws and reads in order, for steps with a request whose id starts with ``holds``."""
    calls: list[tuple[str, int]] = []
    runner = driver.engine.runner
    launch, draw = runner.launch, runner.draw
    late_steps = []

    def recorded(plan, late=False):
        if not any(span.seq.request.id.startswith(holds) for span in plan.spans):
            return launch(plan, late)
        calls.append(("launch", plan.step))
        handle = launch(plan, late)
        if runner.parts._late is not None:
            late_steps.append(plan.step)

        class Handle:
            def read(self):
                calls.append(("read", plan.step))
                return handle.read()

        return Handle()

    def drawn():
        calls.extend(("draw", late_steps.pop()) for _ in late_steps[:1])
        draw()

    runner.launch, runner.draw = recorded, drawn
    return calls


def test_the_next_step_is_launched_before_a_step_is_read():
    driver = Driver(overlap=True)
    calls = record(driver)
    driver.run(fleet(driver, [dict(max_tokens=6)]))
    launched = [step for what, step in calls if what == "launch"]
    assert calls == [
        ("launch", launched[0]),
        *(call for a, b in zip(launched, launched[1:]) for call in (("launch", b), ("read", a))),
        ("read", launched[-1]),
    ]
    assert len(launched) == 6, "no step is launched for a token that cannot come"
    driver.close()


@pytest.mark.parametrize("kind", BOUND, ids=["penalty", "bad words", "grammar"])
def test_a_draw_that_needs_the_last_token_waits_for_the_read_and_the_forward_does_not(kind):
    driver = Driver(overlap=True, max_num_seqs=4)
    driver.engine.proposals.forcing.wanted = lambda drafting: False
    calls = record(driver, "r1")
    driver.run(fleet(driver, [dict(max_tokens=24), kind]))
    launched = [step for what, step in calls if what == "launch"]
    assert calls[:2] == [("launch", launched[0]), ("launch", launched[1])], "the first has nothing to wait for"
    at = {call: i for i, call in enumerate(calls)}
    for before, step in zip(launched, launched[1:]):
        assert at["launch", step] < at["read", before] < at["draw", step] < at["read", step]
    driver.close()


@pytest.mark.parametrize("after", [0, 1, 2, 5])
@pytest.mark.parametrize("mode", ["depth1", "static1"])
def test_cancel_while_a_step_is_in_flight(mode, after, alone):
    """The seat of the cancelled request goes to the next one only when the step that uses it has ended."""
    driver = Driver(**MODES[mode], max_num_seqs=3)
    requests = fleet(driver, KINDS)
    for request in requests:
        driver.submit(request)
    for _ in range(after):
        driver.step()
    driver._take(driver.engine.cancel("r2"))
    driver._take(driver.engine.cancel("r8", 1))
    driver.run([])
    for key, (tokens, reason, _, _) in alone.items():
        if key[0] in ("r2",) or key == ("r8", 1):
            got = driver.outputs[key].tokens
            assert got == tokens[: len(got)]
        elif key in driver.outputs:
            assert (driver.outputs[key].tokens, driver.outputs[key].finish_reason) == (tokens, reason), key
    driver.close()


# Every way to fail with the steps that overlap, and the first and a later one with those that do not.
FAILS = [
    pytest.param(mode, at, marks=[pytest.mark.slow] * ((mode, at) in {("depth0", 2), ("depth0", 7), ("static0", 2)}))
    for mode in MODES
    for at in (1, 2, 7)
]


@pytest.mark.parametrize("mode, at", FAILS)
def test_a_step_that_fails_when_it_is_read_is_run_again_and_so_is_the_next(mode, at, alone):
    driver = Driver(**MODES[mode], max_num_seqs=16)
    runner, launches = driver.engine.runner, []
    launch = runner.launch

    def launched(plan, late=False):
        handle = launch(plan, late)
        launches.append(plan)
        if len(launches) != at:
            return handle

        class Broken:
            def read(self):
                runner.seats.token.fill_(3)  # what the step drew is lost
                raise ValueError("injected")

        return Broken()

    runner.launch = launched
    driver.run(fleet(driver, KINDS + BOUND))
    assert outcome(driver) == alone
    assert len(launches) > at


@pytest.mark.parametrize("mode", ["depth1", "static1"])
@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_late_draw_that_fails_is_run_again(mode, at, alone, monkeypatch):
    driver = Driver(**MODES[mode], max_num_seqs=16)
    driver.engine.proposals.forcing.wanted = lambda drafting: False
    parts, draws = driver.engine.runner.parts, []
    draw_late = parts.draw_late

    def failing():
        draws.append(parts._late)
        if len(draws) == at:
            raise ValueError("injected")
        draw_late()

    monkeypatch.setattr(parts, "draw_late", failing)
    driver.run(fleet(driver, KINDS + BOUND))
    assert outcome(driver) == alone and len(draws) > at


@pytest.mark.parametrize("mode", ["depth1", "static1"])
def test_a_draw_made_before_the_read_is_seen(mode, alone, monkeypatch):
    """Negative control: draws that do not wait for the tokens before them give other outputs, or an error."""
    driver = Driver(**MODES[mode], max_num_seqs=16)
    driver.engine.proposals.forcing.wanted = lambda drafting: False
    runner = driver.engine.runner
    launch = runner.launch
    monkeypatch.setattr(runner, "launch", lambda plan, late=False: launch(plan))
    try:
        driver.run(fleet(driver, BOUND))
    except AssertionError:
        return
    bound = {k: v for k, v in alone.items() if int(k[0][1:]) >= len(KINDS)}
    assert driver.errors or [v[0] for v in outcome(driver).values()] != [v[0] for v in bound.values()]


def test_padding_rows_are_harmless(alone):
    """Outputs do not depend on what the dummy page holds, nor on the number of rows that pad a step."""
    driver = Driver(overlap=True, static=True, max_num_seqs=16)
    graphs = driver.engine.runner.graphs
    seen = set()
    compute = graphs._compute

    def poisoned(size, draws, drafted):
        for group in range(len(driver.engine.runner.pool.groups)):
            driver.engine.runner.pool.poison(group, [0])
        seen.add((size, draws))
        compute(size, draws, drafted)

    graphs._compute = poisoned
    graphs._capture = lambda work: work
    driver.run(fleet(driver, KINDS))
    assert outcome(driver) == {key: value for key, value in alone.items() if int(key[0][1:]) < len(KINDS)}
    assert {size for size, _ in seen} >= {2, 4, 16} and {draws for _, draws in seen} == {True, False}


def test_little_crosses_over_in_a_steady_state():
    driver = Driver(overlap=True, static=True, max_num_seqs=8, check=False)
    rows = driver.engine.runner.seats
    changes, sent = rows.changes, []

    def counted(*args):
        places, content = changes(*args)
        sent.append(len(places))
        return places, content

    rows.changes = counted
    driver.run([driver.request(f"s{i}", [300 + i] * 16, max_tokens=81, ignore_eos=True, seed=i) for i in range(8)])
    assert sum(sent[4:]) <= 8 * 80 // 16 + 8, "one page a row and page, and no more"
    driver.close()


def test_a_failed_capture_leaves_the_engine_running(alone, caplog):
    def capture(work):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    driver = Driver(overlap=True, static=True, max_num_seqs=16)
    use_ways(driver.engine.runner, capture)
    driver.run(fleet(driver, KINDS))
    assert outcome(driver) == {key: value for key, value in alone.items() if int(key[0][1:]) < len(KINDS)}
    assert "no more CUDA graphs" in caplog.text and driver.engine.runner.graphs._ready == {}


def test_buckets_are_captured_when_used_often_or_when_idle():
    driver = Driver(overlap=True, static=True, max_num_seqs=20, check=False)
    graphs, captured = driver.engine.runner.graphs, []
    assert graphs.buckets == [1, 2, 4, 8, 16, 20] and [graphs.bucket(n) for n in (1, 3, 9, 17, 20)] == [
        1,
        4,
        16,
        20,
        20,
    ]
    assert not driver.engine.idle(), "nothing is captured before the first request"

    def capture(work):
        captured.append(graphs._buffers.starts)
        return work

    graphs._capture = capture
    driver.run(fleet(driver, [dict(max_tokens=3)]))
    assert not captured, "a bucket that passes by is not captured"
    driver.outputs.clear()
    driver.run(fleet(driver, [dict(max_tokens=9)] * 3))
    driver.outputs.clear()
    assert len(captured) == 1 and list(graphs._ready) == [(4, True, False)]
    fits = [graphs._fit(2, True, DECODES)[0] for _ in range(STAND_INS + 1)]
    assert fits == [4] * STAND_INS + [2], "a captured bucket stands in until the rows have come often"
    assert [graphs._fit(n, True, DECODES)[0] for n in (1, 3, 5)] == [1, 4, 8]
    assert graphs._fit(2, True, ROW_BY_ROW)[0] == 2, "a bucket of another form does not stand in"
    graphs.choice._stood_in.clear()
    left = 0
    while driver.engine.idle():
        left += 1
    assert left == 5 and sorted(graphs._ready) == [(size, True, False) for size in graphs.buckets]
    first = driver.run(fleet(driver, KINDS))
    assert first
    driver.close()


def test_the_first_step_of_a_kind_is_announced_as_slow():
    driver = Driver(overlap=True)
    told = []
    driver.engine.on_launch = lambda ids, slow, plan: told.append((sorted(ids), slow))
    driver.run(fleet(driver, [dict(max_tokens=5), dict(max_tokens=8)]), gap=3)
    driver.outputs.clear()
    fresh = len(told)
    assert any(slow for _, slow in told) and not all(slow for _, slow in told)
    assert any(ids == ["r0", "r1"] for ids, _ in told)
    driver.run(fleet(driver, [dict(max_tokens=5), dict(max_tokens=8)]), gap=3)
    assert not any(slow for _, slow in told[fresh:]), "a kind of step that was seen before is not slow"
    driver.close()
