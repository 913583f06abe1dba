"""KV events as vLLM's subscribers read them: what they tell is the prefix index, whatever happens to a message."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from kvasir.client import kv_events
from kvasir.errors import ConfigError
from tests.client.helpers import Reader, engine, request, run, until
from tests.cluster.test_prefixes import FULL, PAGE, WINDOW, compute, joined
from tests.cluster.test_prefixes import request as prompt

# ---------------------------------------------------------------- the layout of vLLM 0.25.1, as its readers declare it


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Follower:
    """A router elsewhere: the blocks that it believes are stored, with parent and tokens."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, list[int]]] = {}
        self.cleared = 0
        self.next = 0

    def take(self, payload: bytes, number: int | None = None) -> None:
        batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
        assert batch.ts > 1e9 and batch.data_parallel_rank is not None
        if number is not None:
            assert number == self.next, "a gap"
            self.next += 1
        for event in batch.events:
            if isinstance(event, BlockStored):
                size, parent = event.block_size, event.parent_block_hash
                assert event.medium == "GPU" and len(event.token_ids) == size * len(event.block_hashes)
                assert event.extra_keys is None or len(event.extra_keys) == len(event.block_hashes)
                for i, key in enumerate(event.block_hashes):
                    self.blocks[key] = parent, event.token_ids[i * size : (i + 1) * size]
                    parent = key
            elif isinstance(event, BlockRemoved):
                for key in event.block_hashes:
                    del self.blocks[key]
            else:
                self.blocks, self.cleared = {}, self.cleared + 1


class Collected(kv_events.Publisher):
    """A publisher whose socket is a list; ``room``: batches that its queue takes."""

    def __init__(self) -> None:
        self.room, self.payloads, self._whole, self._rank, self._queue = 10**9, [], True, 3, self

    def put_nowait(self, payload: bytes) -> None:
        if len(self.payloads) >= self.room:
            raise kv_events.queue.Full
        self.payloads.append(payload)


def in_index(pages, group: int) -> dict[int, tuple[int | None, list[int]]]:
    found = {}
    for key, node in pages.index.nodes.items():
        if node.pages[group]:
            root = node.parent.parent is None
            found[kv_events.short(key)] = None if root else kv_events.short(node.parent.key), node.tokens
    return found


@pytest.mark.parametrize("groups", [(FULL,), (WINDOW, FULL)])
@pytest.mark.parametrize("full_at", [None, 7])
def test_a_follower_knows_the_index(groups, full_at):
    pages, _, log = joined(groups)
    rng, publisher, follower = random.Random(1), Collected(), Follower()
    for step in range(40):
        compute(pages, prompt([rng.randrange(3) for _ in range(rng.randrange(4, 30))], tenant="t" * (step % 2)))
        if step == full_at:
            publisher.room = len(publisher.payloads)
        elif full_at is not None and step == full_at + 3:
            publisher.room = 10**9
        publisher.publish(log, log.take())
        if step == 30:
            pages.forget_prefixes()
    for payload in publisher.payloads:
        follower.take(payload)
    assert {k: v for k, v in in_index(pages, log.group).items() if k in follower.blocks} == follower.blocks
    assert follower.blocks.keys() == {kv_events.short(page.key) for page in log.held()}
    assert follower.cleared == 2 + (full_at is not None) and len(follower.blocks) > 3


def test_a_publisher_that_forgets_a_lost_batch_would_be_found(monkeypatch):
    """Negative control of the test above."""
    never = property(lambda self: False, lambda self, value: None)
    monkeypatch.setattr(Collected, "_whole", never, raising=False)
    with pytest.raises((AssertionError, KeyError)):
        test_a_follower_knows_the_index((FULL,), 7)


def test_runs_of_pages_are_one_event_and_say_what_decided_their_keys():
    from kvasir.types import Variant

    pages, _, log = joined()
    compute(pages, prompt(list(range(12))))
    compute(pages, prompt(list(range(8)) + [5] * 4, tenant="secret", variant=Variant("a", "content", start=6)))
    first, second = kv_events.stored(log.take().stored)
    assert (len(first.block_hashes), first.parent_block_hash, first.extra_keys) == (3, None, None)
    assert first.token_ids == list(range(12)) and first.block_size == PAGE
    (tenant,), one, two = second.extra_keys
    assert one[0] == two[0] and "content" in one[0] and "secret" not in tenant and second.parent_block_hash is None


def test_settings_are_vllms():
    assert not kv_events.parse("{}").enabled
    assert not kv_events.parse('{"enable_kv_cache_events": true, "publisher": "null"}').enabled
    config = kv_events.EventsConfig(endpoint="tcp://*:5557", replay_endpoint="ipc:///x")
    assert (config.at(2).endpoint, config.at(2).replay_endpoint, config.at(0)) == (
        "tcp://*:5559",
        "ipc:///x_dp2",
        config,
    )
    for bad in ("x", "[]", '{"endpoints": 1}', '{"endpoint": "tcp://*"}', '{"endpoint": "udp://h:1"}', '{"hwm": 0}'):
        with pytest.raises(ConfigError, match="kv_events_config"):
            kv_events.parse(bad)


@pytest.mark.usefixtures("nothing_left_behind")
def test_a_subscriber_reads_and_replays_what_an_engine_publishes(tmp_path):
    zmq = pytest.importorskip("zmq")
    context = zmq.Context()
    events, replay, follower = context.socket(zmq.SUB), context.socket(zmq.DEALER), Follower()
    port = events.bind_to_random_port("tcp://127.0.0.1")
    events.setsockopt(zmq.SUBSCRIBE, b"kv@")
    config = {
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://127.0.0.1:{port}",
        "replay_endpoint": f"ipc://{tmp_path / 'replay'}",
        "topic": "kv@pod@model",
    }

    def read() -> bool:
        while events.poll(0):
            topic, number, payload = events.recv_multipart()
            assert topic == b"kv@pod@model"
            follower.next = follower.next or int.from_bytes(number, "big")
            follower.take(payload, int.from_bytes(number, "big"))
        return True

    async def body():
        async with engine("SlowCore", kv_events_config=msgspec.json.encode(config).decode()) as it:
            warm = 100
            while not follower.next:  # the connection takes a moment, and what was sent before is lost
                warm += 1
                await Reader(it, request(warm, prompt=50)).task
                read()
            for i in range(1, 4):
                (await Reader(it, request(i, prompt=50, max_tokens=20)).task).check()
                wanted = [i] * 16 in [tokens for _, tokens in follower.blocks.values()]
                await until(lambda i=i: read() and [i] * 16 in [tokens for _, tokens in follower.blocks.values()])
                assert not wanted
            replay.connect(config["replay_endpoint"])
            replay.send_multipart((b"", (0).to_bytes(8, "big")))
            again = Follower()
            while True:
                await until(lambda: replay.poll(0))
                _, number, payload = replay.recv_multipart()
                if number == kv_events.END:
                    break
                again.take(payload, int.from_bytes(number, "big"))
            assert again.cleared == 1 and follower.blocks.items() <= again.blocks.items()

    try:
        run(body())
    finally:
        for socket in (events, replay):
            socket.close(linger=0)
        context.term()
