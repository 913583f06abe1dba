"""Our engine as an endpoint: in a process of its own, with token ids, seeds, scores and forks that share the prompt's pages.

A call of n samples is one request with n branches (for every 256 of them, what a request may hold): the prompt is computed once
and forked. Continuing a reply (`Seq`) is a request whose prompt ends in it; the prefix cache holds the pages, under a lease that
memory pressure may end, and the engine's noise is keyed by position, so the continuation is what one long request would have given.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import itertools
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from kvasir.client.admission import MAX_LOGPROBS, MAX_N, admit
from kvasir.client.engine_client import AsyncEngine
from kvasir.client.interface import EngineClient
from kvasir.client.pieces import PIECE
from kvasir.config import EngineConfig
from kvasir.decoding.confidence import summed_up
from kvasir.errors import ConfigError, RequestError
from kvasir.models import checkpoint
from kvasir.models.cost import active_params
from kvasir.models.families import build_spec
from kvasir.models.text_stream import TextStream, WindowStream
from kvasir.models.tokenizer import Tokenizer
from kvasir.scaling.endpoint import (
    Caps,
    Chunk,
    Draw,
    Endpoint,
    EndpointError,
    Group,
    Prompt,
    Refused,
    Sample,
    Sampling,
    Score,
    Usage,
    confidence_of,
)
from kvasir.scaling.ledger import Price
from kvasir.types import Event, PromptScore, Request, SamplingParams, TokenLogprob, branch_stream

DEFAULT_CONFIDENCES = 20
FIRST = -1  # priority of calls that are a prompt and nothing more: a round of them holds up a whole loop
FEATURES = ("fork", "score", "group")
HEARTBEAT_PATIENCE = 5.0  # seconds; there are four heartbeats a second
RETRIED = (429, 500, 503)  # statuses of a request that may pass another time


def group_seed(seed: int, number: int) -> int:
    """The stream of the ``number``-th request of a call, so that sample i is the same whatever n is."""
    return (
        seed
        if number == 0
        else int.from_bytes(hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest(), "little")
    )


class ClientEndpoint(Endpoint):
    """An engine that somebody else starts and stops. ``confidences`` k: how many of the likeliest tokens a confidence is the mean of (0:
    no confidence, and a little faster). ``lease``: seconds for which a paused reply keeps its pages; needs the prefix cache.
    ``tenant``: salt of the prefix key. ``without``: features of the engine to do without, to see what they are worth: a fork of the
    prompt for n samples, the score as one record, the group that the engine itself ends. They change no reply."""

    caps = Caps(tokens=True, logprobs=True, score=True, choose=True, fork=True)

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        name: str,
        *,
        parameters: int = 0,
        vocabulary: str = "",
        price: Price | None = None,
        confidences: int = DEFAULT_CONFIDENCES,
        lease: float = 0.0,
        tenant: str = "",
        without: Sequence[str] = (),
    ) -> None:
        if confidences == 1:
            raise ConfigError(
                "confidences=1 turns the sign round: the likeliest token alone is large where the model is unsure. Take 5 to 20."
            )
        self.engine, self.tokenizer, self.name = engine, tokenizer, name
        self.parameters, self.vocabulary, self.price = parameters, vocabulary or name, price or Price()
        self.confidences, self.lease, self.tenant = confidences, lease, tenant
        self._prefix = f"{name}-{uuid.uuid4().hex[:12]}"  # of request ids: several endpoints may share an engine
        self._numbers = itertools.count()
        if unknown := set(without) - set(FEATURES):
            raise ConfigError(f"without {', '.join(sorted(unknown))}: the features are {', '.join(FEATURES)}")
        self.without = frozenset(without)
        self.caps = dataclasses.replace(self.caps, fork="fork" not in self.without)
        self._encoded: tuple[Prompt | None, list[int]] = (
            None,
            [],
        )  # the last prompt: a call asks for its length, then for its ids

    async def busy_seconds(self) -> float | None:
        asked = time.monotonic()
        while time.monotonic() < asked + HEARTBEAT_PATIENCE:
            if (stats := self.engine.stats()).time >= asked:  # one clock on one machine
                return stats.busy_seconds
            await asyncio.sleep(0.02)
        return None

    def forget(self) -> None:
        self.tenant = f"{self._prefix}-{next(self._numbers)}"

    def ids(self, prompt: Prompt) -> list[int]:
        if self._encoded[0] is not prompt:
            try:
                self._encoded = prompt, [*self.tokenizer.encode_chat(list(prompt.messages)), *prompt.begun]
            except RequestError as e:
                raise Refused(e.message) from e
        return self._encoded[1]

    def most_prompt_tokens(self, prompt: Prompt) -> int:
        return len(self.ids(prompt))

    def draw(self, prompt: Prompt, n: int, sampling: Sampling, seed: int, group: Group | None = None) -> Draw:
        ids = self.ids(prompt)
        room = max(1, self.engine.info.max_model_len - len(ids))
        size = MAX_N if self.caps.fork else 1
        # Ends are the engine's to see; what a text must hold is not. With several requests no engine sees the whole group.
        seen = (
            group is not None
            and group.on == "eos"
            and group.accept is None
            and n <= size
            and "group" not in self.without
        )
        first_of = group.finish_after if group is not None and seen else None
        apart = bool(sampling.stop) or group is not None and not seen  # something is decided here between two tokens
        lease = self.lease if sampling.stop else 0.0  # a reply that stops at a delimiter is likely to go on
        requests = []
        for first in range(0, n, size):
            stream, branch = group_seed(seed, first // MAX_N), first % MAX_N
            params = SamplingParams(
                n=min(size, n - first),
                temperature=sampling.temperature,
                max_tokens=min(sampling.max_tokens, room),
                seed=branch_stream(stream, branch) if branch else stream,
                confidence=self.confidences,
                finish_after=first_of,
                lease=lease,
                detokenize=False,
            )
            requests.append(self.request(ids, params, prompt.affinity))
            requests[-1].piece, requests[-1].bare = 1 if apart else PIECE, True
        return EngineDraw(self, requests, size, sampling.stop, apart)

    def request(self, ids: list[int], params: SamplingParams, affinity: str, priority: int = 0) -> Request:
        try:
            made = admit(
                ids,
                params,
                self.engine.info,
                id=f"{self._prefix}-{next(self._numbers)}",
                arrival=time.monotonic(),
                tenant=self.tenant,
                priority=priority,
            )
        except RequestError as e:
            raise Refused(e.message) from e
        made.affinity = affinity and f"{self._prefix}/{affinity}"  # other runs have problems of the same name
        return made

    async def events(self, request: Request) -> AsyncGenerator[Event, None]:
        """The engine's events, with its errors told apart by whether another try makes sense."""
        try:
            async with contextlib.aclosing(self.engine.generate(request)) as events:
                async for event in events:
                    yield event
        except RequestError as e:
            if e.status in RETRIED and e.code != "quarantined":
                raise EndpointError(e.message, e.retry_after) from e
            raise Refused(e.message) from e

    async def score(self, prompt: Prompt, sample: Sample, usage: Usage) -> Score:
        """Teacher-forced: one record comes back from the engine. Ids are kept where the vocabularies agree; else the text is encoded,
        without an end mark."""
        begin = self.ids(prompt)
        reply = (
            list(sample.ids)
            if sample.vocabulary == self.vocabulary
            else self.tokenizer.encode(sample.text, add_special=False)
        )
        if not reply:
            raise Refused("an empty reply has no score")
        k = self.confidences or DEFAULT_CONFIDENCES
        wanted = (
            {"prompt_logprobs": k}
            if "score" in self.without
            else {"score_from": len(begin), "confidence_window": self.window, "confidence": k}
        )
        request = self.request(
            [*begin, *reply],
            SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, **wanted),
            prompt.affinity,
            FIRST,
        )
        request.max_tokens = 0  # the prompt alone is wanted
        found: PromptScore | None = None
        async for event in self.events(request):
            _count(usage, request, event)
            found = event.score or found
            if event.prompt_logprobs:
                found = self._scored([entry for entry in event.prompt_logprobs[len(begin) :] if entry is not None])
        assert found is not None and found.tokens == len(reply), f"{found} of {len(reply)} tokens"
        return Score(found.confidence or 0.0, found.logprob, found.tokens, found.lowest)

    def _scored(self, entries: Sequence[TokenLogprob]) -> PromptScore:
        """The record that the engine would have made, from every token's likeliest alternatives."""
        mean, lowest = summed_up([confidence_of([p for _, p in entry.top]) for entry in entries], self.window)
        return PromptScore(sum(entry.logprob for entry in entries), len(entries), mean, lowest)

    async def choose(self, prompt: Prompt, options: Sequence[str], usage: Usage) -> dict[str, float]:
        ids = [self.tokenizer.encode(option, add_special=False) for option in options]
        if any(len(i) != 1 for i in ids) or not 1 < len({i[0] for i in ids}) <= MAX_LOGPROBS:
            raise Refused(
                f"the options {', '.join(options)} are not 2 to {MAX_LOGPROBS} different tokens of {self.name}"
            )
        allowed = tuple(i[0] for i in ids)
        request = self.request(
            self.ids(prompt),
            SamplingParams(
                max_tokens=1,
                logprobs=len(allowed),
                logprobs_mode="processed",
                allowed_token_ids=allowed,
                seed=0,
                detokenize=False,
            ),
            prompt.affinity,
            FIRST,
        )
        found: dict[int, float] = {}
        async for event in self.events(request):
            _count(usage, request, event)
            for entry in event.logprobs or []:
                found = {entry.id: entry.logprob, **dict(entry.top)}
        return {option: found.get(i[0], float("-inf")) for option, i in zip(options, ids)}


