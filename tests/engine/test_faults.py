"""Faults in one request stay in it: exceptions, NaN logits, lack of memory. The others' tokens do not change."""

from __future__ import annotations

import queue
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from kvasir.client import engine_process as process
from kvasir.client import messages
from kvasir.decoding.grammar import GrammarCompiler
from kvasir.decoding.matcher import Matcher
from kvasir.engine.grammars import NUM_TURNS
from kvasir.types import Grammar
from tests.engine.driver import Driver, Output

# A step is read before the next is launched, or after it; the last mode has static decode buffers.
MODES = [dict(overlap=False), dict(overlap=True), dict(overlap=True, static=True)]


@pytest.fixture(params=MODES, ids=["depth0", "depth1", "static"])
def mode(request) -> dict:
    return request.param


PROMPTS = [[300 + (i * 17 + j * 3) % 700 for j in range(4 + 3 * i)] for i in range(8)]
BAD = 5


def fleet(driver: Driver):
    return [
        driver.request(f"r{i}", p, temperature=1.0, seed=i, max_tokens=12, ignore_eos=True)
        for i, p in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def healthy():
    driver = Driver(max_num_seqs=8)
    outputs = driver.run(fleet(driver))
    driver.close()
    return {key: out.tokens for key, out in outputs.items()}


def others_are_unharmed(driver: Driver, healthy: dict) -> None:
    for key, tokens in healthy.items():
        if key[0] != f"r{BAD}":
            assert driver.outputs[key].tokens == tokens
    driver.outputs.clear()
    driver.errors.clear()
    driver.run(fleet(driver))  # a healthy round afterwards includes the request that failed
    assert {key: out.tokens for key, out in driver.outputs.items()} == healthy


def inject(driver: Driver, monkeypatch, fault) -> None:
    """Call ``fault(plan)`` before every launch."""
    real = driver.engine.runner.launch

    def launch(plan, late=False):
        fault(plan)
        return real(plan, late)

    monkeypatch.setattr(driver.engine.runner, "launch", launch)


def holds_bad(plan) -> bool:
    return any(s.seq.request.id == f"r{BAD}" and s.seq.num_output >= 3 for s in plan.spans)


def test_an_exception_fails_its_request_alone(healthy, monkeypatch, mode):
    driver = Driver(**mode, max_num_seqs=8)
    with monkeypatch.context() as m:

        def fault(plan):
            if holds_bad(plan):
                raise ValueError("injected")

        inject(driver, m, fault)
        driver.run(fleet(driver))
    error = driver.errors[f"r{BAD}"]
    assert (error.status, error.code) == (500, "internal_error") and "injected" not in error.message
    others_are_unharmed(driver, healthy)
    driver.close()


def test_nan_logits_fail_their_request_alone(healthy, monkeypatch, mode):
    driver = Driver(**mode, max_num_seqs=8)
    real, rows = driver.engine.runner.model.logits, {}

    def logits(hidden):
        out = real(hidden)
        if rows.get("bad") is not None and out.shape[0] > rows["bad"]:
            out = out.clone()
            out[rows["bad"], 7] = float("nan")
        return out

    def fault(plan):
        at, rows["bad"] = 0, None
        for s in plan.spans:
            wanted = len(s.want.get("sample", ()))
            if wanted and s.seq.request.id == f"r{BAD}" and s.seq.num_output >= 3:
                rows["bad"] = at
            at += wanted

    with monkeypatch.context() as m:
        m.setattr(driver.engine.runner.model, "logits", logits)
        inject(driver, m, fault)
        driver.run(fleet(driver))
    assert driver.errors[f"r{BAD}"].code == "internal_numeric_error"
    others_are_unharmed(driver, healthy)
    driver.close()


def test_out_of_memory_shrinks_the_step_and_goes_on(healthy, monkeypatch, mode):
    driver = Driver(**mode, max_num_seqs=8)
    largest = []
    with monkeypatch.context() as m:

        def fault(plan):
            if plan.num_rows > 20:
                raise torch.OutOfMemoryError("injected")
            largest.append(plan.num_rows)

        inject(driver, m, fault)
        driver.run(fleet(driver))
    assert not driver.errors and max(largest) <= 20
    assert {key: out.tokens for key, out in driver.outputs.items()} == healthy
    driver.close()


def test_hopeless_lack_of_memory_ends_one_request_not_the_engine(healthy, monkeypatch, mode):
    driver = Driver(**mode, max_num_seqs=8)
    with monkeypatch.context() as m:

        def fault(plan):
            if any(s.seq.request.id == f"r{BAD}" for s in plan.spans):
                raise torch.OutOfMemoryError("injected")

        inject(driver, m, fault)
        driver.run(fleet(driver))
    assert driver.errors[f"r{BAD}"].code == "out_of_memory"
    others_are_unharmed(driver, healthy)
    driver.close()


def test_a_lost_device_ends_the_process_not_the_request(monkeypatch, mode):
    driver = Driver(**mode, max_num_seqs=8)

    def fault(plan):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    inject(driver, monkeypatch, fault)
    with pytest.raises(RuntimeError, match="CUDA error"):
        driver.run(fleet(driver))
    driver.close()


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
@pytest.mark.parametrize("n", [1, 3])
def test_cancel_gives_everything_back(steps, n, mode):
    driver = Driver(**mode, max_num_seqs=4, max_num_batched_tokens=16)
    for i, p in enumerate(PROMPTS):
        driver.submit(driver.request(f"c{i}", p * 3, max_tokens=50, ignore_eos=True, n=n, seed=i))
    for _ in range(steps):
        driver.step()
    for i in range(len(PROMPTS)):
        driver._take(driver.engine.cancel(f"c{i}"))
        assert driver.engine.cancel(f"c{i}") == []
    driver.assert_clean()
    assert all(driver.outputs[f"c{i}", b].finish_reason == "cancelled" for i in range(len(PROMPTS)) for b in range(n))
    driver.close()


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_cancel_while_a_grammar_compiles(steps, mode):
    driver = Driver(**mode, max_num_seqs=4)
    grammar = Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}')
    driver.submit(driver.request("g", PROMPTS[2], max_tokens=50, n=2, grammar=grammar))
    for _ in range(steps):
        driver.step()
    driver._take(driver.engine.cancel("g"))
    driver.step()
    driver.assert_clean()
    assert driver.outputs["g", 0].finish_reason == driver.outputs["g", 1].finish_reason == "cancelled"
    driver.close()


