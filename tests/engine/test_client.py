"""The asynchronous engine against a fake core in a real process: faults, supervision, drain. No torch, no model."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import signal
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvasir.config import EngineConfig, Settings
from kvasir.engine import client as client_module
from kvasir.engine import journal
from kvasir.engine.client import AsyncEngine
from kvasir.errors import ConfigError, RequestError
from kvasir.types import Event, Grammar, Request, SamplingParams
from tests.engine.fake_core import expected

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(ROOT / "src"))))


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path, monkeypatch):
    """No descriptor, process or folder outlives its engine."""
    folder = tmp_path / "private"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert list(folder.iterdir()) == []
    with contextlib.suppress(ChildProcessError):
        pid, _ = os.waitpid(-1, os.WNOHANG)
        assert pid == 0, "an engine process was not reaped"
        pytest.fail("an engine process is left")


def request(number: int = 0, *, max_tokens: int = 20, n: int = 1, faults: str = "", prompt: int = 3, **more) -> Request:
    return Request(id=f"r{number}", prompt_ids=[number] * prompt, params=SamplingParams(n=n, **more), seed=number, max_tokens=max_tokens,
                   tenant=faults)


@contextlib.asynccontextmanager
async def engine(core: str = "FakeCore", drain: float = 0.0, **options):
    it = AsyncEngine(EngineConfig.of(**{"watchdog": 20.0, **options}), factory=f"tests.engine.fake_core:{core}")
    await it.start()
    try:
        yield it
    finally:
        await it.stop(drain)


class Reader:
    """Reads one request to its end and checks the contract of its events."""

    def __init__(self, it: AsyncEngine, wanted: Request) -> None:
        self.wanted, self.tokens, self.reasons = wanted, [[] for _ in range(wanted.params.n)], {}
        self.error: RequestError | None = None
        self.accepted = self.events = 0
        self.task = asyncio.create_task(self._read(it))

    async def _read(self, it: AsyncEngine) -> Reader:
        try:
            async for event in it.generate(self.wanted):
                self._take(event)
        except RequestError as e:
            self.error = e
        return self

    def _take(self, event: Event) -> None:
        assert event.kind != "error"
        if event.kind == "accepted":
            assert not self.accepted and not self.events
            self.accepted += 1
            return
        self.events += 1
        assert self.accepted and event.branch not in self.reasons, "tokens after the end of a branch"
        assert event.index == len(self.tokens[event.branch]), "a gap or a duplicate"
        self.tokens[event.branch] += event.token_ids
        if event.finish_reason:
            self.reasons[event.branch] = event.finish_reason

    def check(self) -> None:
        """The right tokens, and one terminal reply."""
        assert self.error is None, (self.wanted, self.error)
        assert self.tokens == expected(self.wanted)
        assert self.reasons == {b: "length" for b in range(self.wanted.params.n)}

    def check_prefix(self) -> None:
        for mine, right in zip(self.tokens, expected(self.wanted)):
            assert mine == right[:len(mine)]


async def until(condition, seconds: float = 20.0) -> None:
    for _ in range(int(seconds / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen")


def run(coroutine) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


# ------------------------------------------------------------------------------------------------------------ plain use


def test_requests_give_their_tokens_and_the_model_is_known():
    async def body():
        async with engine() as it:
            assert it.info.name == "fake" and it.info.config == {"layers": [1, None, "x"]}
            assert {"spawn", "import", "build", "fake"} <= set(it.startup)
            assert it.health().live and it.health().ready and it.health().reason == ""
            readers = [Reader(it, request(i, n=1 + i % 3, prompt=1 + 40 * i)) for i in range(12)]
            for reader in readers:
                (await reader.task).check()
            await until(lambda: it.stats().step >= 20 and it.stats().num_running == 0)
            assert it.num_restarts == 0
        assert it.health().reason == "stopped" and not it.health().ready

    run(body())


def test_the_process_can_start_before_the_event_loop():
    it = AsyncEngine(EngineConfig(), factory="tests.engine.fake_core:FakeCore")
    it.start_process()
    pid = it._child.pid
    it.start_process()
    assert it._child.pid == pid and it.health().reason == "starting"

    async def body():
        await it.start()
        (await Reader(it, request()).task).check()
        await it.stop(0)

    run(body())


def test_the_client_needs_no_torch():
    code = "import sys, kvasir.engine.client; assert not {'torch', 'numpy', 'transformers', 'fastapi'} & set(sys.modules), sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_socket_is_private(tmp_path):
    async def body():
        async with engine():
            (folder,) = (tmp_path / "private").iterdir()
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert stat.S_IMODE((folder / "flight").stat().st_mode) == 0o600

    run(body())


def test_the_working_folder_cannot_shadow_a_module(tmp_path, monkeypatch):
    (tmp_path / "msgspec.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)

    async def body():
        async with engine() as it:
            (await Reader(it, request()).task).check()

    run(body())


def test_a_server_key_does_not_reach_the_engine_process(monkeypatch):
    sent = []
    encode = msgspec.msgpack.encode
    monkeypatch.setattr("msgspec.msgpack.encode", lambda message: sent.append(encode(message)) or sent[-1])

    async def body():
        it = AsyncEngine(Settings.of(api_key=["secret"], served_model_name="needle"), factory="tests.engine.fake_core:FakeCore")
        await it.start()
        (await Reader(it, request()).task).check()
        await it.stop(0)

    run(body())
    assert b"needle" in b"".join(sent) and b"secret" not in b"".join(sent)


# ---------------------------------------------------------------------------------------------------------- refusals


def test_refusals_of_the_core_and_bad_values():
    async def body():
        async with engine(max_queued_requests=2, max_num_seqs=1, core="SlowCore") as it:
            with pytest.raises(RequestError) as caught:
                await anext(it.generate(request(1, faults="refuse")))
            assert (caught.value.status, caught.value.param, caught.value.code) == (422, "tenant", "refused")
            for bad in (request(2, seed="x"), request(2, temperature="hot"), request(2, grammar=Grammar(kind="lisp")), request(2, stop=["\ud800"])):
                with pytest.raises(RequestError) as caught:
                    await anext(it.generate(bad))
                assert caught.value.status == 400
            for ids in ([1.5], [True], ["1"], [1 << 70], None):
                with pytest.raises(RequestError) as caught:
                    await anext(it.generate(Request(id="r2", prompt_ids=ids, params=SamplingParams(), seed=0, max_tokens=1)))
                assert caught.value.status == 400
            readers = []
            for i in range(10, 16):
                readers.append(Reader(it, request(i, max_tokens=60)))
                await until(lambda: readers[-1].accepted or readers[-1].error)
            for reader in readers:
                await reader.task
            refused = [r for r in readers if r.error]
            assert 1 <= len(refused) <= 4 and all((r.error.status, r.error.retry_after) == (429, 2.0) for r in refused)
            [r.check() for r in readers if not r.error]
            assert it.num_restarts == 0

    run(body())


def test_a_request_too_long_for_a_frame_is_413(monkeypatch):
    monkeypatch.setattr("kvasir.engine.ipc.MAX_FRAME_BYTES", 20_000)

    async def body():
        async with engine() as it:
            with pytest.raises(RequestError) as caught:
                await anext(it.generate(request(1, prompt=30_000)))
            assert caught.value.status == 413
            (await Reader(it, request(2, prompt=100)).task).check()

    run(body())


def test_an_id_in_use_is_refused_and_free_again_after_the_end():
    async def body():
        async with engine("SlowCore") as it:
            first = Reader(it, request(1, max_tokens=50))
            await until(lambda: first.events)
            with pytest.raises(RequestError) as caught:
                await anext(it.generate(request(1)))
            assert caught.value.status == 409
            (await first.task).check()
            (await Reader(it, request(1)).task).check()

    run(body())


def test_a_reused_id_never_sees_the_events_of_its_predecessor():
    async def body():
        async with engine("SlowCore") as it:
            for round_ in range(30):
                old = it.generate(request(1, max_tokens=500))
                for _ in range(1 + round_ % 4):
                    await anext(old)
                await old.aclose()
                wanted = Request(id="r1", prompt_ids=[round_], params=SamplingParams(), seed=99, max_tokens=3)
                while True:
                    reader = await Reader(it, wanted).task
                    if not reader.error:
                        break
                    assert reader.error.status == 409
                    await asyncio.sleep(0.002)
                reader.check()

    run(body())


@pytest.mark.parametrize(("core", "words"), [("refusing", "Try --gpu-memory-utilization 0.8"), ("broken", "a bug in the loader"),
                                             ("vanishing", "exited with status 9"), ("babbling", "frame"), ("no_such_core", "no_such_core"),
                                             ("sleeping", "not ready within 1.5 s")])
def test_a_failed_start_is_a_config_error(core, words):
    async def body():
        it = AsyncEngine(EngineConfig.of(startup_timeout=1.5 if core == "sleeping" else 60.0), factory=f"tests.engine.fake_core:{core}")
        with pytest.raises(ConfigError, match=words):
            await it.start()
        with pytest.raises(RequestError) as caught:
            await anext(it.generate(request()))
        assert caught.value.status == 503 and not it.health().ready
        await it.stop()

    run(body())


def test_a_start_that_is_cancelled_leaves_nothing():
    async def body():
        it = AsyncEngine(EngineConfig(), factory="tests.engine.fake_core:sleeping")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(it.start(), 0.3)

    run(body())


# ------------------------------------------------------------------------------------------------------------- cancel


@pytest.mark.parametrize("state", ["waiting", "blocked", "running", "restarting", "finished", "unknown"])
def test_cancel_in_every_state(state):
    async def body():
        async with engine("SlowCore", max_num_seqs=1) as it:
            other = Reader(it, request(1, max_tokens=40))
            await until(lambda: other.events)
            if state == "unknown":
                assert not await it.cancel("nobody")
            elif state == "finished":
                await other.task
                assert not await it.cancel("r1")
            elif state == "running":
                assert await it.cancel("r1")
                await other.task
                other.check_prefix()
                assert other.error is None and other.reasons == {0: "cancelled"}
            else:
                reader = Reader(it, request(2, n=2, max_tokens=500, faults="block@30" if state == "blocked" else ""))
                await until(lambda: reader.accepted)
                if state == "restarting":
                    os.kill(it._child.pid, signal.SIGKILL)
                    await until(lambda: not it.health().ready)
                assert await it.cancel("r2", 1) and await it.cancel("r2")
                await reader.task
                assert reader.error is None and reader.reasons == {0: "cancelled", 1: "cancelled"}
                (await other.task).check()
            (await Reader(it, request(3)).task).check()
            await until(lambda: it.stats().num_running == 0)
            assert len(it._journal) == 0 and not it._outboxes

    run(body())


def test_many_are_cancelled_in_one_message():
    async def body():
        async with engine("SlowCore") as it:
            first, second, third = (Reader(it, request(i, n=2, max_tokens=500 if i < 3 else 30)) for i in (1, 2, 3))
            await until(lambda: first.events and second.events and third.events)
            sent = []
            send, it._child.send = it._child.send, lambda frame: (sent.append(frame), send(frame))[1]
            await it.cancel_many([("r1", None), ("nobody", None), ("r2", 0), ("r3", 7)])
            assert len(sent) == 1
            await until(lambda: 0 in second.reasons)
            await it.cancel_many([("r2", 0), ("r2", 1)])
            await asyncio.gather(first.task, second.task, third.task)
            assert first.reasons == second.reasons == {0: "cancelled", 1: "cancelled"} and third.reasons == {0: "length", 1: "length"}

    run(body())


def test_cancel_one_branch_leaves_the_others():
    async def body():
        async with engine("SlowCore") as it:
            reader = Reader(it, request(1, n=3, max_tokens=60))
            await until(lambda: reader.events > 9)
            assert await it.cancel("r1", 1)
            await until(lambda: 1 in reader.reasons)
            assert not await it.cancel("r1", 1)
            os.kill(it._child.pid, signal.SIGKILL)  # the replay must not bring it back
            await reader.task
            assert reader.reasons == {0: "length", 1: "cancelled", 2: "length"} and reader.error is None
            reader.check_prefix()
            assert [len(t) for t in reader.tokens][::2] == [60, 60] and len(reader.tokens[1]) < 60

    run(body())


def test_closing_the_iterator_cancels():
    async def body():
        async with engine("SlowCore") as it:
            for i, steps in enumerate([1, 2, 5]):
                events = it.generate(request(i, max_tokens=4000, n=2))
                for _ in range(steps):
                    await anext(events)
                await events.aclose()
            reader = Reader(it, request(9, max_tokens=4000))
            await until(lambda: reader.events)
            reader.task.cancel()
            await until(lambda: it.stats().step > 0 and it.stats().num_running == 0)
            assert len(it._journal) == 0 and not it._outboxes

    run(body())


# ---------------------------------------------------------------------------------------------------------- slow reader


def test_a_slow_reader_loses_nothing_and_blocks_nobody(monkeypatch):
    monkeypatch.setattr(client_module, "OUTBOX_EVENTS", 16)

    async def body():
        async with engine() as it:
            slow = it.generate(request(1, n=2, max_tokens=2000))
            first = await anext(slow)
            assert first.kind == "accepted"
            (await Reader(it, request(2, max_tokens=2500)).task).check()  # the other request runs past it meanwhile
            await until(lambda: len(it._journal) == 0)
            (outbox,) = it._outboxes.values()
            assert len(outbox) <= 16 + 2
            tokens, reasons = [[], []], []
            async for event in slow:
                assert event.index == len(tokens[event.branch])
                tokens[event.branch] += event.token_ids
                reasons += [event.finish_reason] if event.finish_reason else []
            assert tokens == expected(request(1, n=2, max_tokens=2000)) and reasons == ["length"] * 2

    run(body())


# ------------------------------------------------------------------------------------------------- death and restart


def test_a_killed_process_loses_no_token():
    async def body():
        async with engine("SlowCore") as it:
            readers = [Reader(it, request(i, n=1 + i % 3, max_tokens=40 + i, prompt=1 + 9 * i)) for i in range(32)]
            await until(lambda: sum(r.events for r in readers) > 300)
            os.kill(it._child.pid, signal.SIGKILL)
            await until(lambda: not it.health().ready)
            assert it.health().live and it.health().reason
            late = Reader(it, request(99))
            for reader in [*readers, late]:
                (await reader.task).check()
            assert it.num_restarts == 1 and it.num_quarantined == 0 and it.health().ready

    run(body())


def test_killed_again_and_again():
    async def body():
        async with engine("SlowCore") as it:
            readers = [Reader(it, request(i, n=1 + i % 2, max_tokens=80)) for i in range(8)]
            for _ in range(8):
                await until(lambda: it.health().ready)
                seen = sum(r.events for r in readers)
                await until(lambda seen=seen: sum(r.events for r in readers) > seen + 20)
                os.kill(it._child.pid, signal.SIGKILL)
                await until(lambda: not it.health().ready)
            for reader in readers:
                (await reader.task).check()
            assert it.num_restarts == 8 and it.num_quarantined == 0

    run(body())


def test_killed_while_it_restarts():
    async def body():
        async with engine("SlowCore") as it:
            readers = [Reader(it, request(i, max_tokens=40)) for i in range(4)]
            await until(lambda: all(r.events for r in readers))
            for _ in range(3):
                child = it._child
                os.kill(child.pid, signal.SIGKILL)
                await until(lambda child=child: it._child is not child)
            for reader in readers:
                (await reader.task).check()

    run(body())


def test_duplicates_and_old_epochs_are_dropped():
    async def body():
        async with engine() as it:
            (await Reader(it, request(1, faults="twice@5,twice@9")).task).check()

    run(body())


def test_a_gap_fails_one_request_only():
    async def body():
        async with engine("SlowCore") as it:
            healthy = Reader(it, request(2, max_tokens=60))
            bad = await Reader(it, request(1, max_tokens=50, faults="gap@5")).task
            assert (bad.error.status, bad.error.code, len(bad.tokens[0])) == (500, "lost_tokens", 5)
            (await healthy.task).check()
            await until(lambda: len(it._journal) == 0)
            assert it.num_restarts == 0

    run(body())


def test_an_event_that_cannot_be_sent_fails_one_request_only():
    async def body():
        async with engine("SlowCore") as it:
            healthy = Reader(it, request(2, n=2, max_tokens=60))
            bad = await Reader(it, request(1, max_tokens=50, faults="unsendable@5")).task
            assert (bad.error.status, bad.error.code, len(bad.tokens[0])) == (500, "reply_not_sendable", 5)
            (await healthy.task).check()
            assert it.num_restarts == 0

    run(body())


@pytest.mark.parametrize(("how", "core"), [("exit", "SlowCore"), ("raise", "SilentCore"),
                                           pytest.param("abort", "SilentCore", marks=pytest.mark.slow)])
def test_a_poisonous_request_is_quarantined_alone(how, core):
    async def body():
        async with engine(core) as it:
            readers = [Reader(it, request(i, n=1 + i % 2, max_tokens=30)) for i in range(31)]
            bad = Reader(it, request(40, max_tokens=30, faults=f"{how}@7"))
            for reader in readers:
                (await reader.task).check()
            await bad.task
            assert (bad.error.status, bad.error.code) == (500, "quarantined") and bad.accepted
            bad.check_prefix()
            assert len(bad.tokens[0]) == 7 and it.num_quarantined == 1 and it.num_restarts == 2
            (await Reader(it, request(50)).task).check()

    run(body())


def test_a_request_that_crashes_while_it_is_queued_is_quarantined():
    async def body():
        async with engine("SlowCore") as it:
            healthy = [Reader(it, request(i, max_tokens=30)) for i in range(4)]
            bad = await Reader(it, request(9, faults="exit@submit")).task
            assert bad.error.code == "quarantined" and not bad.accepted
            for reader in healthy:
                (await reader.task).check()

    run(body())


def test_a_request_that_gets_the_process_killed_is_quarantined():
    """Like one that makes the kernel run out of memory. A kill is weaker evidence, so it takes longer."""
    async def body():
        async with engine("SlowCore") as it:
            healthy = [Reader(it, request(i, max_tokens=30)) for i in range(6)]
            bad = await Reader(it, request(9, faults="kill@3")).task
            assert bad.error.code == "quarantined" and it.num_restarts == 4
            for reader in healthy:
                (await reader.task).check()

    run(body())


def test_a_request_that_crashes_now_and_then_is_quarantined_in_the_end():
    async def body():
        async with engine("SlowCore") as it:
            healthy = [Reader(it, request(i, max_tokens=60)) for i in range(3)]
            bad = Reader(it, request(9, max_tokens=60, faults=",".join(f"exit@{i}" for i in range(6, 60, 3))))
            await bad.task
            assert bad.error.code == "quarantined"
            for reader in healthy:
                (await reader.task).check()

    run(body())


def test_a_crash_that_happens_once_costs_nobody_anything(tmp_path):
    async def body():
        async with engine("SlowCore") as it:
            readers = [Reader(it, request(i, max_tokens=30, faults=f"exit@{5 + 9 * i}!{tmp_path / str(i)}" if i < 3 else "")) for i in range(8)]
            for reader in readers:
                (await reader.task).check()
            assert it.num_restarts == 3 and it.num_quarantined == 0

    run(body())


def test_an_engine_that_cannot_come_back_fails_everything_with_503(tmp_path, monkeypatch):
    monkeypatch.setattr(client_module, "MAX_BACKOFF_SECONDS", 0.05)

    async def body():
        async with engine("once", model=str(tmp_path / "started")) as it:
            readers = [Reader(it, request(i, max_tokens=200)) for i in range(3)]
            await until(lambda: all(r.events for r in readers))
            os.kill(it._child.pid, signal.SIGKILL)
            for reader in readers:
                await reader.task
                assert (reader.error.status, reader.error.code) == (503, "engine_down") and reader.error.retry_after
                reader.check_prefix()
            assert not it.health().live and not it.health().ready and "5 times" in it.health().reason
            with pytest.raises(RequestError) as caught:
                await anext(it.generate(request(7)))
            assert caught.value.status == 503 and len(it._journal) == 0

    run(body())


def test_a_set_up_that_became_wrong_is_not_tried_again(tmp_path):
    async def body():
        async with engine("moody", model=str(tmp_path / "started")) as it:
            reader = Reader(it, request(1, max_tokens=200))
            await until(lambda: reader.events)
            os.kill(it._child.pid, signal.SIGKILL)
            assert (await reader.task).error.code == "engine_down"
            assert it.health().reason == "the model folder is gone" and not it.health().live

    run(body())


def test_a_bug_of_the_supervisor_leaves_nobody_waiting(monkeypatch):
    async def fail(self, why):
        raise ZeroDivisionError("a bug in the client")

    async def body():
        async with engine("SlowCore") as it:
            reader = Reader(it, request(1, max_tokens=500))
            await until(lambda: reader.events)
            monkeypatch.setattr(AsyncEngine, "_bury", fail)
            os.kill(it._child.pid, signal.SIGKILL)
            assert (await reader.task).error.code == "engine_down" and "a bug in the client" in it.health().reason

    run(body())


def test_the_queue_is_bounded_while_the_engine_restarts():
    async def body():
        async with engine("SlowCore", max_queued_requests=3, max_num_seqs=2) as it:
            os.kill(it._child.pid, signal.SIGKILL)
            await until(lambda: not it.health().ready)
            readers = [Reader(it, request(i)) for i in range(9)]
            for reader in readers:
                await reader.task
            refused = [r.error for r in readers if r.error]
            assert len(refused) == 4 and all((e.status, e.code) == (503, "overloaded") and e.retry_after for e in refused)
            [r.check() for r in readers if not r.error]

    run(body())


# --------------------------------------------------------------------------------------------------------- the watchdog


def test_a_stopped_process_is_replaced():
    async def body():
        async with engine("SlowCore", watchdog=1.5) as it:
            readers = [Reader(it, request(i, max_tokens=60)) for i in range(4)]
            await until(lambda: all(r.events > 3 for r in readers))
            os.kill(it._child.pid, signal.SIGSTOP)
            await until(lambda: not it.health().ready)
            assert "no progress" in it.health().reason
            for reader in readers:
                (await reader.task).check()

    run(body())


def test_an_idle_stopped_process_is_noticed_before_the_next_request():
    async def body():
        async with engine(watchdog=1.5) as it:
            await asyncio.sleep(0.1)
            os.kill(it._child.pid, signal.SIGSTOP)
            await until(lambda: it.num_restarts and it.health().ready)
            (await Reader(it, request(1)).task).check()

    run(body())


def test_a_hanging_step_is_ended_its_stacks_shown_and_its_request_quarantined(capfd):
    async def body():
        async with engine("SlowCore", watchdog=1.0) as it:
            healthy = [Reader(it, request(i, max_tokens=30)) for i in range(5)]
            bad = await Reader(it, request(9, max_tokens=30, faults="hang@4")).task
            assert bad.error.code == "quarantined" and len(bad.tokens[0]) == 4
            for reader in healthy:
                (await reader.task).check()

    run(body())
    assert "in die" in capfd.readouterr().err  # the function that hangs


def test_a_core_that_has_work_and_does_none_is_stuck():
    async def body():
        async with engine("StuckCore", watchdog=1.0) as it:
            (await Reader(it, request(1, max_tokens=10)).task).check()  # three tokens a life
            assert it.num_restarts >= 3

    run(body())


def test_blocked_requests_and_idle_time_are_no_reason_to_restart():
    async def body():
        async with engine() as it:
            for faults in ("block@0.5", ""):
                reader = Reader(it, request(1, faults=faults))
                await until(lambda reader=reader: reader.accepted)
                seen = it._child.flight.progress
                await until(lambda seen=seen: it._child.flight.progress > seen + 2)
                (await reader.task).check()
            assert it.num_restarts == 0

    run(body())


# --------------------------------------------------------------------------------------------------------------- drain


def test_drain_lets_running_requests_finish_and_refuses_new_ones():
    async def body():
        async with engine("SlowCore", drain=10.0) as it:
            readers = [Reader(it, request(i, max_tokens=60)) for i in range(4)]
            await until(lambda: all(r.accepted for r in readers))
            stopping = asyncio.create_task(it.stop(20.0))
            await asyncio.sleep(0)
            assert it.health().live and not it.health().ready and it.health().reason == "draining"
            with pytest.raises(RequestError) as caught:
                await anext(it.generate(request(9)))
            assert (caught.value.status, caught.value.code) == (503, "shutting_down") and caught.value.retry_after
            for reader in readers:
                (await reader.task).check()
            await stopping

    run(body())


def test_what_the_drain_leaves_is_journalled_answered_and_can_be_resumed(tmp_path):
    path = tmp_path / "journal.jsonl"

    async def body():
        async with engine("SlowCore", journal=str(path)) as it:
            readers = [Reader(it, request(i, n=2, max_tokens=2000, logit_bias={5: 0.5}, faults="")) for i in range(3)]
            short = Reader(it, request(8, max_tokens=5))
            await until(lambda: all(r.events for r in readers))
            (await short.task).check()
            slow, hasty = asyncio.create_task(it.stop(60.0)), asyncio.create_task(it.stop(0.1))  # a second SIGTERM shortens it
            await asyncio.gather(slow, hasty)
            for reader in readers:
                assert ((await reader.task).error.status, reader.error.code) == (503, "shutting_down")
                reader.check_prefix()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        left = journal.load(path)
        assert [r.id for r in left] == ["r0", "r1", "r2"] and [r.emitted for r in left] == [r.tokens for r in readers]
        async with engine() as it:
            for resumed, reader in zip(left, readers):
                tokens = [list(t) for t in resumed.emitted]
                async for event in it.generate(resumed):
                    tokens[event.branch] += event.token_ids
                assert tokens == expected(reader.wanted)

    run(body())


def test_a_journal_that_cannot_be_written_does_not_keep_readers_waiting(tmp_path):
    async def body():
        async with engine("SlowCore", journal=str(tmp_path / "no" / "folder")) as it:
            reader = Reader(it, request(1, max_tokens=2000))
            await until(lambda: reader.events)
            await it.stop(0)
            assert (await reader.task).error.code == "shutting_down"

    run(body())


def test_drain_survives_a_death():
    async def body():
        async with engine("SlowCore") as it:
            readers = [Reader(it, request(i, max_tokens=60)) for i in range(4)]
            await until(lambda: all(r.events for r in readers))
            stopping = asyncio.create_task(it.stop(20.0))
            await asyncio.sleep(0.01)
            os.kill(it._child.pid, signal.SIGKILL)
            for reader in readers:
                (await reader.task).check()
            await stopping

    run(body())


def test_stop_in_every_state(tmp_path, monkeypatch):
    monkeypatch.setattr(client_module, "MAX_BACKOFF_SECONDS", 5.0)

    async def body():
        fresh = AsyncEngine(EngineConfig(), factory="tests.engine.fake_core:FakeCore")
        await fresh.stop()
        spawned = AsyncEngine(EngineConfig(), factory="tests.engine.fake_core:FakeCore")
        spawned.start_process()
        await spawned.stop()
        async with engine("once", model=str(tmp_path / "m")) as it:  # stopped in its back-off
            os.kill(it._child.pid, signal.SIGKILL)
            await until(lambda: it._deaths >= 3)
            reader = Reader(it, request(1))
            await asyncio.sleep(0)
        assert (await reader.task).error.code == "shutting_down"

    run(body())


# ---------------------------------------------------------------------------------------------------------- everything


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 9))])
def test_every_request_ends_in_exactly_one_terminal_reply(seed, tmp_path):
    """Random faults, kills, cancels, closed readers: what was neither cancelled nor poisonous gives exactly its tokens."""
    rng = random.Random(seed)

    def fault(i: int) -> str:
        if i % 8 == 0:
            return rng.choice(["exit@4", "raise@2", "abort@submit", "kill@6"])
        if i % 5 == 0:
            return f"{rng.choice(['exit', 'raise', 'kill'])}@{rng.randrange(20)}!{tmp_path / str(i)}"
        return rng.choice(["", "", "twice@3", "block@0.05"])

    async def body():
        async with engine("SlowCore", max_num_seqs=6) as it:
            wanted = [request(i, n=rng.randrange(1, 4), max_tokens=rng.randrange(5, 40), prompt=rng.randrange(1, 200), faults=fault(i))
                      for i in range(20)]
            readers, cancelled, closed = [], set(), set()
            for i, one in enumerate(wanted):
                readers.append(Reader(it, one))
                await asyncio.sleep(rng.random() * 0.03)
                if rng.random() < 0.15:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(it._child.pid, signal.SIGKILL)
                if rng.random() < 0.2 and await it.cancel(f"r{rng.randrange(i + 1)}"):
                    cancelled.update(range(i + 1))  # any of them may be the one; their tokens are checked as prefixes
                if i % 7 == 6:
                    readers[i].task.cancel()
                    closed.add(i)
            for i, reader in enumerate(readers):
                if i in closed:
                    await asyncio.wait({reader.task})
                    continue
                await reader.task
                reader.check_prefix()
                if reader.error:
                    assert (i % 8 == 0 or i % 5 == 0) and reader.error.code == "quarantined", (i, reader.wanted.tenant, reader.error.code)
                    continue
                assert sorted(reader.reasons) == list(range(reader.wanted.params.n))
                if "cancelled" not in reader.reasons.values():
                    reader.check()
                else:
                    assert i in cancelled
            await until(lambda: len(it._journal) == 0 and it.stats().num_running == 0)
            assert not it._outboxes
            (await Reader(it, request(99)).task).check()

    run(body())
