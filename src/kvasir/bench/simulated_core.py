"""An engine core without a model, to measure and to torment what is in front of it. Needs no torch.

A token is a function of prompt, seed, branch and index, so whoever knows the request knows its tokens. A step takes
``STEP_SECONDS`` and gives every running branch one token; a prompt takes one step for each ``CHUNK`` tokens.
"""

from __future__ import annotations

import struct
import time
import zlib
from array import array
from collections.abc import Iterable

from kvasir.client.interface import PageLog
from kvasir.config import EngineConfig
from kvasir.types import EngineStats, Event, Load, ModelInfo, Plan, Request

VOCABULARY = 32_000
STEP_SECONDS = 0.01
CHUNK = 512
# Name of the weights, which a cluster compares; all simulated engines have the same.
WEIGHTS = "simulated"


def token(prompt: int, seed: int, branch: int, index: int) -> int:
    """The token at ``index`` of a branch. ``prompt``: see ``digest``."""
    return zlib.crc32(struct.pack("4Q", prompt, seed & (2**64 - 1), branch, index)) % VOCABULARY


def digest(prompt_ids: Iterable[int]) -> int:
    """A number for a prompt."""
    return zlib.crc32(array("q", prompt_ids).tobytes())


def expected(request: Request) -> list[list[int]]:
    """The tokens of each branch of ``request``."""
    prompt = digest(request.prompt_ids)
    return [[token(prompt, request.seed, b, i) for i in range(request.max_tokens)] for b in range(request.params.n)]


class _Running:
    def __init__(self, request: Request) -> None:
        self.request, self.prompt = request, digest(request.prompt_ids)
        self.uncomputed = len(request.prompt_ids)
        made = [len(tokens) for tokens in request.emitted] + [0] * request.params.n
        self.made = {b: made[b] for b in range(request.params.n) if b not in request.ended}


class SimulatedCore:
    """The core; see ``interface.EngineCore``."""

    adapters = None

    def __init__(self, config: EngineConfig) -> None:
        self.info = ModelInfo(name="simulated", max_model_len=1 << 20, vocab_size=VOCABULARY, tokenizer_size=VOCABULARY)
        self.on_launch = lambda ids, slow, plan: None
        self._live: dict[str, _Running] = {}
        self._most = config.scheduler.max_num_seqs
        self._steps = self._tokens = 0

    def submit(self, request: Request) -> list[Event]:
        assert request.id not in self._live, "the client must not use an id twice"
        self._live[request.id] = _Running(request)
        return [Event(kind="accepted", request_id=request.id, epoch=request.epoch)]

    def cancel(self, request_id: str, branch: int | None = None) -> list[Event]:
        running = self._live.get(request_id)
        if running is None:
            return []
        ended = [b for b in running.made if branch in (None, b)]
        return [self._event(running, b, running.made[b], [], "cancelled") for b in ended]

    def step(self) -> list[Event]:
        batch = list(self._live.values())[: self._most]
        self.on_launch([running.request.id for running in batch], False, Plan(self._steps, []))
        time.sleep(STEP_SECONDS)
        return self.advance(batch)

    def advance(self, batch: list[_Running] | None = None) -> list[Event]:
        """The events of one step that takes no time."""
        events: list[Event] = []
        self._steps += 1
        for running in list(self._live.values())[: self._most] if batch is None else batch:
            if running.uncomputed > CHUNK:
                running.uncomputed -= CHUNK
                continue
            running.uncomputed = 0
            request = running.request
            for branch, index in list(running.made.items()):
                running.made[branch] = index + 1
                new = token(running.prompt, request.seed, branch, index)
                reason = "length" if index + 1 >= request.max_tokens else None
                events.append(self._event(running, branch, index, [new], reason))
        self._tokens += len(events)
        return events

    def _event(self, running: _Running, branch: int, index: int, tokens: list[int], reason: str | None) -> Event:
        request = running.request
        if reason is not None:
            del running.made[branch]
            if not running.made:
                del self._live[request.id]
        return Event(
            kind="tokens",
            request_id=request.id,
            epoch=request.epoch,
            branch=branch,
            index=index,
            token_ids=tokens,
            finish_reason=reason,
        )

    def has_work(self) -> bool:
        return bool(self._live)

    def idle(self) -> bool:
        return False

    def stats(self) -> EngineStats:
        return EngineStats(step=self._steps, num_running=len(self._live), generation_tokens=self._tokens)

    def load(self) -> Load:
        queued = sum(running.uncomputed for running in self._live.values())
        return Load(queued_tokens=queued, prompt_rate=CHUNK / STEP_SECONDS, decodes=len(self._live))

    def join(self, prefix_key: bytes) -> PageLog | None:
        self.info.weights = WEIGHTS
        return None

    def close(self) -> None:
        pass
