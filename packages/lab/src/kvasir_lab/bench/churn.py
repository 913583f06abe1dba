"""Churn: processes are killed and stopped, and connections cut, while requests run; every token is checked.

Replicas with even numbers are child processes of this one; those with odd numbers are behind keepers on TCP with mutual
TLS, and their connections are cut, too. A request fails when it ends with an error. A token is *doubled* when its
reader has it already, *lost* when one before it never came, and *wrong* when it differs from what an undisturbed engine
gives. All four counts must be 0. Real engines have a GPU each, or share the cores.

The counts so far are written after every fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvasir.bench.result import arm, finish, result, save
from kvasir.client.engine_client import AsyncEngine
from kvasir.client.engine_process import ENGINE
from kvasir.cluster.certificates import Authority
from kvasir.cluster.cluster_client import ClusterClient
from kvasir.cluster.keeper import Keeper
from kvasir.cluster.placement import Place, places
from kvasir.cluster.remote import RemoteChild
from kvasir.cluster.wire import FRONT, KEEPER
from kvasir.config import Settings
from kvasir.errors import RequestError
from kvasir.types import Request, SamplingParams

SIMULATED = "kvasir.bench.simulated_core:SimulatedCore"
# Different requests; each is sent again and again under other ids.
KINDS = 32
# Tokens of the longest answer, and of the longest prompt.
OUTPUT, PROMPT = 200, 1500
# Requests that run at once.
AT_ONCE = 16
# Seconds between two faults, as in the churn tests of trusted systems.
PAUSE = (5.0, 20.0)


class Remote:
    """A keeper on loopback, and the connections to it. ``environment``: of its engine process."""

    def __init__(self, factory: str, authority: Authority, environment: dict[str, str]) -> None:
        self.keeper, self._authority = Keeper(factory, environment), authority
        self._tls = authority.identity(FRONT).context(server=False)
        self._port = 0
        self._writer: asyncio.StreamWriter | None = None

    async def link(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect, and listen before the first time."""
        if not self._port:
            tls = self._authority.identity(KEEPER).context(server=True)
            self._port = await self.keeper.listen("127.0.0.1", 0, tls)
        streams = await asyncio.open_connection("127.0.0.1", self._port, ssl=self._tls, server_hostname=KEEPER)
        self._writer = streams[1]
        return streams

    def cut(self) -> None:
        """Cut the connection; what was not read yet is lost."""
        if self._writer is not None:
            self._writer.transport.abort()


def drawn(rng: random.Random, vocabulary: int) -> Request:
    """A random request: one to three branches, greedy or seeded."""
    params = SamplingParams(n=rng.randint(1, 3), temperature=rng.choice([0.0, 1.0]), ignore_eos=True)
    prompt = [rng.randrange(vocabulary) for _ in range(rng.choice([5, 40, 300, PROMPT]))]
    tokens = rng.choice([10, 60, OUTPUT])
    return Request(id="", prompt_ids=prompt, params=params, seed=rng.getrandbits(32), max_tokens=tokens)


def again(kind: Request, name: str) -> Request:
    """The same request under another id."""
    return Request(id=name, prompt_ids=kind.prompt_ids, params=kind.params, seed=kind.seed, max_tokens=kind.max_tokens)


async def answers(settings: Settings, kinds: list[Request]) -> list[list[list[int]]]:
    """The tokens that an undisturbed engine gives."""
    engine = AsyncEngine(settings.engine_only())

    async def answer(number: int, kind: Request) -> list[list[int]]:
        tokens: list[list[int]] = [[] for _ in range(kind.params.n)]
        async for event in engine.generate(again(kind, f"reference{number}")):
            if event.kind == "tokens":
                tokens[event.branch] += event.token_ids
        return tokens

    await engine.start()
    try:
        return await asyncio.gather(*(answer(i, kind) for i, kind in enumerate(kinds)))
    finally:
        await engine.stop(0.0)