def test_a_bad_grammar_fails_its_request_alone(healthy, mode):
    driver = Driver(**mode, max_num_seqs=8)
    driver.submit(driver.request("bad", PROMPTS[2], max_tokens=50, grammar=Grammar("regex", "(unclosed")))
    driver.run(fleet(driver))
    assert driver.errors["bad"].status == 400 and driver.errors["bad"].param
    assert {key: out.tokens for key, out in driver.outputs.items()} == healthy
    driver.close()


def test_a_bug_of_the_compiler_fails_its_request_alone(healthy, monkeypatch):
    driver = Driver(max_num_seqs=8)

    def compile_(self, grammar):
        raise OverflowError("a bug")

    monkeypatch.setattr(GrammarCompiler, "compile", compile_)
    driver.submit(driver.request("bad", PROMPTS[2], max_tokens=50, grammar=Grammar("regex", "a")))
    driver.run(fleet(driver))
    assert driver.errors["bad"].status == 500 and "OverflowError" in driver.errors["bad"].message
    assert {key: out.tokens for key, out in driver.outputs.items()} == healthy
    driver.close()


def test_waiting_for_a_grammar_is_no_reason_to_restart(monkeypatch):
    """The loop beats while it only waits for a grammar, which has a deadline of its own, so the watchdog lets it live.

    Nothing here depends on the speed of the machine: the compilation ends only after the test, and the loop once the
    request was refused.
    """
    driver, sent, inbox = Driver(grammar_timeout=0.6), [], queue.SimpleQueue()
    driver.engine.compiling.grammars._tried_by = "tests.decoding.slow_compiler:SlowCompiler"
    beats_before_refusal = []

    def send(frame: bytes) -> None:
        sent.append(frame)
        if b"grammar_timeout" in frame:
            inbox.put(messages.Stop())

    def beat() -> None:
        if driver.engine.scheduler.num_blocked:
            beats_before_refusal.append(driver.engine.stats().step)

    nothing = lambda *words: None  # noqa: E731
    flight = SimpleNamespace(launch=nothing, idle=nothing, busy=nothing, stepped=nothing, beat=beat)
    loop = process.Loop(driver.engine, SimpleNamespace(send=send), inbox, flight, 0.1)
    inbox.put(messages.Submit(1, driver.request("g", PROMPTS[2], max_tokens=50, grammar=Grammar("regex", "slow"))))
    guard = threading.Timer(50, inbox.put, [messages.Stop()])
    guard.start()
    loop.run()
    guard.cancel()
    assert any(b"grammar_timeout" in frame for frame in sent), "the request was not refused"
    assert len(beats_before_refusal) >= 3 and set(beats_before_refusal) == {0}, (
        "the loop must beat although no step is launched"
    )
    driver.close()


