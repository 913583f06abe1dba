"""Several replicas with a fake core: whatever dies, every request gets its own tokens, each once."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal

import pytest

from kvasir.client.journal import Entry
from kvasir.errors import ConfigError, RequestError
from tests.client.helpers import Reader, request, run, until
from tests.cluster.helpers import TIMEOUTS, cluster, held, hurt_in_every_state, kill

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def test_requests_are_spread_and_give_their_tokens():
    async def body():
        async with cluster(3) as it:
            assert it.health().ready and it.health().reason == "" and it.info.weights == "weights 0"
            readers = [Reader(it, request(i, n=1 + i % 3, prompt=1 + 40 * i, max_tokens=60)) for i in range(18)]
            await until(lambda: all(held(it)))
            for reader in readers:
                (await reader.task).check()
            await until(lambda: it.stats().generation_tokens == sum(60 * (1 + i % 3) for i in range(18)))
            assert it.num_restarts == 0 and all(r.totals.now().generation_tokens for r in it.replicas)
            assert not it._outboxes and all(r.load.prompt_rate == 1e4 for r in it.replicas)
        assert it.health().reason.count("stopped") == 3

    run(body())


def test_requests_of_a_killed_replica_go_on_in_another_at_once():
    async def body():
        async with cluster(2) as it:
            readers = [Reader(it, request(i, n=1 + i % 3, max_tokens=400)) for i in range(16)]
            await until(lambda: all(r.events for r in readers) and all(held(it)))
            kill(it, 0)
            await until(lambda: it.replicas[0].num_restarts == 1)
            assert held(it)[0] == 0 or it.replicas[0].connected, "they wait for nobody"
            assert it.health().ready
            for reader in readers:
                (await reader.task).check()
            await until(lambda: it.replicas[0].connected)
            assert it.num_restarts == it.stats().restarts == 1 and it.num_quarantined == 0

    run(body())


def test_a_stopped_replica_is_replaced():
    async def body():
        async with cluster(2, watchdog=3.0) as it:
            readers = [Reader(it, request(i, max_tokens=100)) for i in range(8)]
            await until(lambda: all(r.events for r in readers) and all(held(it)))
            kill(it, 1, signal.SIGSTOP)
            for reader in readers:
                (await reader.task).check()
            assert it.num_restarts == 1 and it.num_quarantined == 0

    run(body())


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_death_in_any_state_loses_and_doubles_nothing(how):
    """The replica that holds a request is killed or stopped in each state of the request's life."""

    async def body():
        async with cluster(2, **TIMEOUTS[how]) as it:
            await hurt_in_every_state(it, lambda holder: kill(it, holder, how))

    run(body())


@pytest.mark.parametrize("how", ["exit", "raise", "kill", "hang"])
def test_a_poisonous_request_takes_down_one_replica_only(how):
    async def body():
        # The first step of a process may be slow, as long as the start may take.
        async with cluster(3, watchdog=3.0, startup_timeout=10.0) as it:
            bad = Reader(it, request(90, max_tokens=30, faults=f"{how}@7"))
            await until(lambda: bad.events)
            where = it._journal.get("r90").holder
            readers = [Reader(it, request(i, max_tokens=200)) for i in range(12)]
            await bad.task
            assert (bad.error.status, bad.error.code) == (500, "quarantined") and len(bad.tokens[0]) == 7
            for reader in readers:
                (await reader.task).check()
            # A kill from outside is no proof against a request, so the first goes on elsewhere.
            down = [r.number for r in it.replicas if r.num_restarts]
            assert down == [where] or how == "kill", "it was tried on another replica"
            assert it.num_quarantined == 1

    run(body())


def test_a_suspect_waits_for_its_replica_while_the_others_serve(tmp_path):
    async def body():
        async with cluster(2) as it:
            bad = Reader(it, request(90, max_tokens=60, faults=f"exit@7!{tmp_path / 'once'}"))
            await until(lambda: bad.events)
            where = it._journal.get("r90").holder
            await until(lambda: it._trial is not None)
            assert it._trial.number == where and it._journal.get("r90").holder in (None, where)
            other = Reader(it, request(1, max_tokens=20))
            (await other.task).check()
            (await bad.task).check()
            await until(lambda: it._trial is None)
            assert it.num_restarts == 1

    run(body())


