"""The building blocks of strategies: sample, score, choose, compare, and sequences that pause, fork and are cut.

Every call is reserved against the budgets, charged and journalled here, so a strategy cannot forget to. A call's key is
the path of its scope and its number there. Concurrent branches (`Context.map`) run in numbered scopes of their own. So
keys, and the seeds made from them, depend on the strategy and never on timing. Cancelling the task that waits for a
call cancels the call.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvasir.errors import ConfigError
from kvasir.scaling import endpoint as io
from kvasir.scaling.endpoint import (
    Draft,
    Endpoint,
    EndpointError,
    Group,
    Messages,
    Prompt,
    Refused,
    Sample,
    Sampling,
    Score,
    Shape,
    Usage,
)
from kvasir.scaling.journal import Journal, digest
from kvasir.scaling.ledger import Budget, BudgetExceeded, Charge, Ledger
from kvasir.scaling.problem import Problem, Result

Event = dict[str, Any]
A, B = TypeVar("A"), TypeVar("B")
MAX_BACKOFF_SECONDS = 30.0  # Longest pause before a call is tried again.


class EndpointDown(Exception):
    """An endpoint failed repeatedly: the run ends, and its calls so far are in the journal."""


@dataclass
class Run:
    """The state that all problems of a run share.

    ``name`` separates several strategies in one journal. It is no part of the seeds, so strategies get the same noise.
    ``retries``: further tries of a failed call, with a growing pause before each. ``pause``: seconds before the first
    of them. ``replayed``: calls that the journal answered.
    """

    endpoints: Sequence[Endpoint]
    seed: int = 0
    name: str = ""
    sampling: Sampling = field(default_factory=Sampling)
    journal: Journal = field(default_factory=Journal)
    ledger: Ledger = field(default_factory=Ledger)
    on_event: Callable[[Event], None] | None = None
    retries: int = 4
    pause: float = 0.5
    replayed: int = 0

    def hash(self, text: str) -> int:
        """64 bits that depend on the run's seed and ``text`` only."""
        return int.from_bytes(hashlib.blake2b(f"{self.seed}/{text}".encode(), digest_size=8).digest(), "little")