def test_a_grammar_is_accepted_when_it_is_compiled():
    """The acceptance waits for the compilation so that a refusal is a status, even of a stream, whose headers leave
    with it."""
    driver = Driver(max_num_seqs=4)

    def events(pattern: str, of: list) -> list[str]:
        first = driver.engine.submit(
            driver.request(pattern, PROMPTS[2], max_tokens=4, grammar=Grammar("regex", pattern))
        )
        while driver.engine.requests.live:
            of += driver.engine.step()
        return [e.kind for e in first]

    good, bad = [], []
    assert events("[ab]{9}", good) == events("(unclosed", bad) == []
    assert [e.kind for e in good][:2] == ["accepted", "tokens"] and good[-1].finish_reason == "length"
    assert [e.kind for e in bad] == ["error"]
    driver.engine.submit(driver.request("left", PROMPTS[2], max_tokens=4, n=2, grammar=Grammar("regex", "a*")))
    assert [e.kind for e in driver.engine.cancel("left")] == ["accepted", "tokens", "tokens"]
    again = driver.request("again", PROMPTS[2], max_tokens=4, grammar=Grammar("regex", "a*"))
    again.epoch = 1
    assert driver.engine.submit(again) == driver.engine.cancel("again", 7) == [], (
        "the engine's process died before it was compiled"
    )
    driver.engine.cancel("again")
    again.emitted = [[5]]
    assert [e.kind for e in driver.engine.submit(again)] == ["accepted"], "the process died after its first token"
    driver.engine.cancel("again")
    driver.close()


def test_the_queue_is_bounded():
    driver = Driver(max_num_seqs=2, max_queued_requests=4)
    for i in range(8):
        driver.submit(driver.request(f"q{i}", PROMPTS[1], max_tokens=4))
    refused = [e for e in driver.errors.values() if e.status == 429]
    assert refused and all(e.retry_after >= 1 for e in refused)
    while driver.engine.has_work():
        driver.step()
    driver.assert_clean()
    driver.close()


def test_a_prompt_of_many_branches_is_queued_once():
    driver = Driver(max_num_seqs=2, max_queued_tokens=60)
    driver.submit(driver.request("many", PROMPTS[7], max_tokens=4, n=8))  # 25 tokens, and one for each further branch
    driver.submit(driver.request("fits", PROMPTS[7], max_tokens=4))
    driver.submit(driver.request("no", PROMPTS[7], max_tokens=4))
    assert list(driver.errors) == ["no"] and driver.errors["no"].status == 429
    while driver.engine.has_work():
        driver.step()
    driver.assert_clean()
    assert driver.engine.scheduler.backlog.prompt_tokens == 0
    driver.close()


def test_a_duplicate_id_is_refused_and_the_first_goes_on():
    driver = Driver()
    driver.submit(driver.request("same", PROMPTS[2], max_tokens=4, temperature=0, ignore_eos=True))
    events = driver.engine.submit(driver.request("same", PROMPTS[3], max_tokens=4))
    assert [e.status for e in events] == [409]
    while driver.engine.has_work():
        driver.step()
    assert len(driver.outputs["same", 0].tokens) == 4
    driver.close()