async def read(client: ClusterClient, request: Request, right: list[list[int]], counts: Counter[str]) -> None:
    """Read a request to its end, and count what is wrong with it."""
    have: list[list[int]] = [[] for _ in right]
    try:
        async for event in client.generate(request):
            if event.kind != "tokens":
                continue
            mine = have[event.branch]
            counts["doubled"] += max(0, len(mine) - event.index)
            counts["lost"] += max(0, event.index - len(mine))
            mine += event.token_ids
            counts["tokens"] += len(event.token_ids)
    except RequestError:
        counts["failed"] += 1
        return
    counts["requests"] += 1
    for mine, should in zip(have, right):
        counts["lost"] += max(0, len(should) - len(mine))
        counts["wrong"] += sum(a != b for a, b in zip(mine, should))


async def churn(
    settings: Settings,
    *,
    seconds: float,
    seed: int,
    simulated: bool,
    pause: tuple[float, float] = PAUSE,
    at_once: int = AT_ONCE,
    hurt: Callable[[str, dict[str, int]], None] = lambda what, counts: None,
) -> dict[str, int]:
    """Run requests and faults for ``seconds``; then let all requests end. Returns the counts. ``hurt``: called after
    each fault, with its name and the counts so far."""
    rng, counts = random.Random(seed), Counter[str](failed=0, doubled=0, lost=0, wrong=0, requests=0)
    if simulated:
        from kvasir.bench.simulated_core import VOCABULARY, expected

        kinds = [drawn(rng, VOCABULARY) for _ in range(KINDS)]
        right = [expected(kind) for kind in kinds]
    else:
        kinds = [drawn(rng, 256) for _ in range(KINDS)]
        right = await answers(settings, kinds)
    factory = SIMULATED if simulated else ENGINE
    authority, config, replicas = Authority(), settings.engine_only(), settings.server.replicas
    placed = [Place(config, {})] * replicas if simulated else places(config, replicas)
    remotes = {i: Remote(factory, authority, placed[i].environment) for i in range(1, replicas, 2)}
    placed = [
        dataclasses.replace(place, start=functools.partial(RemoteChild, remotes[i].link)) if i in remotes else place
        for i, place in enumerate(placed)
    ]
    client = ClusterClient(settings, factory=factory, placed=placed)
    await client.start()
    end, number = time.monotonic() + seconds, 0

    async def load() -> None:
        nonlocal number
        while time.monotonic() < end:
            number += 1
            which = rng.randrange(KINDS)
            await read(client, again(kinds[which], f"churn{number}"), right[which], counts)

    async def faults() -> None:
        while (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(left, rng.uniform(*pause)))
            what = rng.choice(["killed", "stopped", "cut"])
            victim = rng.choice(sorted(remotes)) if what == "cut" and remotes else rng.randrange(len(placed))
            if what == "cut" and remotes:
                remotes[victim].cut()
            else:
                what = "killed" if what == "cut" else what
                child = remotes[victim].keeper.child if victim in remotes else client.replicas[victim].child
                if child is None:
                    continue
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL if what == "killed" else signal.SIGSTOP)
            counts[what] += 1
            hurt(what, dict(counts))

    try:
        await asyncio.gather(faults(), *(load() for _ in range(at_once)))
        counts["restarts"], counts["quarantined"] = client.num_restarts, client.num_quarantined
    finally:
        await client.stop(0.0)
        for remote in remotes.values():
            await remote.keeper.close()
    return dict(counts)


def run(settings: Settings, *, minutes: float, seed: int, simulated: bool, output: Path | None) -> bool:
    """Measure, print and write. Returns whether nothing failed, and nothing was doubled, lost or wrong."""

    config: dict[str, Any] = {"minutes": minutes, "seed": seed, "engines": "simulated" if simulated else "real"}
    config |= {"replicas": settings.server.replicas, "watchdog": settings.service.watchdog, "at_once": AT_ONCE}

    def hurt(what: str, counts: dict[str, int]) -> None:
        print(f"a replica was {what}", file=sys.stderr, flush=True)
        save(result("churn", [arm("churn so far", config, counts)]), output)

    counts = asyncio.run(churn(settings, seconds=60 * minutes, seed=seed, simulated=simulated, hurt=hurt))
    finish(result("churn", [arm("churn", config, counts)]), output)
    return not any(counts[name] for name in ("failed", "doubled", "lost", "wrong"))
