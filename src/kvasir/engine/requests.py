"""The requests in the engine, from their first event to their last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvasir.engine.part import Part, bound
from kvasir.engine.schedule.scheduler import Scheduler
from kvasir.engine.ways.runner import Runner
from kvasir.errors import Failure
from kvasir.types import Event, FinishReason, ModelInfo, Request, Sequence


@dataclass(slots=True)
class Live:
    """A request in the engine and its unfinished branches."""

    request: Request
    branches: dict[int, Sequence] = field(default_factory=dict)
    accepted: bool = False  # the accepted event was sent


class Requests:
    """The requests that have not ended, and the events that nobody has taken yet. ``failed`` counts errors by code."""

    def __init__(self, scheduler: Scheduler, runner: Runner, info: ModelInfo) -> None:
        self.live: dict[str, Live] = {}
        self.failed: Counter[str] = Counter()
        self.eos_ids = frozenset(info.eos_ids)
        self._max_model_len = info.max_model_len
        self._scheduler, self._runner = scheduler, runner
        self.events: list[Event] = []
        self.follow([])

    def follow(self, parts: Iterable[Part]) -> None:
        """Tell these parts what ends."""
        parts = list(parts)
        self._queued, self._replayed, self._ended = (bound(parts, at) for at in ("queued", "replayed", "ended"))
        self._forgotten = bound(parts, "forgotten")

    def take(self) -> list[Event]:
        """Take the events since the last call."""
        events, self.events = self.events, []
        return events

    def all(self) -> list[Request]:
        return [live.request for live in self.live.values()]

    def branches(self, request_id: str) -> list[Sequence]:
        return list(self.live[request_id].branches.values())

    def names(self, adapter: str) -> bool:
        """Whether a request that has not ended names this adapter."""
        variants = (request.variant for request in self.all())
        return any(variant is not None and variant.name == adapter for variant in variants)

    def refuse(self, event: Event) -> None:
        """Tell the error of a request that is not taken."""
        self.failed[event.code or "refused"] += 1
        self.events.append(event)

    def add(self, request: Request) -> list[Sequence]:
        """Queue the branches of a request that have not ended, and return them."""
        live = self.live[request.id] = Live(request)
        for branch in range(request.params.n):
            seq = Sequence(request, branch)
            if branch in request.ended:
                for replayed in self._replayed:
                    replayed(seq)
                continue
            seq.max_output = min(request.max_tokens, self._max_model_len - seq.num_prompt)
            if not request.params.ignore_eos:
                seq.stop_ids |= self.eos_ids
            seq.parent = next(iter(live.branches.values()), None)  # the first that has not ended
            live.branches[branch] = seq
            for queued in self._queued:
                queued(seq)
            self._scheduler.add(seq)
        return list(live.branches.values())

    def accept(self, request_id: str) -> None:
        live = self.live[request_id]
        if not live.accepted:
            live.accepted = True
            self.events.append(Event(kind="accepted", request_id=request_id, epoch=live.request.epoch))

    def cancel(self, request_id: str, branch: int | None) -> None:
        """Cancel the branches of a request, or one of them. Those that have ended stay as they are."""
        if (live := self.live.get(request_id)) is None:
            return
        chosen = [s for b, s in live.branches.items() if branch is None or b == branch]
        if chosen:
            self.accept(request_id)
        for seq in chosen:
            self.finish(seq, "cancelled")

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End one branch in any state, and tell it. Its pages, seat and sampler state become free."""
        self.drop(seq, reason)
        self.events.append(
            Event(
                kind="tokens",
                request_id=seq.request.id,
                epoch=seq.request.epoch,
                branch=seq.branch,
                index=seq.num_output,
                finish_reason=reason,
                num_cached=seq.num_cached,
            )
        )

    def fail(self, request_id: str, failure: Failure) -> None:
        live = self.live[request_id]
        self.failed[failure["code"]] += 1
        for seq in list(live.branches.values()):
            self.drop(seq, "error")
        self.events.append(Event(kind="error", request_id=request_id, epoch=live.request.epoch, **failure))

    def drop(self, seq: Sequence, reason: FinishReason) -> None:
        """End one branch without a word."""
        self.close_seat(seq)
        seq.finish_reason = reason
        for ended in self._ended:
            ended(seq, reason)
        self._scheduler.finish(seq, reason)
        live = self.live[seq.request.id]
        live.branches.pop(seq.branch, None)
        if not live.branches:
            for forgotten in self._forgotten:
                forgotten(seq.request.id)
            del self.live[seq.request.id]

    def close_seat(self, seq: Sequence) -> None:
        """Forget what the device keeps of a sequence that ends or was preempted."""
        if seq.open_seat >= 0:
            self._runner.close(seq.open_seat)
            seq.open_seat = -1