def test_replay_continues_where_the_last_epoch_stopped(healthy, mode):
    """After a crash the client submits the same request, with the tokens it has, to a new engine."""
    driver = Driver(**mode, max_num_seqs=8)
    for i, request in enumerate(fleet(driver)):
        request.epoch, request.emitted = 1, [healthy[f"r{i}", 0][:i]]
        driver.outputs[f"r{i}", 0] = Output(tokens=list(healthy[f"r{i}", 0][:i]))
        driver.submit(request)
    while driver.engine.has_work():
        driver.step()
    assert {key: out.tokens for key, out in driver.outputs.items()} == healthy
    driver.close()


def test_a_replay_whose_first_branch_has_ended_computes_its_prompt_once():
    params = dict(max_tokens=6, n=4, temperature=1, seed=3, ignore_eos=True)
    driver = Driver(max_num_seqs=8, enable_prefix_caching=False)
    whole = driver.run([driver.request("r", PROMPTS[7], **params)])
    again = driver.request("again", PROMPTS[7], **params)
    again.epoch, again.ended, again.emitted = (
        1,
        [0],
        [whole["r", 0].tokens, *(whole["r", b].tokens[:2] for b in (1, 2, 3))],
    )
    driver.outputs = {("again", b): Output(tokens=again.emitted[b][:]) for b in (1, 2, 3)}
    driver.submit(again)
    assert driver.engine.scheduler.backlog.prompt_tokens == len(PROMPTS[7]) + 2 + 2 * 3, (
        "each branch but the first also computes the prompt's last token"
    )
    rows = 0
    while driver.engine.has_work():
        driver.step()
        rows += driver.engine._stats.step_rows
    assert rows == len(PROMPTS[7]) + 2 + 2 * 3 + 3 * 3, "each of three branches decodes three times"
    assert all(driver.outputs["again", b].tokens == whole["r", b].tokens for b in (1, 2, 3))
    driver.close()


@pytest.mark.parametrize("where", ["copy", "forward"])
def test_a_page_copy_survives_a_lack_of_memory(where, monkeypatch):
    """A fork's first span brings a page copy. Whether memory runs out in the copy or in the step around it, every
    branch that goes on has its page."""

    def run(fault) -> dict:
        driver = Driver(max_num_seqs=8)
        with monkeypatch.context() as m:
            fault(driver, m)
            driver.run(
                [driver.request("forked", PROMPTS[6], temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, n=3)]
            )
        assert not driver.errors
        driver.close()
        return {key: out.tokens for key, out in driver.outputs.items()}

    raised = []

    def in_copy(driver, m):
        real = driver.engine.runner.pool.copy

        def copy(copies):
            if len(copies) > 1:
                raised.append(len(copies))
                raise torch.OutOfMemoryError("injected")
            real(copies)

        m.setattr(driver.engine.runner.pool, "copy", copy)

    def in_forward(driver, m):
        def fault(plan):
            if len(raised) < 3 and any(s.seq.branch for s in plan.spans):  # the plan with the copies, and its halves
                raised.append(len(plan.spans))
                raise torch.OutOfMemoryError("injected")

        # A span of one row that does not fit is hopeless, so only the first tries fail.
        inject(driver, m, lambda plan: len(plan.spans) > 1 and fault(plan))

    assert run({"copy": in_copy, "forward": in_forward}[where]) == run(lambda driver, m: None)
    assert raised


def test_a_page_copy_that_never_fits_fails_its_request_alone(healthy, monkeypatch, mode):
    driver = Driver(**mode, max_num_seqs=12)
    with monkeypatch.context() as m:

        def copy(copies):
            if copies:
                raise torch.OutOfMemoryError("injected")

        m.setattr(driver.engine.runner.pool, "copy", copy)
        driver.run(
            [*fleet(driver), driver.request("forked", PROMPTS[6], temperature=1.0, max_tokens=12, ignore_eos=True, n=3)]
        )
    assert {name: e.code for name, e in driver.errors.items()} == {"forked": "out_of_memory"}
    assert {key: driver.outputs[key].tokens for key in healthy} == healthy
    driver.close()