class EngineEndpoint(ClientEndpoint):
    """An engine of its own, in a process of its own."""

    engine: AsyncEngine

    def __init__(
        self,
        config: EngineConfig,
        name: str = "",
        *,
        price: Price | None = None,
        confidences: int = DEFAULT_CONFIDENCES,
        lease: float = 30.0,
        without: Sequence[str] = (),
    ) -> None:
        model = config.model
        path = checkpoint.resolve(model.model, model.revision)
        source = checkpoint.resolve(model.tokenizer) if model.tokenizer else path
        file = source / "tokenizer.json" if source.is_dir() else source
        super().__init__(
            AsyncEngine(config),
            Tokenizer.load(source, model.chat_template),
            name or model.model or path.name,
            price=price,
            parameters=active_params(build_spec(checkpoint.read_config(path))),
            vocabulary=hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest(),
            confidences=confidences,
            lease=lease if config.cache.enable_prefix_caching else 0.0,
            without=without,
        )

    async def start(self) -> None:
        await self.engine.start()

    async def close(self) -> None:
        await self.engine.stop(0)


def _count(usage: Usage, request: Request, event: Event) -> None:
    """A request's prompt, once: what its first branch found in the prefix cache was not computed."""
    if event.kind == "tokens" and event.branch == 0 and event.index == 0 and request.id:
        usage.cached += event.num_cached
        usage.uncached += len(request.prompt_ids) - event.num_cached


