"""The engine process dies or hangs: restart, quarantine, watchdog, and everything at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from types import SimpleNamespace

import pytest

from kvasir.client import replica
from kvasir.client.engine_client import AsyncEngine
from kvasir.client.totals import Totals
from kvasir.config import EngineConfig
from kvasir.errors import RequestError
from kvasir.types import EngineStats
from tests.client.helpers import Reader, engine, request, run, until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

# ------------------------------------------------------------------------------------------------- death and restart


def test_a_killed_process_loses_no_token():
    async def body():
        async with engine("SlowCore") as it:
            readers = [Reader(it, request(i, n=1 + i % 3, max_tokens=40 + i, prompt=1 + 9 * i)) for i in range(32)]
            await until(lambda: sum(r.events for r in readers) > 300)
            os.kill(it.replica.child.pid, signal.SIGKILL)
            await until(lambda: not it.health().ready)
            assert it.health().live and it.health().reason
            late = Reader(it, request(99))
            for reader in [*readers, late]:
                (await reader.task).check()
            assert (
                it.num_restarts == it.stats().restarts == 1
                and it.num_quarantined == it.stats().quarantined == 0
                and it.health().ready
            )

    run(body())


def test_counters_go_on_where_a_process_ended():
    """Counters never fall, and requests that wait for the next process are counted as waiting."""

    async def body():
        async with engine("SlowCore") as it:
            (await Reader(it, request(1, max_tokens=30)).task).check()
            await until(lambda: it.stats().generation_tokens == 30 and not it.stats().num_running)
            for life in (1, 2):
                before = it.stats()
                os.kill(it.replica.child.pid, signal.SIGKILL)
                await until(lambda: not it.health().ready)
                reader = Reader(it, request(2, n=2, max_tokens=20))
                await until(lambda: it.stats().num_waiting == 2)
                assert it.stats().num_running == 0 and (it.stats().step, it.stats().generation_tokens) == (
                    before.step,
                    before.generation_tokens,
                )
                (await reader.task).check()
                await until(lambda total=30 + 40 * life: it.stats().generation_tokens == total)
                assert it.stats().step >= before.step + 20 and it.stats().num_waiting == 0

    run(body())


def test_every_kind_of_counter_is_added():
    old = EngineStats(
        step=3, failed={"a": 1}, accepted_by_depth=[[4, 2]], drafted_by={"x": [5, 1]}, drafted_by_depth={"x": [[1, 1]]}
    )
    new = EngineStats(
        step=1,
        failed={"a": 1, "b": 2},
        accepted_by_depth=[[1, 1], [1, 0]],
        drafted_by_depth={"y": [[2, 0]]},
        draft_saved_seconds=0.5,
    )
    totals = Totals()
    totals.heartbeat(old)
    totals.process_ended()
    totals.heartbeat(new)
    assert totals.now() == EngineStats(
        step=4,
        failed={"a": 2, "b": 2},
        accepted_by_depth=[[5, 3], [1, 0]],
        drafted_by={"x": [5, 1]},
        drafted_by_depth={"x": [[1, 1]], "y": [[2, 0]]},
        draft_saved_seconds=0.5,
    )


def test_killed_again_and_again():
    async def body():
        async with engine("SlowCore") as it:
            readers = [Reader(it, request(i, n=1 + i % 2, max_tokens=80)) for i in range(8)]
            for _ in range(8):
                await until(lambda: it.health().ready)
                seen = sum(r.events for r in readers)
                await until(lambda seen=seen: sum(r.events for r in readers) > seen + 20)
                os.kill(it.replica.child.pid, signal.SIGKILL)
                await until(lambda: not it.health().ready)
            for reader in readers:
                (await reader.task).check()
            assert it.num_restarts == 8 and it.num_quarantined == 0

    run(body())


def test_what_the_clock_chose_is_kept():
    it = AsyncEngine(EngineConfig())
    for timed in ({"attention_backend": "chosen", "product_backend": "chosen too"}, {}):
        info = SimpleNamespace(timed=timed, adapters={})
        it.replica._welcome(SimpleNamespace(info=info, startup={}))
        assert it.replica.config.runner.attention_backend == "chosen"
        assert it.replica.config.runner.product_backend == "chosen too"


def test_killed_while_it_restarts():
    async def body():
        async with engine("SlowCore") as it:
            readers = [Reader(it, request(i, max_tokens=40)) for i in range(4)]
            await until(lambda: all(r.events for r in readers))
            for _ in range(3):
                child = it.replica.child
                os.kill(child.pid, signal.SIGKILL)
                await until(lambda child=child: it.replica.child is not child)
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


@pytest.mark.parametrize(
    ("how", "core"),
    [("exit", "SlowCore"), ("raise", "SilentCore"), pytest.param("abort", "SilentCore", marks=pytest.mark.slow)],
)
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
    """A kill from outside, as when the kernel runs out of memory, is weaker evidence, so quarantine takes more of
    them."""

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
            readers = [
                Reader(it, request(i, max_tokens=30, faults=f"exit@{5 + 9 * i}!{tmp_path / str(i)}" if i < 3 else ""))
                for i in range(8)
            ]
            for reader in readers:
                (await reader.task).check()
            assert it.num_restarts == 3 and it.num_quarantined == 0

    run(body())


def test_an_engine_that_cannot_come_back_fails_everything_with_503(tmp_path, monkeypatch):
    monkeypatch.setattr(replica, "MAX_BACKOFF_SECONDS", 0.05)

    async def body():
        async with engine("once", model=str(tmp_path / "started")) as it:
            readers = [Reader(it, request(i, max_tokens=200)) for i in range(3)]
            await until(lambda: all(r.events for r in readers))
            os.kill(it.replica.child.pid, signal.SIGKILL)
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
            os.kill(it.replica.child.pid, signal.SIGKILL)
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
            monkeypatch.setattr(replica.Replica, "_bury", fail)
            os.kill(it.replica.child.pid, signal.SIGKILL)
            assert (await reader.task).error.code == "engine_down" and "a bug in the client" in it.health().reason

    run(body())


def test_the_queue_is_bounded_while_the_engine_restarts():
    async def body():
        async with engine("SlowCore", max_queued_requests=3, max_num_seqs=2) as it:
            os.kill(it.replica.child.pid, signal.SIGKILL)
            await until(lambda: not it.health().ready)
            readers = [Reader(it, request(i)) for i in range(9)]
            for reader in readers:
                await reader.task
            refused = [r.error for r in readers if r.error]
            assert len(refused) == 4 and all(
                (e.status, e.code) == (503, "overloaded") and e.retry_after for e in refused
            )
            [r.check() for r in readers if not r.error]

    run(body())


def test_a_burst_at_a_live_engine_is_a_full_queue():
    async def body():
        async with engine("SlowCore", max_queued_requests=3, max_num_seqs=2) as it:
            readers = [Reader(it, request(i)) for i in range(9)]
            for reader in readers:
                await reader.task
            refused = [r.error for r in readers if r.error]
            assert len(refused) >= 4 and all(
                (e.status, e.code) == (429, "queue_full") and e.retry_after for e in refused
            )
            [r.check() for r in readers if not r.error]

    run(body())


# --------------------------------------------------------------------------------------------------------- the watchdog


def test_a_stopped_process_is_replaced():
    async def body():
        async with engine("SlowCore", watchdog=3.0) as it:
            readers = [Reader(it, request(i, max_tokens=60)) for i in range(4)]
            await until(lambda: all(r.events > 3 for r in readers))
            os.kill(it.replica.child.pid, signal.SIGSTOP)
            await until(lambda: not it.health().ready)
            assert "no progress" in it.health().reason
            for reader in readers:
                (await reader.task).check()

    run(body())


def test_an_idle_stopped_process_is_noticed_before_the_next_request():
    async def body():
        async with engine(watchdog=3.0) as it:
            seen = it.replica.child.flight.progress
            await until(lambda: it.replica.child.flight.progress > seen)
            os.kill(it.replica.child.pid, signal.SIGSTOP)
            await until(lambda: it.num_restarts and it.health().ready)
            (await Reader(it, request(1)).task).check()

    run(body())


def test_a_hanging_step_is_ended_its_stacks_shown_and_its_request_quarantined(capfd):
    async def body():
        async with engine("SlowCore", watchdog=3.0) as it:
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
                seen = it.replica.child.flight.progress
                await until(lambda seen=seen: it.replica.child.flight.progress > seen + 2)
                (await reader.task).check()
            assert it.num_restarts == 0

    run(body())


# ---------------------------------------------------------------------------------------------------------- everything


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 9))])
def test_every_request_ends_in_exactly_one_terminal_reply(seed, tmp_path):
    """Random faults, kills, cancels and closed readers: requests that are neither cancelled nor at fault give exactly
    their tokens."""
    rng = random.Random(seed)

    def fault(i: int) -> str:
        if i % 8 == 0:
            return rng.choice(["exit@4", "raise@2", "abort@submit", "kill@6"])
        if i % 5 == 0:
            return f"{rng.choice(['exit', 'raise', 'kill'])}@{rng.randrange(20)}!{tmp_path / str(i)}"
        return rng.choice(["", "", "twice@3", "block@0.05"])

    async def body():
        async with engine("SlowCore", max_num_seqs=6) as it:
            wanted = [
                request(
                    i,
                    n=rng.randrange(1, 4),
                    max_tokens=rng.randrange(5, 40),
                    prompt=rng.randrange(1, 200),
                    faults=fault(i),
                )
                for i in range(20)
            ]
            readers, cancelled, closed = [], set(), set()
            for i, one in enumerate(wanted):
                readers.append(Reader(it, one))
                await asyncio.sleep(rng.random() * 0.03)
                if rng.random() < 0.15:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(it.replica.child.pid, signal.SIGKILL)
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
                    assert (i % 8 == 0 or i % 5 == 0) and reader.error.code == "quarantined", (
                        i,
                        reader.wanted.tenant,
                        reader.error.code,
                    )
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