def test_a_failed_branch_takes_its_siblings_along(monkeypatch, mode):
    """No branch of a request is computed after one has failed, and its siblings in the same step do no harm."""
    driver = Driver(**mode, max_num_seqs=8)
    launched = []

    def fault(plan):
        launched.append([s.seq for s in plan.spans])
        if any(s.seq.branch == 0 and s.seq.request.id == "forked" and s.seq.num_output >= 3 for s in plan.spans):
            raise ValueError("injected")

    inject(driver, monkeypatch, fault)
    driver.run(
        [
            driver.request("forked", PROMPTS[6], max_tokens=12, ignore_eos=True, n=3, seed=1),
            driver.request("other", PROMPTS[5], max_tokens=12, ignore_eos=True, seed=2),
        ]
    )
    assert list(driver.errors) == ["forked"] and len(driver.outputs["other", 0].tokens) == 12
    alone = next(
        i
        for i, seqs in enumerate(launched)
        if len(seqs) == 1 and seqs[0].request.id == "forked" and seqs[0].num_output >= 3
    )
    assert all(seq.request.id == "other" for seqs in launched[alone + 1 :] for seq in seqs)
    driver.close()


@pytest.mark.parametrize("max_tokens, spare", [(0, 0), (1, 0), (8, 7)])
def test_a_request_that_can_never_fit_is_refused_at_once(max_tokens, spare):
    """A request may need all of the pool. ``spare``: slots that the output needs; its last token is never computed."""
    driver = Driver(num_pages=5, page_slots=16, max_model_len=64)
    capacity = driver.engine.info.kv_capacity_tokens
    assert capacity == 64

    def request(name, length):
        request = driver.request(name, [300] * 10, max_tokens=4, ignore_eos=True)
        request.prompt_ids, request.max_tokens = [300 + i for i in range(length)], max_tokens
        return request

    driver.submit(request("fits", capacity - spare))
    driver.submit(request("not", capacity - spare + 1))
    assert driver.errors["not"].status == 400 and driver.errors["not"].code == "context_length_exceeded"
    driver.run([])
    assert list(driver.errors) == ["not"] and driver.outputs["fits", 0].finish_reason == "length"
    driver.close()


def test_the_first_tokens_say_how_long_the_request_was_queued():
    driver = Driver(max_num_seqs=1)
    requests = [driver.request(f"w{i}", PROMPTS[2], max_tokens=3, ignore_eos=True, n=1 + i) for i in range(2)]
    for request in requests:
        request.arrival = time.monotonic()
    driver.run(requests)
    first, second = (driver.outputs[f"w{i}", 0].queued for i in range(2))
    assert 0 <= first <= second and driver.outputs["w1", 1].queued is None
    driver.close()


def test_a_grammar_that_waits_too_long_for_its_turn_gets_503(monkeypatch):
    """The grammars before it never end, so that it can only wait; the one whose turn came is not failed for waiting."""
    monkeypatch.setattr("kvasir.engine.compiling.PATIENCE_SECONDS", 0.0)
    driver = Driver(grammar_timeout=600.0)
    driver.engine.compiling.grammars._tried_by = "tests.decoding.slow_compiler:SlowCompiler"
    for i in range(NUM_TURNS):
        driver.submit(driver.request(f"slow{i}", PROMPTS[2], max_tokens=5, grammar=Grammar("regex", f"slow{i}")))
    driver.submit(driver.request("late", PROMPTS[2], max_tokens=5, grammar=Grammar("regex", "a")))
    for _ in range(3):
        driver.step()
    assert driver.errors.keys() == {"late"}
    assert (driver.errors["late"].status, driver.errors["late"].code) == (503, "grammars_busy")
    driver.close()


class Panicking:
    """A library whose every call panics, as its Rust code does: with what is no Exception."""

    class PanicException(BaseException):
        pass

    def __getattr__(self, name):
        def call(*args):
            raise self.PanicException("a bug")

        return call


def test_a_panic_on_a_step_fails_its_request_alone(healthy, monkeypatch):
    driver = Driver(max_num_seqs=8)
    monkeypatch.setattr(
        GrammarCompiler, "compile", lambda self, grammar: Matcher(Panicking(), self.vocab_size, self.eos_ids)
    )
    driver.submit(driver.request("bad", PROMPTS[2], max_tokens=50, grammar=Grammar("regex", "a")))
    driver.run(fleet(driver))
    assert "panicked" in driver.errors["bad"].message
    assert {key: out.tokens for key, out in driver.outputs.items()} == healthy
    driver.close()
