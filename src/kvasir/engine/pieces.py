"""Tokens of a reply that nobody reads as it comes leave the engine process in pieces of several: an event costs both processes
about the same, whether it holds one token or many. Their log-probabilities leave it as plain numbers, where no alternatives were
asked for."""

from __future__ import annotations

from collections.abc import Iterable

from kvasir.types import BareLogprobs, Event, Request

PIECE = 32  # tokens: what a reader who wants the whole may ask for. So many are drawn again if the process dies


class Pieces:
    """Of requests with ``piece`` > 1, tokens wait here until so many are there or their branch ends. A branch's first token does not wait:
    it tells when the reply began."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._bare: set[str] = set()  # requests whose log-probabilities go without rank and alternatives
        self._held: dict[tuple[str, int], Event] = {}

    def open(self, request: Request) -> None:
        if request.piece > 1:
            self._sizes[request.id] = request.piece
            if request.params.logprobs == 0:
                self._bare.add(request.id)

    def close(self, request_id: str) -> None:
        """The request has ended: nothing of it is sent any more."""
        if self._sizes.pop(request_id, None) is not None:
            self._bare.discard(request_id)
            for key in [key for key in self._held if key[0] == request_id]:
                del self._held[key]

    def ready(self, events: list[Event]) -> list[Event]:
        """What is to be sent of ``events`` and of those before them, in the order of each branch."""
        if not self._sizes:
            return events
        ready = list(self._ready(events))
        for event in ready:
            if event.logprobs is not None and event.request_id in self._bare:
                strip(event)
        return ready

    def _ready(self, events: list[Event]) -> Iterable[Event]:
        for event in events:
            size = self._sizes.get(event.request_id)
            if size is None or event.kind != "tokens" or event.index == 0:
                yield event
                continue
            key = event.request_id, event.branch
            held = self._held.pop(key, None)
            if held is not None and join(held, event):
                event = held
            elif held is not None:
                yield held
            if len(event.token_ids) >= size or event.finish_reason is not None or event.score is not None:
                yield event
            else:
                self._held[key] = event


def strip(event: Event) -> None:
    """Leave the plain numbers of its log-probabilities."""
    entries = event.logprobs
    event.bare = BareLogprobs([e.logprob for e in entries], [e.confidence for e in entries if e.confidence is not None])
    event.logprobs = None


def join(first: Event, second: Event) -> bool:
    """Append ``second`` to ``first``, the tokens just before it, if one event can hold both."""
    if second.prompt_logprobs is not None or second.score is not None or first.finish_reason is not None:
        return False
    if second.token_ids:
        if (first.logprobs is None) != (second.logprobs is None) or (first.bare is None) != (second.bare is None):
            return False
        first.token_ids.extend(second.token_ids)
        if first.logprobs is not None:
            first.logprobs.extend(second.logprobs)
        if first.bare is not None:
            first.bare.logprobs.extend(second.bare.logprobs)
            first.bare.confidences.extend(second.bare.confidences)
    first.finish_reason, first.stop_reason = second.finish_reason, second.stop_reason
    first.num_cached = second.num_cached
    return True
