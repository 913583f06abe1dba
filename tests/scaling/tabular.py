"""A language model that is a table.

Every probability has a closed form, and noise is keyed by stream and position as in the engine.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
from collections.abc import AsyncIterator, Callable, Sequence

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
from kvasir.scaling.problem import Problem, Prompts

WORDS = ("<end>", ".", "1", "2", "3", "Yes", "No", "A: 9\nB: 2", "A: 2\nB: 9", "A: 5\nB: 5", "\n")
ID = {word: i for i, word in enumerate(WORDS)}
END = 0
Table = Callable[[str, Sequence[int]], dict[str, float]]


def answer(text: str) -> str | None:
    return text.strip()[-1] if text.strip()[-1:] in ("1", "2", "3") else None


class Forms(Prompts):
    """Prompts that the tables below can read."""

    def aggregate(self, problem, candidates):
        return ({"role": "user", "content": "group " + " ".join(answer(c) or "?" for c in candidates)},)

    def refine(self, problem, candidate):
        return problem.messages

    def judge_pair(self, problem, first, second):
        return ({"role": "user", "content": f"pair {answer(first)} {answer(second)}"},)

    def judge_one(self, problem, candidate):
        return ({"role": "user", "content": f"one {answer(candidate)}"},)

    def self_evaluate(self, problem, reply):
        return ({"role": "user", "content": f"one {answer(reply)}"},)


def table(skill: float = 0.5, judge: float = 0.8, pause: float = 0.4) -> Table:
    """A table in which "1" is the right answer.

    ``skill``: share of right answers. ``pause``: chance of one more dot before the answer. ``judge``: how often a
    judgement is right.
    """

    def probabilities(content: str, begun: Sequence[int]) -> dict[str, float]:
        last = WORDS[begun[-1]] if begun else ""
        if last and last not in (".", "\n"):
            return {"<end>": 1.0}
        kind, *rest = content.split()
        if kind == "pair":
            a, b = (r == "1" for r in rest)
            return (
                {"A: 5\nB: 5": 1.0}
                if a == b
                else {("A: 9\nB: 2", "A: 2\nB: 9")[b]: judge, ("A: 9\nB: 2", "A: 2\nB: 9")[a]: 1 - judge}
            )
        if kind == "one":
            good = judge if rest[0] == "1" else 1 - judge
            return {"Yes": good, "No": 1 - good}
        shares = {"1": skill, "2": (1 - skill) * 0.6, "3": (1 - skill) * 0.4}
        if kind == "group":
            weights = {w: share + 2 * rest.count(w) for w, share in shares.items()}
            shares = {w: x / sum(weights.values()) for w, x in weights.items()}
        return {".": pause, **{w: (1 - pause) * share for w, share in shares.items()}}

    return probabilities


def problem(name: str = "p0", text: str = "solve") -> Problem:
    return Problem(name, ({"role": "user", "content": text},), answer, Forms())


def uniform(stream: int, position: int, token: int) -> float:
    digest = hashlib.blake2b(f"{stream}/{position}/{token}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") + 0.5) / 2**64


class Tabular(Endpoint):
    """An endpoint over a table.

    ``faults``: number of next calls that fail half-way. ``jitter``: a random number of turns of the loop between
    tokens. ``piece``: tokens in one chunk, when nothing is decided between them. Its own counters stand for the
    engine's: computed, cached and generated tokens.
    """

    caps = Caps(tokens=True, logprobs=True, score=True, choose=True, fork=True, schema=True, bound=True)
    vocabulary = "tabular"

    def __init__(
        self,
        name: str = "table",
        model: Table | None = None,
        *,
        k: int = 5,
        price: Price | None = None,
        faults: int = 0,
        cache: bool = True,
        jitter: int | None = None,
        context: int = 1000,
        parameters: int = 0,
        caps: Caps | None = None,
        piece: int = 1,
    ) -> None:
        self.name, self.model, self.k, self.price, self.faults = (
            name,
            model or table(),
            k,
            price or Price(1.0, 0.1, 4.0),
            faults,
        )
        self.cache, self.context, self.parameters = cache, context, parameters
        self.caps, self.piece = caps or self.caps, piece
        self.rng = random.Random(jitter) if jitter is not None else None
        self.seen: set[tuple] = set()
        self.counts = {"uncached": 0, "cached": 0, "generated": 0, "requests": 0}
        self.prompts: list[str] = []

    def distribution(self, prompt: Prompt, begun: Sequence[int]) -> list[float]:
        """Log-probabilities over WORDS; none is quite zero, as in a real model."""
        found = self.model(prompt.messages[-1]["content"], begun)
        floor = [found.get(w, 0.0) + 1e-6 for w in WORDS]
        return [math.log(p / sum(floor)) for p in floor]

    def confidence(self, logprobs: Sequence[float]) -> float:
        return confidence_of(sorted(logprobs, reverse=True)[: self.k])

    def most_prompt_tokens(self, prompt: Prompt) -> int:
        size = len(prompt.messages[-1]["content"].split()) + len(prompt.begun)
        if size >= self.context:
            raise Refused("too long")
        return size

    def read(self, prompt: Prompt, usage: Usage, extra: tuple = ()) -> None:
        """Compute a prompt, of which all but one token may be cached."""
        key, size = (
            (*prompt.messages[-1]["content"].split(), prompt.begun, extra),
            self.most_prompt_tokens(prompt) + len(extra),
        )
        hit = size - 1 if self.cache and key in self.seen else 0
        self.seen.add(key)
        usage.cached += hit
        usage.uncached += size - hit
        self.counts["cached"] += hit
        self.counts["uncached"] += size - hit
        self.counts["requests"] += 1
        self.prompts.append(prompt.messages[-1]["content"])

    def draw(self, prompt: Prompt, n: int, sampling: Sampling, seed: int, group: Group | None = None) -> Draw:
        return TabularDraw(self, prompt, n, sampling, seed, self.piece if group is None and not sampling.stop else 1)

    async def score(self, prompt: Prompt, sample: Sample, usage: Usage) -> Score:
        ids = sample.ids if sample.vocabulary == self.vocabulary else tuple(ID[c] for c in sample.text)
        if not ids:
            raise Refused("an empty reply has no score")
        self.read(prompt, usage, ids)
        rows = [self.distribution(prompt, ids[:i]) for i in range(len(ids))]
        await asyncio.sleep(0)
        return Score(sum(map(self.confidence, rows)) / len(rows), sum(row[i] for row, i in zip(rows, ids)), len(rows))

    async def choose(self, prompt: Prompt, options: Sequence[str], usage: Usage) -> dict[str, float]:
        self.read(prompt, usage)
        self.counts["generated"] += 1
        row = self.distribution(prompt, prompt.begun)
        total = math.log(sum(math.exp(row[ID[o]]) for o in options))
        await asyncio.sleep(0)
        return {o: row[ID[o]] - total for o in options}


class TabularDraw(Draw):
    def __init__(self, endpoint: Tabular, prompt: Prompt, n: int, sampling: Sampling, seed: int, piece: int) -> None:
        super().__init__()
        self.endpoint, self.prompt, self.n, self.sampling, self.seed, self.piece = (
            endpoint,
            prompt,
            n,
            sampling,
            seed,
            piece,
        )
        self.cancelled: set[int] = set()

    async def cancel(self, indexes: Sequence[int]) -> None:
        self.cancelled.update(indexes)

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        held: dict[int, Chunk] = {}
        async for chunk in self.tokens():
            if (first := held.pop(chunk.index, None)) is not None:
                chunk = Chunk(
                    chunk.index,
                    first.text + chunk.text,
                    (*first.ids, *chunk.ids),
                    (*first.logprobs, *chunk.logprobs),
                    (*first.confidences, *chunk.confidences),
                    chunk.finish,
                    first.count + chunk.count,
                )
            if chunk.count < self.piece and chunk.finish is None:
                held[chunk.index] = chunk
            else:
                yield chunk

    async def tokens(self) -> AsyncIterator[Chunk]:
        e, sampling = self.endpoint, self.sampling
        e.read(self.prompt, self.usage)
        failing, e.faults = e.faults > 0, max(0, e.faults - 1)
        ids = [list(self.prompt.begun) for _ in range(self.n)]
        streams = [
            self.seed
            if i == 0
            else int.from_bytes(hashlib.blake2b(f"{self.seed}/{i}".encode(), digest_size=8).digest(), "little")
            for i in range(self.n)
        ]
        live, turn = list(range(self.n)), 0
        while live:
            if failing and turn == 2:
                raise EndpointError("the table broke", retry_after=0.0)
            for i in list(live):
                for _ in range(e.rng.randrange(4) if e.rng else 1):
                    await asyncio.sleep(0)
                if i in self.cancelled:
                    live.remove(i)
                    yield Chunk(i, count=0, finish="cancelled")
                    continue
                row = e.distribution(self.prompt, ids[i])
                heat = sampling.temperature
                keys = [
                    p if not heat else p / heat - math.log(-math.log(uniform(streams[i], len(ids[i]), t)))
                    for t, p in enumerate(row)
                ]
                token = max(range(len(row)), key=keys.__getitem__)
                ids[i].append(token)
                e.counts["generated"] += 1
                text = "" if token == END else WORDS[token]
                made = len(ids[i]) - len(self.prompt.begun)
                ended = token == END or any(s in text for s in sampling.stop)
                finish = "stop" if ended else "length" if made >= sampling.max_tokens else None
                if finish:
                    live.remove(i)
                yield Chunk(i, text, (token,), (row[token],), (e.confidence(row),), finish)
            turn += 1
