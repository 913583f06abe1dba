"""Our engine as an endpoint, in its own process: token ids, seeds, scores, and forks that share the prompt's pages.

A call of n samples is one request with n branches (one request for every 256 of them, the most that a request may
hold): the prompt is computed once and forked. Continuing a reply (`Seq`) is a request whose prompt ends with it. The
prefix cache holds its pages, under a lease that memory pressure may end. The engine's noise is keyed by position, so
the continuation is what one long request would have given.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import itertools
import struct
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from functools import partial

from kvasir.client.admission import MAX_LOGPROBS, MAX_N, admit, admit_pooling
from kvasir.client.front import Front
from kvasir.client.interface import EngineClient
from kvasir.client.pieces import PIECE
from kvasir.cluster.cluster_client import open_client, with_replicas
from kvasir.config import EngineConfig
from kvasir.decoding.confidence import summed_up
from kvasir.errors import ConfigError, RequestError
from kvasir.models import checkpoint
from kvasir.models.cost import active_params
from kvasir.models.families import build_spec
from kvasir.models.pooling import read_pooling
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
    Shape,
    Usage,
    confidence_of,
)
from kvasir.scaling.ledger import Price
from kvasir.types import (
    Event,
    Grammar,
    PoolingParams,
    ProcessorParams,
    PromptScore,
    Request,
    SamplingParams,
    Thinking,
    TokenLogprob,
    branch_stream,
)

DEFAULT_CONFIDENCES = 20  # Likeliest tokens that a confidence is the mean of.
FIRST = -1  # Priority of calls that are a prompt and nothing more, because a round of them holds up a whole loop.
FEATURES = ("fork", "score", "group")
HEARTBEAT_PATIENCE = 5.0  # Seconds to wait for a heartbeat; there are four a second.
RETRIED = (429, 500, 503)  # Statuses of a request that may succeed another time.


def group_seed(seed: int, number: int) -> int:
    """The stream of a call's request number ``number``, which makes sample i the same for every n."""
    return (
        seed
        if number == 0
        else int.from_bytes(hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest(), "little")
    )


