"""An engine without a model, in this process.

Its events take the path of real ones: `Pieces`, msgpack, the journal, an outbox.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterable, Iterator

from kvasir.client import ipc, messages
from kvasir.client.journal import Journal
from kvasir.client.outbox import Outbox
from kvasir.client.pieces import Pieces
from kvasir.types import Event, ModelInfo, Request, TokenLogprob, branch_stream

LONGEST = 90


def number(*what) -> int:
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=6).digest(), "little")


class Played:
    """An engine whose replies are a function of the prompt, the branch's stream and the position.

    ``at_once``: tokens an event, as if drafts were right. ``dies``: the process dies in the middle of every request,
    and the next one sends two tokens again. ``turn``: steps between two turns of the reader. ``made``: tokens made,
    each counted once.
    """

    def __init__(self, vocabulary: int, *, at_once: int = 1, dies: bool = False, turn: int = 3) -> None:
        self.info = ModelInfo(name="played", max_model_len=1 << 16, vocab_size=vocabulary, tokenizer_size=vocabulary)
        self.at_once, self.dies, self.turn = at_once, dies, turn
        self.made = 0
        self.requests: list[Request] = []
        self.cancelled: set[tuple[str, int | None]] = set()
        self._decoder = ipc.Decoder(messages.ToClient)

    def reply(self, request: Request, branch: int) -> list[TokenLogprob]:
        stream = branch_stream(request.seed, branch) if branch else request.seed
        known, top = number(request.prompt_ids, stream), request.params.confidence
        draws = [number(known, i) for i in range(min(1 + known % LONGEST, request.max_tokens))]
        return [
            TokenLogprob(d % self.info.vocab_size, -(d % 97) / 7, d % 5, confidence=(d % 89) / 9 if top else None)
            for d in draws
        ]

    def _steps(self, request: Request) -> Iterator[list[Event]]:
        """The events of one process, starting two tokens before the end of what was delivered."""
        places = {b: max(0, len(request.emitted[b]) - 2) for b in range(request.params.n) if b not in request.ended}
        replies = {b: self.reply(request, b) for b in places}
        while places:
            step = []
            for branch, place in list(places.items()):
                news = replies[branch][place : place + self.at_once]
                places[branch] = end = place + len(news)
                reason = ("length" if end == request.max_tokens else "stop") if end == len(replies[branch]) else None
                if {(request.id, branch), (request.id, None)} & self.cancelled:
                    news, reason = [], "cancelled"
                if reason is not None:
                    del places[branch]
                step.append(
                    Event(
                        kind="tokens",
                        request_id=request.id,
                        epoch=request.epoch,
                        branch=branch,
                        index=place,
                        token_ids=[e.id for e in news],
                        num_cached=1,
                        finish_reason=reason,
                        logprobs=news or None if request.params.logprobs is not None else None,
                    )
                )
            yield step

    async def generate(self, request: Request) -> AsyncIterator[Event]:
        self.requests.append(request)
        entry, outbox, pieces = Journal().add(request), Outbox(), Pieces()
        entry.holder = 0
        pieces.open(entry.request)
        steps, deaths = enumerate(self._steps(entry.request)), 0
        while not entry.done:
            at, step = next(steps)
            if self.dies and not deaths and at == 40 // self.at_once:
                deaths = 1
                entry.rewind()
                pieces = Pieces()
                pieces.open(entry.request)
                steps = enumerate(self._steps(entry.request))
                continue
            for event in self._decoder.body(ipc.encode(messages.Events(pieces.ready(step)))[ipc.HEADER.size :]).events:
                assert (event.bare is not None) == bool(request.params.confidence and event.token_ids), event
                news = entry.admit(event)
                if news is not None:
                    self.made += len(news.token_ids)
                    outbox.put(news)
            await asyncio.sleep(0)
            if at % self.turn == self.turn - 1 or entry.done:  # a reader slower than the engine
                while len(outbox):
                    yield await outbox.get()

    async def cancel(self, request_id: str, branch: int | None = None) -> bool:
        self.cancelled.add((request_id, branch))
        return True

    async def cancel_many(self, targets: Iterable[tuple[str, int | None]]) -> None:
        self.cancelled.update(targets)