class Context:
    """One scope of one problem; ``budget`` bounds it in addition to the run's. ``endpoints``: cheapest first."""

    def __init__(
        self,
        run: Run,
        path: str,
        *,
        budget: Budget | None = None,
        ledger: Ledger | None = None,
        kept: list[Result] | None = None,
    ) -> None:
        self.run, self.path = run, path
        self.ledger = ledger or Ledger(budget, run.ledger)
        self._calls = 0
        self._kept: list[Result] = [] if kept is None else kept

    # ----------------------------------------------------------------------------------------------------------- scopes

    @property
    def problem(self) -> str:
        """The id of the problem, with which the paths of its scopes begin."""
        return self.path.partition("/")[0]

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        """The models that write, cheapest first."""
        return [e for e in self.run.endpoints if e.caps.writes]

    def endpoint(self, name: str = "") -> Endpoint:
        """The endpoint called ``name``; "" is the last and strongest one. Raises ConfigError."""
        return io.find(self.run.endpoints, name) if name else self.endpoints[-1]

    def child(self, name: str) -> Context:
        """A scope inside this one. Each name may be used once."""
        return Context(self.run, f"{self.path}/{name}", ledger=self.ledger, kept=self._kept)

    def rng(self, purpose: str) -> random.Random:
        """Random numbers that depend on the seed, the scope and the purpose only."""
        return random.Random(self.run.hash(f"{self.path}?{purpose}"))

    def emit(self, kind: str, **what: Any) -> None:
        """Send an event to the run's listener."""
        if self.run.on_event is not None:
            self.run.on_event({"event": kind, "scope": self.path, **what})

    def keep(self, result: Result) -> None:
        """Keep the best result so far. The problem ends with it when a budget does not allow the next call."""
        self._kept[:] = [result]

    @property
    def kept(self) -> Result | None:
        return self._kept[0] if self._kept else None

    async def map(self, name: str, job: Callable[[Context, A], Awaitable[B]], items: Iterable[A]) -> list[B]:
        """Run ``job`` on every item concurrently, each in a scope of its own.

        If one raises, the others end first, then the error is raised. Among several, an error that ends the run goes
        before one that ends the problem.
        """
        jobs = [job(self.child(f"{name}{i}"), item) for i, item in enumerate(items)]
        done = await asyncio.gather(*jobs, return_exceptions=True)
        failed = sorted((d for d in done if isinstance(d, BaseException)), key=lambda e: isinstance(e, BudgetExceeded))
        if failed:
            raise failed[0]
        return done  # type: ignore[return-value]

    # ------------------------------------------------------------------------------------------------------------ calls

    async def sample(
        self,
        endpoint: Endpoint,
        messages: Messages,
        n: int = 1,
        *,
        begun: Sequence[int] = (),
        max_tokens: int | None = None,
        temperature: float | None = None,
        stop: Sequence[str] = (),
        finish_after: int | None = None,
        on: str = "eos",
        accept: Callable[[str], bool] | None = None,
        stream: int | None = None,
        shape: Shape | None = None,
    ) -> list[Sample]:
        """Sample ``n`` replies, in order of their number.

        With ``finish_after``, only the first replies count (see `Group`), and the others end as "group". A budget
        without room for all gives fewer. The list is empty when the endpoint refuses the prompt. Raises BudgetExceeded
        when not even one fits.
        """
        prompt, key = Prompt(tuple(messages), tuple(begun), self.problem), self._key()
        usual = self.run.sampling
        sampling = Sampling(
            usual.max_tokens if max_tokens is None else max_tokens,
            usual.temperature if temperature is None else temperature,
            tuple(stop),
            shape,
        )
        group = None if finish_after is None else Group(min(finish_after, n), on, accept)
        how = sampling.max_tokens, sampling.temperature, sampling.stop, *(shape or ())
        request = digest(
            ["sample", endpoint.name, list(prompt.messages), prompt.begun, n, how, finish_after, on, stream]
        )
        seed = self.run.hash(key) if stream is None else stream

        async def call(usage: Usage, drafts: list[Draft], granted: int) -> list[Any]:
            drafts[:] = [Draft(i) for i in range(granted)]
            draw = endpoint.draw(prompt, granted, sampling, seed, group)
            draw.usage = usage
            async with aclosing(draw):
                await io.collect(draw, drafts, group)
            return [io.plain(d.sample(endpoint)) for d in drafts]

        entry = await self._call("sample", key, request, endpoint, prompt, call, n, sampling.max_tokens)
        return [io.from_plain(s) for s in entry]

    async def score(self, endpoint: Endpoint, messages: Messages, sample: Sample) -> Score | None:
        """Confidence of ``endpoint`` in a text under the prompt that made it; None when it refuses."""
        prompt = Prompt(tuple(messages), affinity=self.problem)
        request = digest(["score", endpoint.name, list(prompt.messages), sample.ids or sample.text])

        async def call(usage: Usage, drafts: list[Draft], granted: int) -> list[Any]:
            return [dataclasses.asdict(await endpoint.score(prompt, sample, usage))]

        entry = await self._call(
            "score",
            self._key(),
            request,
            endpoint,
            prompt,
            call,
            1,
            0,
            extra=len(sample.text.encode()) + 8 + sample.tokens,
        )
        return Score(**entry[0]) if entry else None

    async def choose(self, endpoint: Endpoint, messages: Messages, options: Sequence[str]) -> dict[str, float] | None:
        """Log-probabilities of the options as the next token, for the cost of a prompt; None when refused."""
        prompt = Prompt(tuple(messages), affinity=self.problem)
        request = digest(["choose", endpoint.name, list(prompt.messages), list(options)])

        async def call(usage: Usage, drafts: list[Draft], granted: int) -> list[Any]:
            return [{o: max(p, -1e9) for o, p in (await endpoint.choose(prompt, options, usage)).items()}]

        entry = await self._call("choose", self._key(), request, endpoint, prompt, call, 1, 1)
        return entry[0] if entry else None

    async def compare(
        self, endpoint: Endpoint, problem: Problem, a: str, b: str, *, temperature: float | None = None
    ) -> tuple[int, int] | None:
        """The judge's ratings of two texts; None when its reply holds no ratings.

        Which text stands first is drawn at random.
        """
        swapped = self.rng(f"order {self._calls}").random() < 0.5
        first, second = (b, a) if swapped else (a, b)
        replies = await self.sample(
            endpoint, problem.prompts.judge_pair(problem, first, second), temperature=temperature
        )
        rated = problem.prompts.ratings(replies[0].text) if replies else None
        return rated if rated is None or not swapped else (rated[1], rated[0])

    def open(self, endpoint: Endpoint, messages: Messages) -> Seq:
        """Start a reply that is written piece by piece."""
        return Seq(self, endpoint, tuple(messages), self.run.hash(self._key()))

    # -------------------------------------------------------------------------------------------------------- machinery

    def _key(self) -> str:
        self._calls += 1
        return f"{self.path}#{self._calls - 1}"

    async def _call(
        self,
        kind: str,
        key: str,
        request: str,
        endpoint: Endpoint,
        prompt: Prompt,
        call: Callable[..., Awaitable[list[Any]]],
        n: int,
        max_tokens: int,
        extra: int = 0,
    ) -> list[Any]:
        """Replay the call from the journal, or make it: reserve, run with retries, charge, journal."""
        name = f"{self.run.name}:{key}"
        entry = self.run.journal.find(name, request)
        if entry is None:
            entry = await self._make(kind, name, request, endpoint, prompt, call, n, max_tokens, extra)
        else:
            self.run.replayed += 1
            if entry["charge"] is not None:
                self.ledger.commit(Charge(**entry["charge"]))
        if isinstance(entry["result"], str):
            raise BudgetExceeded(entry["result"])
        return entry["result"]

    async def _make(
        self,
        kind: str,
        name: str,
        request: str,
        endpoint: Endpoint,
        prompt: Prompt,
        call: Callable[..., Awaitable[list[Any]]],
        n: int,
        max_tokens: int,
        extra: int,
    ) -> dict[str, Any]:
        journal = self.run.journal
        try:
            await endpoint.prepare(prompt)
            length = endpoint.most_prompt_tokens(prompt) + extra
        except Refused as e:
            self.emit("refused", endpoint=endpoint.name, why=str(e))
            return journal.add(name, request, [], None)
        for attempt in range(self.run.retries + 1):
            granted = self._granted(endpoint, length, n, max_tokens)
            try:
                reserved = self.ledger.reserve(self._worst(endpoint, length, max(1, granted), max_tokens))
            except BudgetExceeded as e:
                return journal.add(name, request, str(e), None)
            usage, drafts, begin = Usage(), [], time.perf_counter()

            def charge(kind: str, usage: Usage = usage, drafts: list[Draft] = drafts, begin: float = begin) -> Charge:
                return self._charge(kind, name, endpoint, usage, drafts, time.perf_counter() - begin)

            try:
                result = await call(usage, drafts, granted)
            except EndpointError as e:
                self._lose(charge("lost"))
                self.emit("retry", endpoint=endpoint.name, attempt=attempt, why=str(e))
                error, wait = e, e.retry_after
            except Refused as e:
                self.emit("refused", endpoint=endpoint.name, why=str(e))
                return journal.add(name, request, [], None)
            except BaseException:
                self._lose(charge("lost"))
                raise
            else:
                if kind == "choose":
                    drafts.append(Draft(0, tokens=1, finish="group"))  # the token itself is discarded
                made = charge(kind)
                made = dataclasses.replace(made, scored=result[0]["tokens"]) if kind == "score" else made
                self.ledger.commit(made)
                return journal.add(name, request, result, made)
            finally:
                self.ledger.release(reserved)
            if attempt < self.run.retries:
                await asyncio.sleep(min(MAX_BACKOFF_SECONDS, wait if wait is not None else self.run.pause * 2**attempt))
        raise EndpointDown(f"{endpoint.name} failed {self.run.retries + 1} times in a row, the last time: {error}")

    def _granted(self, endpoint: Endpoint, length: int, n: int, max_tokens: int) -> int:
        """Number of the ``n`` samples that the budgets have room for.

        A budget reduces the number of samples, not their length: a reply cut short has no answer.
        """

        def fits(n: int) -> bool:
            wanted = self._worst(endpoint, length, n, max_tokens)
            rooms = {
                "tokens": wanted.uncached + wanted.discarded,
                "generated": wanted.discarded,
                "dollars": wanted.dollars,
            }
            return all(amount <= self.ledger.room(unit) for unit, amount in rooms.items())

        low, high = 1, n  # low fits, or will be refused as a whole
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low

    def _worst(self, endpoint: Endpoint, length: int, n: int, max_tokens: int) -> Charge:
        """The worst case: nothing of the prompt is cached, and every sample is as long as allowed."""
        usage = Usage(uncached=length if endpoint.caps.fork else n * length)
        return self._charge("sample", "", endpoint, usage, [Draft(0, tokens=n * max_tokens)], 0.0)

    def _charge(
        self, kind: str, name: str, endpoint: Endpoint, usage: Usage, drafts: Sequence[Draft], seconds: float
    ) -> Charge:
        kept = 0 if kind == "lost" else sum(d.tokens for d in drafts if d.finish in ("stop", "length"))
        discarded = sum(d.tokens for d in drafts) - kept + usage.overrun
        price = endpoint.price
        dollars = (
            usage.uncached * price.uncached + usage.cached * price.cached + (kept + discarded) * price.generated
        ) / 1e6
        flops = 2.0 * endpoint.parameters * (usage.uncached + kept + discarded)
        return Charge(
            key=name,
            endpoint=endpoint.name,
            kind=kind,
            uncached=usage.uncached,
            cached=usage.cached,
            generated=kept,  # type: ignore[arg-type]
            discarded=discarded,
            flops=flops,
            dollars=dollars,
            seconds=round(seconds, 6),
        )

    def _lose(self, charge: Charge) -> None:
        if charge.uncached or charge.cached or charge.discarded:
            self.ledger.commit(charge)
            self.run.journal.add_lost(charge)


