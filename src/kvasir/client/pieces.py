"""Fewer and smaller events for readers who do not follow a reply as it is written.

An event costs both processes about the same whether it holds one token or many, so the tokens of such a reply leave the
engine process in pieces of several. Log-probabilities leave it as plain numbers where the request wants no more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvasir.types import BareLogprobs, Event, Request

# Tokens of a piece that readers of whole replies ask for. At most this many per branch are drawn again if the engine
# process dies.
PIECE = 32


@dataclass(slots=True)
class Waiting:
    """The unsent tokens of one request.

    ``size``: tokens of a piece. ``bare``: log-probabilities are sent as plain numbers. ``unsent``: the event that each
    branch collects its tokens in.
    """

    size: int
    bare: bool
    unsent: dict[int, Event] = field(default_factory=dict)


class Pieces:
    """Collects the tokens of requests with ``piece`` > 1 until a piece is full or the branch ends.

    A branch's first token does not wait: it tells when the reply began.
    """

    def __init__(self) -> None:
        self._requests: dict[str, Waiting] = {}

    def open(self, request: Request) -> None:
        """Note what the request wants; call it before the request's first event."""
        if request.piece > 1 or request.bare:
            self._requests[request.id] = Waiting(request.piece, request.bare)

    def close(self, request_id: str) -> None:
        """Forget the request, which has ended."""
        self._requests.pop(request_id, None)

    def ready(self, events: list[Event]) -> list[Event]:
        """Take new events and return those to send now, in the order of each branch."""
        if not self._requests:
            return events
        ready: list[Event] = []
        for event in events:
            waiting = self._requests.get(event.request_id)
            if waiting is None or event.kind != "tokens":
                ready.append(event)
                continue
            whole = waiting.unsent.get(event.branch)
            if whole is None or not join(whole, event):
                if whole is not None:
                    ready.append(_sent(waiting, whole))
                waiting.unsent[event.branch] = whole = event
            if (
                event.index == 0
                or len(whole.token_ids) >= waiting.size
                or event.finish_reason is not None
                or event.score is not None
            ):
                del waiting.unsent[event.branch]
                ready.append(_sent(waiting, whole))
        return ready


def _sent(waiting: Waiting, event: Event) -> Event:
    if waiting.bare and event.logprobs is not None:
        strip(event)
    return event


def strip(event: Event) -> None:
    """Replace the log-probabilities of ``event`` by plain numbers."""
    entries = event.logprobs
    event.bare = BareLogprobs([e.logprob for e in entries], [e.confidence for e in entries if e.confidence is not None])
    event.logprobs = None


def join(first: Event, second: Event) -> bool:
    """Append ``second`` to ``first``, the tokens just before it; return False if one event cannot hold both."""
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
    first.forced.extend(second.forced)
    return True