class ClientEndpoint(Endpoint):
    """An engine that somebody else starts and stops.

    ``confidences`` k: number of the likeliest tokens that a confidence is the mean of (0: no confidence, a little
    faster). ``lease``: seconds for which a paused reply keeps its pages; needs the prefix cache. ``tenant``: salt of
    the prefix key. ``most``: most tokens of a reply, whatever a strategy asks for (0: no limit). ``without``: features
    of the engine not to use, to measure what they are worth: ``fork`` (the prompt once for n samples), ``score`` (the
    score as one record) and ``group`` (a group that the engine ends itself). They change no reply. ``reward``: the
    model is a reward model, with one score of a text and no tokens. ``apart`` runs a job in another thread: a chat
    template may take ten seconds.
    """

    caps = Caps(tokens=True, logprobs=True, score=True, choose=True, fork=True, schema=True, bound=True)

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
        most: int = 0,
        without: Sequence[str] = (),
        reward: bool = False,
        apart: Callable[[Callable[[], list[int]]], Awaitable[list[int]]] = asyncio.to_thread,
    ) -> None:
        if confidences == 1:
            raise ConfigError(
                "confidences=1 would invert the score: the likeliest token alone gives a large value when the model is "
                "unsure. Take 5 to 20."
            )
        self.engine, self.tokenizer, self.name = engine, tokenizer, name
        self.parameters, self.vocabulary, self.price = parameters, vocabulary or name, price or Price()
        self.confidences, self.lease, self.tenant, self.most = confidences, lease, tenant, most
        # prefix of request ids, because several endpoints may share an engine
        self._prefix = f"{name}-{uuid.uuid4().hex[:12]}"
        self._numbers = itertools.count()
        if unknown := set(without) - set(FEATURES):
            raise ConfigError(f"without {', '.join(sorted(unknown))}: the features are {', '.join(FEATURES)}")
        self.without = frozenset(without)
        self.caps = dataclasses.replace(self.caps, fork="fork" not in self.without)
        self._apart = apart
        self._turn = asyncio.Lock()  # prompts are prepared in the order of their calls, so budgets are shared alike
        if reward:  # such a model has no head for tokens
            self.caps = Caps(score=True, reward=True, writes=False)

    async def busy_seconds(self) -> float | None:
        asked = time.monotonic()
        while time.monotonic() < asked + HEARTBEAT_PATIENCE:
            if (stats := self.engine.stats()).time >= asked:  # both times are of this machine's clock
                return stats.busy_seconds
            await asyncio.sleep(0.02)
        return None

    def forget(self) -> None:
        self.tenant = f"{self._prefix}-{next(self._numbers)}"

    async def prepare(self, prompt: Prompt) -> None:
        async with self._turn:
            if self not in prompt.prepared:
                prompt.prepared[self] = await self._apart(partial(self._encode, prompt))

    def ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Raises Refused for one that cannot be encoded."""
        if self not in prompt.prepared:
            prompt.prepared[self] = self._encode(prompt)
        return prompt.prepared[self]

    def _encode(self, prompt: Prompt) -> list[int]:
        try:
            return [*self.tokenizer.encode_chat(list(prompt.messages)), *prompt.begun]
        except RequestError as e:
            raise Refused(e.message) from e

    def most_prompt_tokens(self, prompt: Prompt) -> int:
        return len(self.ids(prompt))

    def draw(self, prompt: Prompt, n: int, sampling: Sampling, seed: int, group: Group | None = None) -> Draw:
        ids = self.ids(prompt)
        room = max(1, self.engine.info.max_model_len - len(ids))
        size = MAX_N if self.caps.fork else 1
        # The engine sees that a reply ends, but not what its text holds. With several requests it does not see the
        # whole group.
        seen = (
            group is not None
            and group.on == "eos"
            and group.accept is None
            and n <= size
            and "group" not in self.without
        )
        first_of = group.finish_after if group is not None and seen else None
        apart = bool(sampling.stop) or group is not None and not seen  # something is decided here between two tokens
        lease = self.lease if sampling.stop else 0.0  # a reply that stops at a delimiter is likely to continue
        shape = sampling.shape or Shape()
        requests = []
        for first in range(0, n, size):
            stream, branch = group_seed(seed, first // MAX_N), first % MAX_N
            params = SamplingParams(
                n=min(size, n - first),
                temperature=sampling.temperature,
                max_tokens=min(sampling.max_tokens, room, self.most or room),
                seed=branch_stream(stream, branch) if branch else stream,
                confidence=self.confidences,
                finish_after=first_of,
                lease=lease,
                detokenize=False,
                grammar=Grammar("json_schema", shape.schema) if shape.schema else None,
            )
            requests.append(self.request(ids, params, prompt.affinity))
            requests[-1].processors = self.bound(shape)
            requests[-1].piece, requests[-1].bare = 1 if apart else PIECE, True
        return EngineDraw(self, requests, size, sampling.stop, apart)

    def bound(self, shape: Shape) -> list[ProcessorParams]:
        """The processor that forces the shape's mark: the text before the mark is to it what thinking is."""
        if not shape.mark:
            return []
        part = Thinking((), tuple(self.tokenizer.encode(shape.mark, add_special=False)), "inside", shape.mark)
        nothing: dict[str, tuple[int, ...]] = {"first": (), "last": (), "wait": ()}
        return [ProcessorParams(f"budget:num_ignore=0,max_thinking={shape.limit}", nothing, part)]

    def request(self, ids: list[int], params: SamplingParams, affinity: str, priority: int = 0) -> Request:
        """A validated request for the engine. Raises Refused for one that the engine would reject."""
        return self._admitted(admit, ids, params, affinity, priority)

    def _admitted(
        self, admit: Callable[..., Request], ids: list[int], params: object, affinity: str, priority: int
    ) -> Request:
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
        made.affinity = affinity and f"{self._prefix}/{affinity}"  # other runs may have problems of the same name
        return made

    async def events(self, request: Request) -> AsyncGenerator[Event, None]:
        """The engine's events.

        Its errors become EndpointError when another try makes sense, otherwise Refused.
        """
        try:
            async with contextlib.aclosing(self.engine.generate(request)) as events:
                async for event in events:
                    yield event
        except RequestError as e:
            if e.status in RETRIED and e.code != "quarantined":
                raise EndpointError(e.message, e.retry_after) from e
            raise Refused(e.message) from e

    async def score(self, prompt: Prompt, sample: Sample, usage: Usage) -> Score:
        """Score by teacher forcing; one record comes back from the engine.

        Ids are used when the vocabularies agree. Otherwise the text is encoded, without an end mark.
        """
        begin = self.ids(prompt)
        reply = (
            list(sample.ids)
            if sample.vocabulary == self.vocabulary and (sample.ids or not sample.text)
            else self.tokenizer.encode(sample.text, add_special=False)
        )
        if self.caps.reward:
            return await self._reward([*begin, *reply], len(reply), prompt.affinity, usage)
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
        request.max_tokens = 0  # no token is wanted, only the prompt's score
        found: PromptScore | None = None
        async for event in self.events(request):
            _count(usage, request, event)
            found = event.score or found
            if event.prompt_logprobs:
                found = self._scored([entry for entry in event.prompt_logprobs[len(begin) :] if entry is not None])
        assert found is not None and found.tokens == len(reply), f"{found} of {len(reply)} tokens"
        return Score(found.confidence or 0.0, found.logprob, found.tokens, found.lowest)

    async def _reward(self, ids: list[int], count: int, affinity: str, usage: Usage) -> Score:
        """The score of a reward model at the last of ``ids``, of which ``count`` are the reply's."""
        request = self._admitted(admit_pooling, ids, PoolingParams(), affinity, FIRST)
        found = None
        async for event in self.events(request):
            _count(usage, request, event)
            found = event.pooled or found
        assert found is not None
        return Score(0.0, 0.0, count, reward=struct.unpack("<f", found)[0])

    def _scored(self, entries: Sequence[TokenLogprob]) -> PromptScore:
        """The record that the engine would have made, from the likeliest alternatives of every token."""
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
    """An engine that this endpoint starts and stops, in its own process, or ``replicas`` of them behind one front."""

    engine: Front

    def __init__(
        self,
        config: EngineConfig,
        name: str = "",
        *,
        price: Price | None = None,
        confidences: int = DEFAULT_CONFIDENCES,
        lease: float = 30.0,
        without: Sequence[str] = (),
        replicas: int = 1,
    ) -> None:
        model = config.model
        path = checkpoint.resolve(model.model, model.revision)
        source = checkpoint.resolve(model.tokenizer) if model.tokenizer else path
        file = source / "tokenizer.json" if source.is_dir() else source
        hf = checkpoint.read_config(path)
        pooling = read_pooling(path, hf, model.task, model.model)
        if pooling is not None and pooling.task == "embed":
            raise ConfigError(f"{path} makes embeddings, and strategies need a model that writes or a reward model")
        super().__init__(
            open_client(with_replicas(config, replicas)),
            Tokenizer.load(source, model.chat_template),
            name or model.model or path.name,
            price=price,
            parameters=active_params(build_spec(hf)),
            vocabulary=hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest(),
            confidences=confidences,
            lease=lease if config.cache.enable_prefix_caching else 0.0,
            without=without,
            reward=pooling is not None,
        )

    async def start(self) -> None:
        await self.engine.start()

    async def close(self) -> None:
        await self.engine.stop(0)


