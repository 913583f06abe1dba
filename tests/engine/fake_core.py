"""An EngineCore without a model. Its tokens are a function of (prompt, seed, branch, index), and it fails on command.

A request's ``tenant`` lists its faults, separated by commas. ``what@index`` happens when branch 0 is about to get that
token: ``exit``, ``abort``, ``kill``, ``raise`` and ``hang`` end or stop the process; ``unsendable``, ``gap`` and
``twice`` spoil an event. ``block@seconds`` waits outside the scheduler first, ``exit@submit`` dies while the request is
queued. ``exit@3!PATH`` strikes once: it happens only while PATH does not exist, and creates it.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from collections import Counter, OrderedDict
from functools import partial
from types import SimpleNamespace

from kvasir.client import page_keys
from kvasir.config import EngineConfig
from kvasir.engine.pages.page_log import PageChanges
from kvasir.errors import ConfigError, RequestError
from kvasir.types import EngineStats, Event, Load, ModelInfo, Plan, Request

VOCAB = 1000
CHUNK = 64


def token(request: Request, branch: int, index: int) -> int:
    text = f"{request.prompt_ids}|{request.seed}|{branch}|{index}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") % VOCAB


def expected(request: Request) -> list[list[int]]:
    """The expected outputs of the request's branches."""
    return [[token(request, branch, i) for i in range(request.max_tokens)] for branch in range(request.params.n)]


class FakePages:
    """A prefix index of ``CAPACITY`` pages without tokens; the least recently used goes first."""

    CAPACITY = 64

    def __init__(self, secret: bytes, root: bytes, slots: int) -> None:
        self.secret, self.root, self.slots = secret, root, slots
        self.nodes: OrderedDict[bytes, SimpleNamespace] = OrderedDict()
        self.changes: dict[bytes, SimpleNamespace | None] = {}

    def add(self, request: Request, tokens: list[int]) -> None:
        digest = partial(page_keys.keyed, self.secret)
        key = page_keys.tenant_key(digest, self.root, request.tenant)
        node = SimpleNamespace(key=key, tokens=[request.tenant], variant="", parent=None)
        for end in range(self.slots, len(tokens) + 1, self.slots):
            page = tokens[end - self.slots : end]
            key = page_keys.page_key(digest, key, page, request.kv_variant(end))
            node = SimpleNamespace(key=key, tokens=page, variant=request.kv_variant(end), parent=node)
            if key not in self.nodes:
                self.changes.pop(key, None)
                self.nodes[key] = self.changes[key] = node
            self.nodes.move_to_end(key)
        while len(self.nodes) > self.CAPACITY:
            self.changes[self.nodes.popitem(last=False)[0]] = None

    def take(self) -> PageChanges:
        changes, self.changes = self.changes, {}
        stored = [node for node in changes.values() if node is not None]
        return PageChanges(stored, [key for key, node in changes.items() if node is None])

    def held(self) -> list:
        return list(self.nodes.values())


class Running:
    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens = {
            b: list(request.emitted[b]) if b < len(request.emitted) else []
            for b in range(request.params.n)
            if b not in request.ended
        }
        self.uncomputed = len(request.prompt_ids)
        self.blocked_until = 0.0
        for what, place, _ in faults(request):
            if what == "block":
                self.blocked_until = time.monotonic() + float(place)


def faults(request: Request) -> list[tuple[str, str, str]]:
    found = []
    for spec in filter(None, request.tenant.split(",")):
        name, _, marker = spec.partition("!")
        what, _, place = name.partition("@")
        found.append((what, place, marker))
    return found


def strikes(request: Request, place: int | str) -> set[str]:
    """The faults that happen now."""
    now = set()
    for what, where, marker in faults(request):
        if where == str(place):
            if marker:
                if os.path.exists(marker):
                    continue
                open(marker, "w").close()
            now.add(what)
    return now


def die(now: set[str]) -> None:
    if "exit" in now:
        os._exit(3)
    if "abort" in now:
        os.abort()
    if "kill" in now:
        os.kill(os.getpid(), signal.SIGKILL)
    if "raise" in now:
        raise ZeroDivisionError("a bug in the engine")
    if "hang" in now:
        time.sleep(600)


