"""Replies that are drawn once and dealt many times, to compare strategies that only choose or stop samples.

A pool holds N replies to each problem. `PoolEndpoint` deals them without replacement, in an order that depends on its
seed and the problem only, token by token as an engine would. So majorities, best-of-n and first-m-of-n run over it
unchanged, and the same ledger counts what they would have cost. Another seed is another draw from the same replies,
which shows the effect of chance without paying for it. Strategies that ask about other texts (judges, recombination)
cannot run over a pool and say so.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvasir.errors import ConfigError
from kvasir.plain_files import refuse_special
from kvasir.scaling.endpoint import Caps, Chunk, Draw, Endpoint, Group, Prompt, Sample, Sampling
from kvasir.scaling.journal import digest
from kvasir.scaling.ledger import Price
from kvasir.scaling.primitives import Context, Run
from kvasir.scaling.problem import Problem

STORED = ("text", "tokens", "finish", "confidence", "lowest", "logprob")


def key_of(messages: Sequence[Any]) -> str:
    """The key of a conversation in a pool."""
    return digest(list(messages))


@dataclass
class Pool:
    """The replies of one model. ``entries``: by prompt, its length in tokens and the replies."""

    model: str
    parameters: int = 0
    price: Price = field(default_factory=Price)
    entries: dict[str, tuple[int, list[Sample]]] = field(default_factory=dict)

    def of(self, problem: Problem) -> list[Sample]:
        """The replies to a problem."""
        return self.entries[key_of(problem.messages)][1]

    def save(self, file: Path, about: dict[str, Any]) -> None:
        """Write JSON lines, gzipped. Token ids are left out."""
        with gzip.open(file, "wt", encoding="utf-8") as out:
            out.write(json.dumps({"model": self.model, "parameters": self.parameters, "about": about}) + "\n")
            for key, (length, samples) in self.entries.items():
                out.write(
                    json.dumps(
                        {
                            "key": key,
                            "prompt": length,
                            "samples": [[getattr(s, name) for name in STORED] for s in samples],
                        }
                    )
                    + "\n"
                )

    @classmethod
    def load(cls, file: Path, about: dict[str, Any], price: Price | None = None) -> Pool:
        """Read a pool. Raises ConfigError for a file that is no pool, or a pool of other problems."""
        refuse_special(file)
        try:
            with gzip.open(file, "rt", encoding="utf-8") as lines:
                head = json.loads(next(lines))
                entries = [json.loads(line) for line in lines]
        except (OSError, EOFError, StopIteration, json.JSONDecodeError) as e:
            raise ConfigError(f"{file.name} is no pool of replies ({e or 'empty'}). Name another file.") from e
        if head.get("about") != json.loads(json.dumps(about)):
            differ = [name for name in about if head.get("about", {}).get(name) != json.loads(json.dumps(about[name]))]
            raise ConfigError(
                f"the pool {file.name} is of another run: {', '.join(differ) or 'its format'} differ. "
                "Name another file."
            )
        pool = cls(head["model"], head["parameters"], price or Price())
        for entry in entries:
            samples = [
                Sample(i, endpoint=pool.model, **dict(zip(STORED, values))) for i, values in enumerate(entry["samples"])
            ]
            pool.entries[entry["key"]] = entry["prompt"], samples
        return pool


async def fill(
    endpoint: Endpoint, problems: Sequence[Problem], size: int, sampling: Sampling, seed: int, at_once: int = 16
) -> Pool:
    """Draw ``size`` replies to every problem. A prompt that the endpoint refuses has none."""
    run, pool = Run([endpoint], seed, sampling=sampling), Pool(endpoint.name, endpoint.parameters, endpoint.price)
    slots = asyncio.Semaphore(at_once)

    async def one(problem: Problem) -> None:
        async with slots:
            samples = await Context(run, problem.id).sample(endpoint, problem.messages, size)
        prompt = Prompt(problem.messages)
        if samples:
            await endpoint.prepare(prompt)
        pool.entries[key_of(problem.messages)] = endpoint.most_prompt_tokens(prompt) if samples else 0, samples

    await asyncio.gather(*map(one, problems))
    return pool


class PoolEndpoint(Endpoint):
    """Deals the replies of a pool in an order that depends on ``seed``."""

    caps = Caps(logprobs=True, fork=True)

    def __init__(self, pool: Pool, seed: int) -> None:
        self.pool, self.seed = pool, seed
        self.name, self.parameters, self.price = pool.model, pool.parameters, pool.price
        self._dealt: dict[str, int] = {}

    def _entry(self, prompt: Prompt) -> tuple[str, int, list[Sample]]:
        key = key_of(prompt.messages)
        if key not in self.pool.entries:
            raise ConfigError(
                "a pool holds replies to the problems alone, and this strategy asks about other texts: "
                "run it without --pool"
            )
        return key, *self.pool.entries[key]

    def most_prompt_tokens(self, prompt: Prompt) -> int:
        return self._entry(prompt)[1]

    def draw(self, prompt: Prompt, n: int, sampling: Sampling, seed: int, group: Group | None = None) -> Draw:
        key, length, samples = self._entry(prompt)
        first = self._dealt.get(key, 0)
        if first + n > len(samples):
            raise ConfigError(
                f"the pool has {len(samples)} replies a problem, and this strategy asks for {first + n}: "
                "draw a larger one"
            )
        self._dealt[key] = first + n
        order = random.Random(f"{self.seed}/{key}").sample(range(len(samples)), len(samples))
        return PoolDraw(length, bool(first), [samples[i] for i in order[first : first + n]], group is not None)


class PoolDraw(Draw):
    """All replies in lockstep, from one end of a reply to the next, because nothing is decided in between.

    Each reply comes at once when the ends are not ``watched``.
    """

    def __init__(self, length: int, again: bool, samples: list[Sample], watched: bool) -> None:
        super().__init__()
        self._watched = watched
        self.samples, self._cancelled = samples, set[int]()
        self._prompt = (1, length - 1) if again else (length, 0)  # (computed, cached) tokens of the prompt

    async def cancel(self, indexes: Sequence[int]) -> None:
        self._cancelled.update(indexes)

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        self.usage.uncached, self.usage.cached = self._prompt
        if not self._watched:
            for i, s in enumerate(self.samples):
                yield Chunk(i, text=s.text, count=s.tokens, finish=s.finish, whole=s)
            return
        live, at = set(range(len(self.samples))), 0
        for length in sorted({s.tokens for s in self.samples}):
            # Ends come last, when all replies have come this far.
            for i in sorted(live, key=lambda i: (self.samples[i].tokens == length, i)):
                if i in self._cancelled:
                    live.discard(i)
                    yield Chunk(i, count=0, finish="cancelled")
                    continue
                whole = self.samples[i]
                if whole.tokens > length:
                    yield Chunk(i, count=length - at)
                else:
                    live.discard(i)
                    yield Chunk(i, text=whole.text, count=length - at, finish=whole.finish, whole=whole)
            at = length


def ranked_right(pool: Pool, problems: Sequence[Problem], right: Sequence[Sequence[bool]], signal: str) -> float | None:
    """AUC within problems: how often ``signal`` is higher for a right reply than for a wrong one of the same problem.

    Ties count half. None when no problem has both kinds.
    """
    wins, pairs = 0.0, 0
    for problem, marks in zip(problems, right):
        values = [_signal(s, signal) for s in pool.of(problem)]
        good = sorted(v for v, m in zip(values, marks) if m and v is not None)
        bad = sorted(v for v, m in zip(values, marks) if not m and v is not None)
        wins += sum((g > b) + 0.5 * (g == b) for g in good for b in bad)
        pairs += len(good) * len(bad)
    return wins / pairs if pairs else None


def _signal(sample: Sample, name: str) -> float | None:
    if name == "short":
        return -float(sample.tokens)
    value = getattr(sample, name)
    return value / max(1, sample.tokens) if name == "logprob" and value is not None else value
