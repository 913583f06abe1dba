"""One HTTP request's generation: from admitted engine requests to text deltas, choice by choice.

A body may hold several prompts, each with ``n`` branches; choice ``i * n + b`` is branch ``b`` of prompt ``i``. The
same deltas feed a stream and a collected reply, so the two cannot differ. Whatever happens, the engine's iterators are
closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvasir.api.http.metrics import Metrics
from kvasir.api.text.detokenize import Detokenizer
from kvasir.client.interface import EngineClient
from kvasir.errors import RequestError
from kvasir.types import Event, Request, TokenLogprob


@dataclass(slots=True)
class Delta:
    """New tokens and text of one choice. ``text`` may be empty while half a character or stop string is held back.

    ``index``: place of the first token in the choice's output; ``forced``: places of forced tokens. ``offsets``: where
    each token's text starts in the choice's text. ``ends``: for each token, the length of ``text`` that came with it
    and those before it. ``finish_reason`` is set on the last delta of the choice.
    """

    choice: int
    text: str
    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    offsets: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    ends: list[int] = field(default_factory=list)
    forced: list[int] = field(default_factory=list)

    def singly(self) -> Iterator[Delta]:
        """Split into deltas of one token, for results that must not depend on how many tokens came at once."""
        last, start = len(self.token_ids) - 1, 0
        if last < 1:
            yield self
            return
        for i, (token, end) in enumerate(zip(self.token_ids, self.ends, strict=True)):
            part = Delta(
                self.choice,
                self.text[start:end],
                self.index + i,
                [token],
                self.logprobs and self.logprobs[i : i + 1],
                self.offsets[i : i + 1],
                forced=[place for place in self.forced if place == self.index + i],
            )
            if i == last:
                part.finish_reason, part.stop_reason = self.finish_reason, self.stop_reason
            yield part
            start = end


@dataclass(slots=True)
class Usage:
    """Token counts. ``completion`` counts every generated token up to the one that completed a stop string; ``forced``
    of them were forced."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0
    forced: int = 0

    def object(self) -> dict[str, Any]:
        """The ``usage`` object of chat and completions."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning}
            | ({"forced_tokens": self.forced} if self.forced else {}),
        }


@dataclass(slots=True)
class Branch:
    """The state of one choice while its tokens arrive."""

    choice: int
    detokenizer: Detokenizer
    num_tokens: int = 0
    done: bool = False
    finish_reason: str | None = None
    first: float | None = None  # time.monotonic() of its first token
    last: float | None = None  # time.monotonic() of its latest token


@dataclass(slots=True)
class Running:
    """One engine request: its events, its branches, and what came with its prompt."""

    index: int  # number of its prompt in the body
    request: Request
    events: AsyncIterator[Event]
    branches: list[Branch]
    cached: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None
    early: list[Event] = field(default_factory=list)  # events of other branches, held until the prompt's have come
    queued: float | None = None  # seconds from arrival to its first rows in a step
    first: float | None = None  # time.monotonic() of its first token


class Generation:
    """The generation of one HTTP request. Call ``open``, read ``deltas`` once, and ``close`` it in every case; closing
    cancels what still runs."""

    def __init__(
        self,
        client: EngineClient,
        metrics: Metrics,
        requests: list[Request],
        detokenizer: Callable[[Request], Detokenizer],
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self.client = client
        self.metrics = metrics
        self.release = release  # called once, when everything is closed
        self.closed = False
        self.outcome = ""  # once closed: "finished", "disconnected", or the code of the error that ended it
        self.arrival = min(r.arrival for r in requests)
        self.usage = Usage(prompt=sum(len(r.prompt_ids) for r in requests))
        self.running: list[Running] = []
        for i, request in enumerate(requests):
            n = request.params.n
            branches = [Branch(i * n + b, detokenizer(request)) for b in range(n)]
            events = client.generate(request)
            if any(request.emitted):
                events = _resumed(request, events)
            self.running.append(Running(i, request, events, branches))
        self._by_id = {r.request.id: r for r in self.running}
        self._by_choice = [r for r in self.running for _ in r.branches]

    def of(self, delta: Delta) -> Running:
        """The engine request that a delta belongs to."""
        return self._by_choice[delta.choice]

    async def open(self) -> None:
        """Wait until the engine has accepted everything. Raises the first RequestError, with nothing left open."""
        firsts = [asyncio.ensure_future(anext(r.events)) for r in self.running]
        reason = "disconnected"
        try:
            for first in firsts:
                event = await first
                assert event.kind == "accepted", event
        except BaseException as e:
            reason = (e.code or "refused") if isinstance(e, RequestError) else reason
            await _cancel(firsts)
            await self.close(reason)
            raise

    async def close(self, reason: str = "disconnected") -> None:
        """Close all iterators, which cancels unfinished requests; idempotent. ``reason``: the label in the metrics."""
        if self.closed:
            return
        self.closed, self.outcome = True, reason
        try:
            for r in self.running:
                await r.events.aclose()
        finally:
            self.release()
            self.metrics.ended(reason, time.monotonic() - self.arrival)

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Yield deltas in order of arrival. Raises RequestError when the engine fails a request."""
        reason = "disconnected"
        left = len(self._by_choice)
        try:
            async with contextlib.aclosing(
                self._merged() if len(self.running) > 1 else self.running[0].events
            ) as events:
                async for newest in events:
                    r = self._by_id[newest.request_id]
                    for event in _behind_prompt(r, newest):
                        delta = self._delta(r, event)
                        if delta is None:
                            continue
                        if delta.finish_reason is not None:
                            left -= 1
                            if event.finish_reason is None:  # a stop string ended it, which the engine does not see
                                await self.client.cancel(r.request.id, event.branch)
                        yield delta
                    if not left:
                        break
            if left:
                raise RequestError(
                    "the engine ended the request without finishing it", status=500, code="internal_error"
                )
            reason = "finished"
        except RequestError as e:
            reason = e.code or "error"
            raise
        finally:
            await self.close(reason)

    async def _merged(self) -> AsyncGenerator[Event, None]:
        """Yield the events of several requests as they come."""
        waiting = {asyncio.ensure_future(anext(r.events, None)): r for r in self.running}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    r, event = waiting.pop(task), task.result()
                    if event is not None:
                        waiting[asyncio.ensure_future(anext(r.events, None))] = r
                        yield event
        finally:
            await _cancel(list(waiting))

    def _delta(self, r: Running, event: Event) -> Delta | None:
        """Turn one event into a delta, or None when it says nothing new."""
        branch = r.branches[event.branch]
        if event.prompt_logprobs is not None:
            r.prompt_logprobs = event.prompt_logprobs
        if event.num_cached > r.cached:
            self.usage.cached += event.num_cached - r.cached
            r.cached = event.num_cached
        if event.kind != "tokens" or branch.done:
            return None
        if event.finish_reason == "error":
            raise RequestError(
                event.message or "generation failed", status=event.status or 500, code=event.code or "internal_error"
            )
        self._time(r, branch, event)
        finished = event.finish_reason is not None
        piece = branch.detokenizer.push(event.token_ids, finished, event.finish_reason == "stop")
        count = piece.num_tokens
        delta = Delta(
            branch.choice,
            piece.text,
            branch.num_tokens,
            event.token_ids[:count],
            event.logprobs[:count] if event.logprobs is not None else None,
            piece.offsets,
            event.finish_reason,
            event.stop_reason,
            piece.ends,
            [place for place in event.forced if place < event.index + count],
        )
        self.usage.forced += len(delta.forced)
        branch.num_tokens += count
        self.usage.completion += count
        branch.done = finished
        if piece.stop is not None:
            delta.finish_reason, delta.stop_reason, branch.done = "stop", piece.stop, True
        if delta.finish_reason is not None:
            branch.finish_reason = delta.finish_reason
            self.metrics.finished(
                delta.finish_reason,
                len(r.request.prompt_ids),
                branch.num_tokens,
                None if branch.first is None or branch.last is None else branch.last - branch.first,
            )
            if all(b.done for b in r.branches):
                self.metrics.max_generated.observe(max(b.num_tokens for b in r.branches))
        return delta

    def _time(self, r: Running, branch: Branch, event: Event) -> None:
        if not event.token_ids:
            return
        now = time.monotonic()
        if event.queued is not None:
            r.queued = event.queued
            self.metrics.queue_time.observe(event.queued)
            self.metrics.prefill_time.observe(max(0.0, now - r.request.arrival - event.queued))
        if r.first is None:
            r.first = now
            self.metrics.first_token.observe(now - self.arrival)
        if branch.last is None:
            branch.first = now
        else:
            count = len(event.token_ids)
            self.metrics.inter_token.observe((now - branch.last) / count, count)
        branch.last = now


async def _resumed(request: Request, events: AsyncIterator[Event]) -> AsyncGenerator[Event, None]:
    """Yield the events of a request that goes on from an earlier server's journal: the tokens known then come first."""
    known = [list(tokens) for tokens in request.emitted]
    async with contextlib.aclosing(events):  # type: ignore[type-var]
        async for event in events:
            yield event
            if event.kind == "accepted":
                for branch, tokens in enumerate(known):
                    if tokens:
                        yield Event(kind="tokens", request_id=request.id, branch=branch, index=0, token_ids=tokens)


def _behind_prompt(r: Running, event: Event) -> list[Event]:
    """Return the events that may be delivered now. Every choice begins with its echoed prompt, whose log-probabilities
    come with branch 0; on a busy engine other branches may be ahead of it and have to wait."""
    if r.request.params.prompt_logprobs is not None and r.prompt_logprobs is None and event.prompt_logprobs is None:
        r.early.append(event)
        return []
    early, r.early = r.early, []
    return [event, *early]


async def _cancel(tasks: list[asyncio.Future]) -> None:
    """Cancel and wait, so that no iterator is still running when it is closed."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
