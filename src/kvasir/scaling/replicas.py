"""Several endpoints of one model as one, where each problem has its replica.

So the prefix that the problem's calls share is in that replica's cache. A new problem goes to the replica with the
fewest problems and stays there. A replica that fails gives the problem of the failed call to the next one, where the
layer's retry is made. With the same model and seeds, replies do not depend on the replica.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from kvasir.errors import ConfigError
from kvasir.scaling.endpoint import (
    Caps,
    Chunk,
    Draw,
    Endpoint,
    EndpointError,
    Group,
    Prompt,
    Sample,
    Sampling,
    Score,
    Usage,
)

T = TypeVar("T")


class ReplicaEndpoint(Endpoint):
    """Endpoint over ``replicas``: at least one, all of the same model. It offers what all of them offer."""

    def __init__(self, replicas: Sequence[Endpoint]) -> None:
        first = replicas[0]
        if any((r.name, r.vocabulary) != (first.name, first.vocabulary) for r in replicas):
            raise ConfigError(
                f"replicas serve one model, not {', '.join(dict.fromkeys(r.name for r in replicas))}; "
                "other models are tiers, each with a --model of its own"
            )
        self.replicas = list(replicas)
        self.name, self.vocabulary = first.name, first.vocabulary
        self.price, self.parameters = first.price, first.parameters
        self.window = first.window
        self.caps = Caps(**{name: all(getattr(r.caps, name) for r in replicas) for name in Caps.__dataclass_fields__})
        self._home: dict[str, int] = {}
        self._problems: Counter[int] = Counter()

    async def start(self) -> None:
        for replica in self.replicas:
            await replica.start()

    async def close(self) -> None:
        for replica in self.replicas:
            await replica.close()

    async def busy_seconds(self) -> float | None:
        found = [await replica.busy_seconds() for replica in self.replicas]
        return None if None in found else sum(found)  # type: ignore[arg-type]

    def forget(self) -> None:
        for replica in self.replicas:
            replica.forget()

    def most_prompt_tokens(self, prompt: Prompt) -> int:
        return self._of(prompt).most_prompt_tokens(prompt)

    def draw(self, prompt: Prompt, n: int, sampling: Sampling, seed: int, group: Group | None = None) -> Draw:
        return _ReplicaDraw(self, prompt, self._of(prompt).draw(prompt, n, sampling, seed, group))

    async def score(self, prompt: Prompt, sample: Sample, usage: Usage) -> Score:
        return await self._asked(prompt, lambda replica: replica.score(prompt, sample, usage))

    async def choose(self, prompt: Prompt, options: Sequence[str], usage: Usage) -> dict[str, float]:
        return await self._asked(prompt, lambda replica: replica.choose(prompt, options, usage))

    def move(self, prompt: Prompt) -> None:
        """Move a problem from its replica, which failed, to the next one."""
        last = self._home[prompt.affinity]
        self._home[prompt.affinity] = following = (last + 1) % len(self.replicas)
        self._problems[last] -= 1
        self._problems[following] += 1

    async def _asked(self, prompt: Prompt, call: Callable[[Endpoint], Awaitable[T]]) -> T:
        home = self._of(prompt)
        try:
            return await call(home)
        except EndpointError:
            if self._of(prompt) is home:  # another call of the problem may have moved it already
                self.move(prompt)
            raise

    def _of(self, prompt: Prompt) -> Endpoint:
        home = self._home.get(prompt.affinity)
        if home is None:
            home = self._home[prompt.affinity] = min(range(len(self.replicas)), key=lambda i: (self._problems[i], i))
            self._problems[home] += 1
        return self.replicas[home]


class _ReplicaDraw(Draw):
    def __init__(self, owner: ReplicaEndpoint, prompt: Prompt, inner: Draw) -> None:
        self.owner, self.prompt, self.inner, self.home = owner, prompt, inner, owner._of(prompt)

    @property
    def usage(self) -> Usage:
        return self.inner.usage

    @usage.setter
    def usage(self, usage: Usage) -> None:
        self.inner.usage = usage

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        try:
            async for chunk in self.inner:
                yield chunk
        except EndpointError:
            if self.owner._of(self.prompt) is self.home:
                self.owner.move(self.prompt)
            raise

    async def cancel(self, indexes: Sequence[int]) -> None:
        await self.inner.cancel(indexes)

    async def aclose(self) -> None:
        await self.inner.aclose()