class Seq:
    """A reply written piece by piece: `generate`, `fork` and `truncate`. Needs an endpoint with ``caps.tokens``.

    Each piece is a call whose prompt holds the ids so far, so its pages come from the prefix cache and nothing is
    tokenised twice. The stream stays the same and noise is keyed by position, so the pieces equal one long generation.
    """

    def __init__(
        self, context: Context, endpoint: Endpoint, messages: tuple, stream: int, *, pieces: Sequence[Sample] = ()
    ) -> None:
        if not endpoint.caps.tokens:
            raise ConfigError(
                f"{endpoint.name} takes no token ids, so a reply cannot be continued there; use an engine endpoint"
            )
        self.context, self.endpoint, self.messages, self.stream = context, endpoint, messages, stream
        self.pieces: list[Sample] = list(pieces)

    @property
    def ids(self) -> list[int]:
        return [i for piece in self.pieces for i in piece.ids]

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def tokens(self) -> int:
        return sum(piece.tokens for piece in self.pieces)

    @property
    def done(self) -> bool:
        """Whether the reply ended by itself; ending at a delimiter does not count."""
        return bool(self.pieces) and self.pieces[-1].finish == "stop" and not self.pieces[-1].met

    async def generate(
        self,
        until: Sequence[str] = (),
        max_tokens: int | None = None,
        temperature: float | None = None,
        scope: Context | None = None,
        shape: Shape | None = None,
    ) -> Sample | None:
        """Continue until one of ``until`` is written (it stays), the end, or ``max_tokens``.

        None when there is no room for more. ``scope``: the scope of the call, for sequences that continue concurrently;
        by default the scope that opened the sequence.
        """
        assert not self.done, "the reply has ended"
        found = await (scope or self.context).sample(
            self.endpoint,
            self.messages,
            begun=self.ids,
            max_tokens=max_tokens,
            temperature=temperature,
            stop=until,
            stream=self.stream,
            shape=shape,
        )
        if not found:
            return None
        met = 1 if found[0].finish == "stop" and any(u in found[0].text for u in until) else None
        self.pieces.append(dataclasses.replace(found[0], met=met))
        return self.pieces[-1]

    def fork(self, n: int) -> list[Seq]:
        """``n`` sequences that start as this one and continue with noise of their own. This one does not change."""
        return [
            Seq(
                self.context,
                self.endpoint,
                self.messages,
                self.context.run.hash(f"{self.stream}/{len(self.ids)}/{i}"),
                pieces=self.pieces,
            )
            for i in range(n)
        ]

    def truncate(self, pieces: int) -> None:
        """Keep the first ``pieces`` pieces and charge the rest as discarded."""
        gone, self.pieces = self.pieces[pieces:], self.pieces[:pieces]
        self.context.ledger.discard(self.endpoint.name, sum(p.tokens for p in gone))

    def sample(self, index: int = 0) -> Sample:
        """The whole reply as one sample."""
        known = [p for p in self.pieces if p.confidence is not None]
        weight = sum(p.tokens for p in known)
        sure = sum(p.confidence * p.tokens for p in known) / weight if weight else None
        logprob = sum(p.logprob or 0.0 for p in self.pieces)
        finish = "stop" if self.done else "length"
        return Sample(
            index,
            self.text,
            self.tokens,
            finish,
            self.endpoint.name,
            self.endpoint.vocabulary,
            tuple(self.ids),
            sure,
            logprob,
        )


@asynccontextmanager
async def opened(endpoints: Sequence[Endpoint]) -> AsyncIterator[None]:
    """Start endpoints, and close them whatever happens."""
    started: list[Endpoint] = []
    try:
        for endpoint in endpoints:
            started.append(endpoint)
            await endpoint.start()
        yield
    finally:
        await asyncio.gather(*(e.close() for e in started), return_exceptions=True)
