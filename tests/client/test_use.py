"""Requests, refusals, cancels and slow readers. No torch, no model."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys

import msgspec
import pytest

from kvasir.client.engine_client import AsyncEngine
from kvasir.config import EngineConfig, Settings
from kvasir.errors import ConfigError, RequestError
from kvasir.types import Grammar, Request, SamplingParams
from tests.client.helpers import Reader, engine, request, run, until
from tests.engine.fake_core import expected

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

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
    pid = it.replica.child.pid
    it.start_process()
    assert it.replica.child.pid == pid and it.health().reason == "starting"

    async def body():
        await it.start()
        (await Reader(it, request()).task).check()
        await it.stop(0)

    run(body())


def test_the_client_needs_no_torch():
    code = (
        "import sys, kvasir.client.engine_client; assert not {'torch', 'numpy', 'transformers', 'fastapi'} & "
        "set(sys.modules), sys.modules"
    )
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
        it = AsyncEngine(
            Settings.of(api_key=["secret"], served_model_name="needle"), factory="tests.engine.fake_core:FakeCore"
        )
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
            for bad in (
                request(2, seed="x"),
                request(2, temperature="hot"),
                request(2, grammar=Grammar(kind="lisp")),
                request(2, stop=["\ud800"]),
            ):
                with pytest.raises(RequestError) as caught:
                    await anext(it.generate(bad))
                assert caught.value.status == 400
            for ids in ([1.5], [True], ["1"], [1 << 70], None):
                with pytest.raises(RequestError) as caught:
                    await anext(
                        it.generate(Request(id="r2", prompt_ids=ids, params=SamplingParams(), seed=0, max_tokens=1))
                    )
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
    monkeypatch.setattr("kvasir.client.ipc.MAX_FRAME_BYTES", 20_000)

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


@pytest.mark.parametrize(
    ("core", "words"),
    [
        ("refusing", "Try --gpu-memory-utilization 0.8"),
        ("broken", "a bug in the loader"),
        ("vanishing", "exited with status 9"),
        ("babbling", "frame"),
        ("no_such_core", "no_such_core"),
        ("sleeping", "not ready within 1.5 s"),
    ],
)
def test_a_failed_start_is_a_config_error(core, words):
    async def body():
        it = AsyncEngine(
            EngineConfig.of(startup_timeout=1.5 if core == "sleeping" else 240.0),
            factory=f"tests.engine.fake_core:{core}",
        )
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
                    os.kill(it.replica.child.pid, signal.SIGKILL)
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
            send, it.replica.child.send = it.replica.child.send, lambda frame: (sent.append(frame), send(frame))[1]
            await it.cancel_many([("r1", None), ("nobody", None), ("r2", 0), ("r3", 7)])
            assert len(sent) == 1
            await until(lambda: 0 in second.reasons)
            await it.cancel_many([("r2", 0), ("r2", 1)])
            await asyncio.gather(first.task, second.task, third.task)
            assert first.reasons == second.reasons == {0: "cancelled", 1: "cancelled"} and third.reasons == {
                0: "length",
                1: "length",
            }

    run(body())


def test_cancel_one_branch_leaves_the_others():
    async def body():
        async with engine("SlowCore") as it:
            reader = Reader(it, request(1, n=3, max_tokens=60))
            await until(lambda: reader.events > 9)
            assert await it.cancel("r1", 1)
            await until(lambda: 1 in reader.reasons)
            assert not await it.cancel("r1", 1)
            os.kill(it.replica.child.pid, signal.SIGKILL)  # the replay must not bring it back
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


def test_first_tokens_come_ahead_of_their_step():
    """The core reports the newest request last; its reader still gets the first token before the others get their next
    ones."""

    async def body():
        async with engine("SlowCore") as it:
            old, order = [Reader(it, request(i, max_tokens=4000)) for i in range(3)], []
            await until(lambda: all(r.events > 2 for r in old))
            deliver = it._deliver
            it._deliver = lambda event: (
                order.append(f"{event.request_id}.{event.index}" if event.kind == "tokens" else ""),
                deliver(event),
            )
            (await Reader(it, request(9, max_tokens=3)).task).check()
            first, second, third = (order.index(f"r9.{i}") for i in range(3))
            assert (second - first, third - second) == (7, 4)
            [reader.task.cancel() for reader in old]

    run(body())


# ---------------------------------------------------------------------------------------------------------- slow reader


def test_a_slow_reader_loses_nothing_and_blocks_nobody():
    async def body():
        async with engine() as it:
            slow = it.generate(request(1, n=2, max_tokens=2000))
            first = await anext(slow)
            assert first.kind == "accepted"
            (await Reader(it, request(2, max_tokens=2500)).task).check()  # the other request runs past it meanwhile
            await until(lambda: len(it._journal) == 0)
            (outbox,) = it._outboxes.values()
            assert len(outbox) == 2, "one event a branch"
            tokens, reasons = [[], []], []
            async for event in slow:
                assert event.index == len(tokens[event.branch])
                tokens[event.branch] += event.token_ids
                reasons += [event.finish_reason] if event.finish_reason else []
            assert tokens == expected(request(1, n=2, max_tokens=2000)) and reasons == ["length"] * 2

    run(body())