def _count(usage: Usage, request: Request, event: Event) -> None:
    """Count a request's prompt once, at its first token.

    What its first branch found in the prefix cache was not computed.
    """
    if event.kind == "tokens" and event.branch == 0 and event.index == 0 and request.id:
        usage.cached += event.num_cached
        usage.uncached += len(request.prompt_ids) - event.num_cached


class EngineDraw(Draw):
    """The requests of one call, ``size`` samples each.

    Gives one chunk for each event, or one for each token when ``apart`` is set.
    """

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
        """The chunks of several requests as they arrive."""
        chunks: asyncio.Queue[Chunk | BaseException] = asyncio.Queue()

        async def follow(number: int, request: Request) -> None:
            try:
                async for chunk in self._follow(number, request):
                    chunks.put_nowait(chunk)
            except Exception as e:  # raised where the draw is iterated
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
                        # The engine continued until it heard of the end. These tokens are wasted but must be paid.
                        self.usage.overrun += chunk.count
                        if chunk.finish is not None:
                            yield Chunk(chunk.index, finish="stop", count=0)
                        continue
                    if self.stop:
                        texts[event.branch] += chunk.text
                        if chunk.finish is None and any(s in texts[event.branch] for s in self.stop):
                            # The token that completes the delimiter stays whole, because cutting it would change the
                            # ids.
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
    """The log-probabilities and confidences of an event's tokens; empty when not asked for."""
    if event.bare is not None:
        return event.bare.logprobs, event.bare.confidences
    entries = event.logprobs or ()
    return [entry.logprob for entry in entries], [entry.confidence for entry in entries if entry.confidence is not None]
