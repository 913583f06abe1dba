"""An EngineClient without an engine, whose answers follow from the prompt. Deterministic, no torch.

``say: TEXT`` at the end of a prompt (a user's message, or a plain prompt) makes TEXT the answer; any other prompt gets
a few words that depend on the prompt, the seed and the branch. Tests set attributes to hold, refuse, fail or slow down
requests.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from kvasir.client.interface import Health
from kvasir.errors import ConfigError, RequestError
from kvasir.models.tokenizer import Tokenizer
from kvasir.types import EngineStats, Event, ModelInfo, Request, TokenLogprob

TEMPLATE = """
{%- if tools %}<|im_start|>system
Tools: {{ tools | tojson }}. Call them like <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>{% endfor -%}
<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
CORPUS = [
    "the quick brown fox says hello world to everyone",
    "say: an answer of several words <user> assistant system",
    '{"name": "f", "arguments": {"city": "Paris", "unit": "C"}}',
    "Привет мир",
    "日本語のテキスト",
    "0123456789 .,:;!?()[]",
] * 3


@functools.cache
def tokenizer() -> Tokenizer:
    """A byte-level BPE with a ChatML template that knows thinking and Hermes tool calls."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(
        [AddedToken(t, normalized=False) for t in ("<think>", "</think>", "<tool_call>", "</tool_call>")]
    )
    return Tokenizer(backend, {"eos_token": "<|im_end|>"}, {"default": TEMPLATE})


class FakeClient:
    """The fake client. ``gate``: requests are accepted only while it is set. ``refusal``: raised instead of accepting.
    ``failure``: raised after ``fail_after`` tokens. ``delay``: seconds before each event of ``group`` tokens.
    ``drafter``: name that every second token of a group is said to be drafted by. ``forced``: places of the tokens that
    are said to be forced.
    ``backwards``: the last branch comes first. ``open``: the running requests."""

    info: ModelInfo

    def __init__(self, **info: Any) -> None:
        defaults = {
            "name": "fake",
            "max_model_len": 1024,
            "vocab_size": tokenizer().size + 7,
            "tokenizer_size": tokenizer().size,
            "eos_ids": tokenizer().eos_ids,
            "kv_capacity_tokens": 100_000,
            "priorities": True,
        }
        self._info = ModelInfo(**{**defaults, **info})
        self.gate = asyncio.Event()
        self.gate.set()
        self.start_gate = asyncio.Event()
        self.start_gate.set()
        self.refusal: RequestError | None = None
        self.failure: RequestError | None = None
        self.start_failure: ConfigError | None = None
        self.fail_after = 0
        self.delay = 0.0
        self.group = 1
        self.drafter: str | None = None
        self.forced: tuple[int, ...] = ()
        self.backwards = False
        self.ready = True
        self.live = True
        self.stopping: asyncio.Event | None = None
        self.open: dict[str, Request] = {}
        self.seen: list[Request] = []
        self.cancelled: list[tuple[str, int | None]] = []
        self.num_ended = 0
        self._ended_branches: set[tuple[str, int]] = set()
        self._cache: set[tuple[str, tuple[int, ...]]] = set()

    async def start(self) -> None:
        await self.start_gate.wait()
        if self.start_failure is not None:
            raise self.start_failure
        self.info = self._info
        self.stopping = asyncio.Event()

    def start_process(self) -> None:
        pass

    async def stop(self, drain: float | None = None) -> None:
        self.refusal = self.refusal or RequestError(
            "the server is shutting down", status=503, code="shutting_down", retry_after=5.0
        )
        end = asyncio.get_running_loop().time() + (drain or 0.0)
        while self.open and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.01)
        if self.stopping is not None:
            self.stopping.set()

    async def cancel(self, request_id: str, branch: int | None = None) -> bool:
        self.cancelled.append((request_id, branch))
        if request_id not in self.open:
            return False
        branches = range(self.open[request_id].params.n) if branch is None else [branch]
        self._ended_branches |= {(request_id, b) for b in branches}
        return True

    async def cancel_many(self, targets) -> None:
        for request_id, branch in targets:
            await self.cancel(request_id, branch)

    def health(self) -> Health:
        return Health(live=self.live, ready=self.ready, reason="" if self.ready else "the engine restarts")

    def stats(self) -> EngineStats:
        return EngineStats(
            forwards=4,
            draft_saved_seconds=-0.5,
            draft_gain=0.9,
            step_time_error={"eager": 0.25, "graph": 0.125},
            step=7,
            restarts=2,
            quarantined=1,
            num_running=len(self.open),
            num_pages=64,
            num_free_pages=60,
            num_cached_pages=2,
            prompt_tokens=11,
            generation_tokens=13,
            cached_tokens=5,
            prefix_queries=9,
            preemptions=1,
            failed={"out_of_pages": 2},
            startup={"weights": 0.5},
        )

    # ------------------------------------------------------------------------------------------------------- generating

    async def generate(self, request: Request) -> AsyncIterator[Event]:
        if self.refusal is not None:
            raise self.refusal
        assert request.id not in self.open, "two requests with one id"
        self.open[request.id] = request
        self.seen.append(request)
        try:
            await self.gate.wait()
            yield Event(kind="accepted", request_id=request.id)
            async for event in self._events(request):
                yield event
        finally:
            del self.open[request.id]
            self.num_ended += 1

    async def _events(self, request: Request) -> AsyncIterator[Event]:
        if request.pooling is not None:
            await self._wait()
            if self.failure is not None:
                raise self.failure
            pooled, cached = fake_vector(request, self._info), self._cached(request)
            yield Event(
                kind="tokens",
                request_id=request.id,
                pooled=pooled,
                finish_reason="stop",
                num_cached=cached,
                queued=0.001,
            )
            return
        plans = [self.plan(request, b) for b in range(request.params.n)]
        places: list[int | None] = [len(tokens) for tokens in request.emitted] or [0] * len(plans)
        cached = self._cached(request)
        while any(place is not None for place in places):
            for branch, (tokens, reason, stop) in sorted(enumerate(plans), reverse=self.backwards):
                place = places[branch]
                if place is None:
                    continue
                await self._wait()
                if self.failure is not None and place >= self.fail_after:
                    raise self.failure
                if (request.id, branch) in self._ended_branches:
                    places[branch] = None
                    yield Event(
                        kind="tokens", request_id=request.id, branch=branch, index=place, finish_reason="cancelled"
                    )
                    continue
                piece = tokens[place : place + self.group]
                last = place + len(piece) >= len(tokens)
                places[branch] = None if last else place + len(piece)
                yield self._event(request, branch, place, piece, (reason, stop) if last else (None, None), cached)

    def _event(self, request: Request, branch: int, place: int, piece: list[int], end: tuple, cached: int) -> Event:
        params = request.params
        first = place == 0 and branch == 0
        logprobs = [fake_logprob(t, params.logprobs) for t in piece] if params.logprobs is not None else None
        for entry in (logprobs or [])[1::2]:
            entry.drafter = self.drafter
        scores = (
            [None, *(fake_logprob(t, params.prompt_logprobs) for t in request.prompt_ids[1:])]
            if first and params.prompt_logprobs is not None
            else None
        )
        return Event(
            kind="tokens",
            request_id=request.id,
            branch=branch,
            index=place,
            token_ids=piece,
            forced=[i for i in self.forced if place <= i < place + len(piece)],
            logprobs=logprobs,
            prompt_logprobs=scores,
            num_cached=cached,
            finish_reason=end[0],
            stop_reason=end[1],
            queued=0.001 if first else None,
        )

    async def _wait(self) -> None:
        """Pause for ``delay`` seconds, or until a shutdown."""
        assert self.stopping is not None
        try:
            await asyncio.wait_for(self.stopping.wait(), self.delay) if self.delay else await asyncio.sleep(0)
        except TimeoutError:
            pass
        if self.stopping.is_set():
            raise RequestError("the server is shutting down", status=503, code="shutting_down", retry_after=5.0)

    def _cached(self, request: Request) -> int:
        """Number of cached tokens: whole prompts only, separated by tenant as in the real cache."""
        key = (request.tenant, tuple(request.prompt_ids))
        hit = key in self._cache
        self._cache.add(key)
        return len(request.prompt_ids) - 1 if hit else 0

    def plan(self, request: Request, branch: int) -> tuple[list[int], str, int | None]:
        """The whole output of a branch: tokens, finish reason, stop reason."""
        params = request.params
        if request.max_tokens == 0:
            return [], "length", None
        answer = self.answer(request, branch)
        eos = self._info.eos_ids[0]
        tokens = [*answer, *([] if params.ignore_eos else [eos])]
        wanted = request.max_tokens if params.ignore_eos else params.min_tokens
        if len(tokens) < wanted:
            tokens = (answer or [eos]) * (wanted // max(1, len(answer))) + tokens
        for i, token in enumerate(tokens[: request.max_tokens]):
            if token in params.stop_token_ids and i + 1 >= params.min_tokens:
                return tokens[: i + 1], "stop", token
        return (
            (tokens, "stop", None)
            if len(tokens) <= request.max_tokens and not params.ignore_eos
            else (tokens[: request.max_tokens], "length", None)
        )

    def answer(self, request: Request, branch: int) -> list[int]:
        prompt = tokenizer().decode(request.prompt_ids, skip_special=False)
        _, found, said = prompt.rpartition("say: ")
        if found:
            return tokenizer().encode(said.partition("<|im_end|>")[0], add_special=False, parse_special=True)
        seed = request.seed if request.params.seed is not None else 0
        digest = hashlib.sha256(f"{request.prompt_ids} {seed} {branch}".encode()).digest()
        words = ["hello", "world", "quick", "brown", "fox", "answer", "several", "everyone"]
        return tokenizer().encode(" ".join(words[b % 8] for b in digest[:6]), add_special=False)


def fake_vector(request: Request, info: ModelInfo) -> bytes:
    """A bag of words of the prompt, or for a reranker the share of different tokens in it."""
    if info.pooling.task == "score":
        share = len(set(request.prompt_ids)) / len(request.prompt_ids)
        return np.array([share if request.pooling.use_activation is not False else 8 * share], "<f4").tobytes()
    counts = np.zeros(info.pooling.width)
    for token in request.prompt_ids:
        counts[token % len(counts)] += 1
    counts = counts[: request.pooling.dimensions]
    length = np.linalg.norm(counts) if request.pooling.use_activation is not False else 1
    return (counts / (length or 1)).astype("<f4").tobytes()


def fake_logprob(token: int, top: int) -> TokenLogprob:
    return TokenLogprob(
        token,
        -0.25 * (token % 4),
        1,
        [((token + k) % 256, -0.25 * (token % 4) - k if k < 15 else float("-inf")) for k in range(top)],
    )