class EngineDraw(Draw):
    """The requests of one call, ``size`` samples each: a chunk an event, or one a token where they are wanted ``apart``."""

    def __init__(
        self, endpoint: ClientEndpoint, requests: Sequence[Request], size: int, stop: tuple[str, ...], apart: bool
    ) -> None:
        super().__init__()
        self.endpoint, self.requests, self.size, self.stop, self.apart = endpoint, requests, size, stop, apart
        self._stream: AsyncGenerator[Chunk, None] | None = None

    async def cancel(self, indexes: Sequence[int]) -> None:
        places = [divmod(index, self.size) for index in indexes]
        await self.endpoint.engine.cancel_many((self.requests[number].id, branch) for number, branch in places)

    def __aiter__(self) -> AsyncIterator[Chunk]:
        self._stream = self._follow(0, self.requests[0]) if len(self.requests) == 1 else self._merged()
        return self._stream

    async def aclose(self) -> None:
        if self._stream is not None:
            await self._stream.aclose()

    async def _merged(self) -> AsyncGenerator[Chunk, None]:
        """The chunks of several requests as they come."""
        chunks: asyncio.Queue[Chunk | BaseException] = asyncio.Queue()

        async def follow(number: int, request: Request) -> None:
            try:
                async for chunk in self._follow(number, request):
                    chunks.put_nowait(chunk)
            except Exception as e:  # whoever iterates gets it
                chunks.put_nowait(e)

        tasks = [asyncio.create_task(follow(number, request)) for number, request in enumerate(self.requests)]
        left = sum(r.params.n for r in self.requests)
        try:
            while left:
                chunk = await chunks.get()
                if isinstance(chunk, BaseException):
                    raise chunk
                left -= chunk.finish is not None
                yield chunk
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, number: int, request: Request) -> AsyncGenerator[Chunk, None]:
        tokenizer = self.endpoint.tokenizer
        streams = [tokenizer.stream(request.prompt_ids, skip=tokenizer.special_ids) for _ in range(request.params.n)]
        texts, stopped = [""] * request.params.n, set()
        async with contextlib.aclosing(self.endpoint.events(request)) as events:
            async for event in events:
                if event.kind != "tokens":
                    continue
                _count(self.usage, request, event)
                for chunk in self._chunks(event, streams[event.branch], number):
                    if event.branch in stopped:
                        # The engine ran on until it heard of the end: in vain, and to be paid.
                        self.usage.overrun += chunk.count
                        if chunk.finish is not None:
                            yield Chunk(chunk.index, finish="stop", count=0)
                        continue
                    if self.stop:
                        texts[event.branch] += chunk.text
                        if chunk.finish is None and any(s in texts[event.branch] for s in self.stop):
                            # The token that completes the delimiter stays whole: cutting it would change the ids.
                            stopped.add(event.branch)
                            await self.endpoint.engine.cancel(request.id, event.branch)
                    yield chunk

    def _chunks(self, event: Event, stream: TextStream | WindowStream, number: int) -> list[Chunk]:
        index, ids = number * self.size + event.branch, event.token_ids
        logprobs, confidences = _told(event)
        if self.apart:
            chunks = [
                Chunk(index, stream.push(token), (token,), logprobs[i : i + 1], confidences[i : i + 1])
                for i, token in enumerate(ids)
            ]
        else:
            chunks = [Chunk(index, stream.extend(ids), ids, logprobs, confidences, count=len(ids))]
        if event.finish_reason is not None:
            chunks = chunks or [Chunk(index, count=0)]
            chunks[-1].text += stream.flush()
            chunks[-1].finish = "cancelled" if event.finish_reason == "error" else event.finish_reason
        return chunks


def _told(event: Event) -> tuple[Sequence[float], Sequence[float]]:
    """The log-probabilities and confidences of an event's tokens; empty where they were not asked for."""
    if event.bare is not None:
        return event.bare.logprobs, event.bare.confidences
    entries = event.logprobs or ()
    return [entry.logprob for entry in entries], [entry.confidence for entry in entries if entry.confidence is not None]
