"""KV events for routers outside kvasir: which pages a prefix cache stores and evicts, as vLLM publishes them.

The layout is that of vLLM 0.25 (``vllm/distributed/kv_events.py``), so that llm-d, Dynamo and AIBrix can follow kvasir.
Each ZeroMQ message has three parts: the topic, a number of 8 bytes that counts from 0, and a msgpack array of time,
events and rank. An event is a map with its name under "type". Pages are named by 64 bits of their keys. Subscribers see
a gap in the numbers, and ask the replay socket for what they missed.

The engine process publishes, on a thread of its own that the step loop never waits for. This module imports ZeroMQ when
a publisher starts.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any, Literal

import msgspec

from kvasir.client.interface import PageLog, StoredPage
from kvasir.errors import ConfigError, install
from kvasir.logs import log

# Longest time between two looks at the replay socket, in seconds.
POLL_SECONDS = 0.05
# Number that ends a replay, as vLLM writes it.
END = (-1).to_bytes(8, "big", signed=True)
# vLLM's word for pages that the model reads directly; also sent on a CPU, because subscribers know no other.
MEDIUM = "GPU"


class EventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of vLLM's ``--kv-events-config``, with its defaults."""

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @property
    def enabled(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"

    def at(self, rank: int) -> EventsConfig:
        """The settings of a replica: each has ports of its own, counted from those given."""
        replay = self.replay_endpoint and offset(self.replay_endpoint, rank)
        return msgspec.structs.replace(self, endpoint=offset(self.endpoint, rank), replay_endpoint=replay)


def parse(text: str) -> EventsConfig:
    """Read ``--kv-events-config``. Raises ConfigError."""
    try:
        config = msgspec.json.decode(text, type=EventsConfig)
    except (msgspec.MsgspecError, ValueError) as e:
        raise ConfigError(
            f"kv_events_config: {e}. Write a JSON object with vLLM's fields, e.g. "
            '\'{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}\''
        ) from e
    for endpoint in filter(None, (config.endpoint, config.replay_endpoint)):
        if not endpoint.startswith(("tcp://", "ipc://", "inproc://")):
            raise ConfigError(f"kv_events_config: {endpoint!r} is no endpoint of ZeroMQ. Write tcp://HOST:PORT")
        offset(endpoint, 1)
    if min(config.buffer_steps, config.hwm, config.max_queue_size) < 1:
        raise ConfigError("kv_events_config: buffer_steps, hwm and max_queue_size must be at least 1")
    if config.enabled and find_spec("zmq") is None:
        raise ConfigError(f"kv_events_config needs ZeroMQ. Install it: {install('events')}")
    return config


def offset(endpoint: str, rank: int) -> str:
    """The endpoint of a replica. Raises ConfigError for TCP without a port."""
    head, _, port = endpoint.rpartition(":")
    if endpoint.startswith("tcp:"):
        if not port.isdecimal():
            raise ConfigError(f"kv_events_config: {endpoint!r} has no port. Write tcp://HOST:PORT")
        return f"{head}:{int(port) + rank}"
    return f"{endpoint}_dp{rank}" if rank else endpoint


# ------------------------------------------------------------------------------------------------- the events' layout


class KVCacheEvent(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """An event: a map whose "type" names the class."""


class BlockStored(KVCacheEvent):
    """Pages that were stored, each after the one before it. ``parent_block_hash``: the page before the first.
    ``token_ids``: of all of them. ``extra_keys``: for each page, what else decided its key."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None


class BlockRemoved(KVCacheEvent):
    """Pages that were evicted."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(KVCacheEvent):
    """Nothing told before holds any more."""


class Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One message. ``ts``: seconds since 1970. ``data_parallel_rank``: number of the replica."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def short(key: bytes) -> int:
    """The last 64 bits of a page's key: the size of hash that vLLM publishes by default, and that all readers take."""
    return int.from_bytes(key[-8:], "big")


def removed(keys: Iterable[bytes]) -> list[BlockRemoved]:
    """One event for all evicted pages; none for no page."""
    hashes = [short(key) for key in keys]
    return [BlockRemoved(hashes, MEDIUM)] if hashes else []


def stored(pages: Iterable[StoredPage]) -> list[BlockStored]:
    """Events of stored pages: one for each run of pages that follow one another in one prefix."""
    events: list[BlockStored] = []
    last: StoredPage | None = None
    for page in pages:
        before, extra = page.parent, _extra(page)
        if last is None or before is not last or len(page.tokens) != events[-1].block_size:
            first = before is None or before.parent is None  # behind the root of a tenant, which is no page
            parent = None if first else short(before.key)
            events.append(BlockStored([], parent, [], len(page.tokens), None, MEDIUM, None))
        event = events[-1]
        if extra and event.extra_keys is None:
            event.extra_keys = [None] * len(event.block_hashes)
        event.block_hashes.append(short(page.key))
        event.token_ids.extend(page.tokens)
        if event.extra_keys is not None:
            event.extra_keys.append(extra)
        last = page
    return events


def _extra(page: StoredPage) -> list[str] | None:
    """The variant that changed a page, and the tenant of a first page, whose name is not told: it comes from a key."""
    root = page.parent
    named = root is not None and root.parent is None and root.tokens not in ([""], [])
    found = ([page.variant] if page.variant else []) + ([root.key.hex()] if named else [])
    return found or None


# ------------------------------------------------------------------------------------------------------- the publisher


class Publisher:
    """Sends batches from a thread of its own. Raises ConfigError when an endpoint cannot be used.

    ``publish`` never waits. When the queue is full a batch is lost; the next one then clears what subscribers know, and
    tells all pages again. So does the first one of a process.
    """

    def __init__(self, config: EventsConfig, rank: int) -> None:
        import zmq

        mine = config.at(rank)
        self._rank, self._topic = rank, mine.topic.encode()
        self._queue: queue.Queue[bytes | None] = queue.Queue(mine.max_queue_size)
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=mine.buffer_steps)
        self._whole = True  # the next batch tells everything
        context: Any = zmq.Context.instance()
        self._socket, self._replay = context.socket(zmq.PUB), None
        self._socket.set_hwm(mine.hwm)
        try:
            # As in vLLM: an address of all hosts is ours to bind, that of one host is a subscriber's to connect to.
            binds = "*" in mine.endpoint or "::" in mine.endpoint or not mine.endpoint.startswith("tcp:")
            (self._socket.bind if binds else self._socket.connect)(mine.endpoint)
            if mine.replay_endpoint:
                self._replay = context.socket(zmq.ROUTER)
                self._replay.bind(mine.replay_endpoint)
        except zmq.ZMQError as e:
            self._close_sockets()
            raise ConfigError(
                f"kv_events_config: {mine.endpoint} or {mine.replay_endpoint} cannot be used: {e}. Each replica takes "
                "the next port; choose one with free ports behind it."
            ) from e
        self._thread = threading.Thread(target=self._run, name="KV events", daemon=True)
        self._thread.start()

    def publish(self, pages: PageLog, changes: Any) -> None:
        """Tell the ``changes`` (``interface.PageChanges``) of the log ``pages``."""
        whole = self._whole or changes.cleared
        if not whole and not changes:
            return
        events: list = [AllBlocksCleared(), *stored(pages.held())] if whole else removed(changes.evicted)
        if not whole:
            events += stored(changes.stored)
        try:
            self._queue.put_nowait(msgspec.msgpack.encode(Batch(time.time(), events, self._rank)))
            self._whole = False
        except queue.Full:
            if not self._whole:
                log.warning("KV events are published too slowly: a batch was lost, and all pages are told again")
            self._whole = True

    def close(self) -> None:
        """Send what is queued, and close the sockets."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(1.0)

    def _run(self) -> None:
        number = 0
        while True:
            if self._replay is not None and self._replay.poll(0):
                self._answer(self._replay.recv_multipart())
            try:
                payload = self._queue.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
            if payload is None:
                break
            self._sent.append((number.to_bytes(8, "big"), payload))
            self._socket.send_multipart((self._topic, *self._sent[-1]))
            number += 1
        self._close_sockets()

    def _answer(self, asked: list[bytes]) -> None:
        """Send again what was sent from a number on."""
        if len(asked) != 3 or len(asked[2]) != 8:
            return log.warning("a request for KV events has not three parts, or no number of 8 bytes")
        client, empty, start = asked
        for number, payload in self._sent:
            if number >= start:
                self._replay.send_multipart((client, empty, number, payload))
        self._replay.send_multipart((client, empty, END, b""))

    def _close_sockets(self) -> None:
        for socket in (self._socket, self._replay):
            if socket is not None:
                socket.close(linger=500)