class FakeCore:
    adapters = None

    step_seconds = 0.0
    announces = True

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.info = ModelInfo(
            name="fake", max_model_len=4096, vocab_size=VOCAB, tokenizer_size=VOCAB, config={"layers": [1, None, "x"]}
        )
        self.on_launch = lambda ids, slow, plan: None
        self._live: dict[str, Running] = {}
        self._counts = Counter()
        self._step = 0
        self._pages: FakePages | None = None

    def submit(self, request: Request) -> list[Event]:
        die(strikes(request, "submit"))
        if request.tenant == "refuse":
            raise RequestError("not this one", status=422, param="tenant", code="refused")
        if request.epoch == 0 and len(self._live) - len(self._scheduled()) >= self.config.scheduler.max_queued_requests:
            return [
                Event(
                    kind="error",
                    request_id=request.id,
                    epoch=request.epoch,
                    status=429,
                    code="queue_full",
                    retry_after=2.0,
                )
            ]
        assert request.id not in self._live, "the client must not reuse an id"
        self._live[request.id] = Running(request)
        return [Event(kind="accepted", request_id=request.id, epoch=request.epoch)]

    def cancel(self, request_id: str, branch: int | None = None) -> list[Event]:
        if request_id not in self._live:
            return []
        running = self._live[request_id]
        return [
            self._event(running, b, len(running.tokens[b]), [], "cancelled")
            for b in list(running.tokens)
            if branch in (None, b)
        ]

    def _event(self, running: Running, branch: int, index: int, tokens: list[int], reason: str | None) -> Event:
        if reason is not None:
            if self._pages is not None:
                self._pages.add(running.request, running.request.prompt_ids + running.tokens[branch][:-1])
            del running.tokens[branch]
            if not running.tokens:
                del self._live[running.request.id]
        return Event(
            kind="tokens",
            request_id=running.request.id,
            epoch=running.request.epoch,
            branch=branch,
            index=index,
            token_ids=tokens,
            finish_reason=reason,
        )

    def _scheduled(self) -> list[Running]:
        now = time.monotonic()
        return [r for r in self._live.values() if r.blocked_until <= now][: self.config.scheduler.max_num_seqs]

    def has_work(self) -> bool:
        return bool(self._scheduled())

    def step(self) -> list[Event]:
        batch = self._scheduled()
        if self.announces:
            self.on_launch([r.request.id for r in batch], False, Plan(self._step, []))
        time.sleep(self.step_seconds)
        events: list[Event] = []
        for running in batch:
            if running.uncomputed > CHUNK:
                running.uncomputed -= CHUNK
                continue
            events += self._advance(running)
        self._step += 1
        self._counts["generation_tokens"] += len(events)
        return events

    def _advance(self, running: Running) -> list[Event]:
        request, events = running.request, []
        for branch, tokens in list(running.tokens.items()):
            index = len(tokens)
            now = strikes(request, index) if branch == 0 else set()
            die(now)
            new = token(request, branch, index)
            tokens.append(new)
            event = self._event(running, branch, index, [new], "length" if len(tokens) >= request.max_tokens else None)
            if "unsendable" in now:
                event.stop_reason = object()
            if "gap" in now:
                event.index += 1
            events.append(event)
            if "twice" in now and index:
                same = {"kind": "tokens", "request_id": request.id, "branch": branch}
                events.append(Event(**same, epoch=request.epoch, index=index - 1, token_ids=tokens[-2:]))
                events.append(Event(**same, epoch=request.epoch - 1, index=0, token_ids=[0] * (index + 9)))
        return events

    def idle(self) -> bool:
        return False

    def stats(self) -> EngineStats:
        return EngineStats(
            step=self._step, num_running=len(self._live), startup={"fake": 0.0}, time=time.monotonic(), **self._counts
        )

    def load(self) -> Load:
        queued = sum(running.uncomputed for running in self._live.values())
        return Load(queued_tokens=queued, prompt_rate=1e4, decodes=len(self._live))

    def join(self, prefix_key: bytes) -> FakePages:
        """Weights are the seed."""
        self.info.weights = f"weights {self.config.model.seed}"
        self.info.prefix_root, self.info.page_slots = self.info.weights.encode(), 16
        self._pages = FakePages(prefix_key, self.info.prefix_root, 16)
        return self._pages

    def close(self) -> None:
        pass


class SlowCore(FakeCore):
    step_seconds = 0.003


class SilentCore(SlowCore):
    """Does not announce what it launches, and does not count steps that do nothing."""

    announces = False


class StuckCore(FakeCore):
    """After three steps it says it has work, but does none of it."""

    def step(self) -> list[Event]:
        return super().step() if self._step < 3 else []


def timing(config: EngineConfig) -> FakeCore:
    """Chooses backends by a clock that is the number of threads."""
    core = SlowCore(config)
    if config.runner.attention_backend == "auto":
        core.info.timed["attention_backend"] = f"quickest with {config.runner.num_threads}"
    if config.runner.product_backend == "auto":
        core.info.timed["product_backend"] = f"products with {config.runner.num_threads}"
    return core


def refusing(config: EngineConfig) -> FakeCore:
    raise ConfigError("the device 'cuda' has no memory left. Try --gpu-memory-utilization 0.8")


def broken(config: EngineConfig) -> FakeCore:
    raise ZeroDivisionError("a bug in the loader")


def vanishing(config: EngineConfig) -> FakeCore:
    os._exit(9)


def sleeping(config: EngineConfig) -> FakeCore:
    time.sleep(600)
    raise AssertionError


def babbling(config: EngineConfig) -> FakeCore:
    """Writes bytes to the connection that are not a frame."""
    import socket

    for number in range(3, 32):
        try:
            socket.socket(fileno=os.dup(number)).sendall(b"\xff" * 4096)
        except OSError:
            continue
    time.sleep(600)
    raise AssertionError


def once(config: EngineConfig) -> FakeCore:
    """Starts the first time; every later start fails. The model's name is the marker file; without one it starts."""
    if os.path.exists(config.model.model):
        sys.exit(4)
    if config.model.model:
        open(config.model.model, "w").close()
    return SlowCore(config)


def moody(config: EngineConfig) -> FakeCore:
    """Starts the first time; every later start is refused as a wrong set-up."""
    if os.path.exists(config.model.model):
        raise ConfigError("the model folder is gone")
    open(config.model.model, "w").close()
    return SlowCore(config)


def tardy(config: EngineConfig) -> FakeCore:
    """Starts the first time; every later start takes ten minutes. The model's name is the marker file."""
    if os.path.exists(config.model.model):
        time.sleep(600)
    open(config.model.model, "w").close()
    return SlowCore(config)