def test_a_replica_that_cannot_come_back_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr("kvasir.client.replica.MAX_BACKOFF_SECONDS", 0.05)

    async def body():
        async with cluster(2, changes={"model": str(tmp_path / "started")}, core="once") as it:
            readers = [Reader(it, request(i, max_tokens=300)) for i in range(8)]
            await until(lambda: all(r.events for r in readers) and all(held(it)))
            kill(it, 1)
            await until(lambda: it.replicas[1].failed)
            assert it.health().live and it.health().ready and "replica 1: " in it.health().reason
            for reader in readers:
                (await reader.task).check()
            (await Reader(it, request(99)).task).check()
            kill(it, 0)
            (await Reader(it, request(98)).task).check()

    run(body())


def test_other_weights_are_refused_at_the_hello():
    async def body():
        with pytest.raises(ConfigError, match="other weights"):
            async with cluster(2, changes={"seed": 1}):
                pass

    run(body())


def test_a_replica_that_comes_back_with_other_weights_is_refused():
    async def body():
        async with cluster(2) as it:
            it.replicas[1].config = it.replicas[1].config.replace(seed=1)
            kill(it, 1)
            await until(lambda: it.replicas[1].failed)
            assert "other weights" in it.replicas[1].why_down and it.health().ready
            (await Reader(it, request(1)).task).check()

    run(body())


def test_a_front_that_takes_any_weights_would_be_found(monkeypatch):
    """Negative control of the two tests above."""
    monkeypatch.setattr("kvasir.cluster.cluster_client.SHARED", ("name",))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_other_weights_are_refused_at_the_hello()


def test_replicas_agree_on_backends():
    async def body():
        async with cluster(2, core="timing", num_threads=1, changes={"num_threads": 2}) as it:
            backends = {r.config.runner.attention_backend for r in it.replicas}
            products = {r.config.runner.product_backend for r in it.replicas}
            assert backends == {"quickest with 1"} and products == {"products with 1"}
            assert it.health().ready and it.num_restarts == 0
            for reader in [Reader(it, request(i)) for i in range(4)]:
                (await reader.task).check()

    run(body())


def test_adapters_cannot_be_loaded_while_replicas_run():
    async def body():
        async with cluster(2) as it:
            with pytest.raises(RequestError, match="lora-modules"):
                await it.load_adapter("a", "/nowhere")

    run(body())
    with pytest.raises(ConfigError, match="lora-modules"):
        run(_opened(allow_runtime_lora=True))


async def _opened(**options):
    async with cluster(2, **options):
        pass


async def churn(seed: int, tmp_path, kills: int = 6, count: int = 3) -> None:
    """Kill and stop replicas under load; every request must give its tokens, each once."""
    rng = random.Random(seed)
    # A process that is stopped while it starts, or in its first step, is given the time of a start.
    async with cluster(count, watchdog=2.0, startup_timeout=8.0) as it:
        readers: list[Reader] = []
        for step in range(kills):
            for _ in range(6):
                i = len(readers)
                # Some die on their own, once.
                faults = f"exit@{rng.randrange(30)}!{tmp_path / str(i)}" if i % 9 == 4 else ""
                readers.append(Reader(it, request(i, n=rng.randrange(1, 4), max_tokens=80, faults=faults)))
                await asyncio.sleep(rng.random() * 0.05)
            up = [r.number for r in it.replicas if r.child is not None]
            with contextlib.suppress(ProcessLookupError):
                kill(it, rng.choice(up), rng.choice([signal.SIGKILL, signal.SIGSTOP]) if step % 3 else signal.SIGKILL)
            await asyncio.sleep(rng.random() * 0.5)
        for reader in readers:
            (await reader.task).check()
        assert it.num_restarts and not it.num_quarantined
        await until(lambda: len(it._journal) == 0)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def test_churn_loses_and_doubles_nothing(seed, tmp_path):
    run(churn(seed, tmp_path))


def test_a_front_that_does_not_raise_the_epoch_is_caught(monkeypatch, tmp_path):
    """Negative control: without a new epoch, the end that a taken-back request gets from its old holder would be
    delivered as its end."""

    def rewind(self: Entry) -> None:
        self.holder, self.fresh = None, 0

    async def body():
        async with cluster(2) as it:
            readers = [Reader(it, request(i, max_tokens=80)) for i in range(8)]
            await until(lambda: all(r.events > 2 for r in readers) and all(held(it)))
            it._take_back(it.replicas[0])
            it._submit_next()
            for reader in readers:
                (await reader.task).check()

    run(body())
    monkeypatch.setattr(Entry, "rewind", rewind)
    with pytest.raises(AssertionError):
        run(body())
