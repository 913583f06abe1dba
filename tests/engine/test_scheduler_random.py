"""Random tests: 10^5 steps over scheduler, pages and prefix index, with every invariant checked after every step."""

from __future__ import annotations

import random

import pytest

from kvasir.engine.pages.evictions.expected_loss import ExpectedLoss
from kvasir.engine.pages.evictions.lru import Lru
from kvasir.engine.schedule.pace import MixedRows
from kvasir.engine.schedule.schedulers.affinity import Affinity
from kvasir.engine.schedule.schedulers.fcfs import Fcfs
from kvasir.engine.schedule.schedulers.priority import Config, Priority
from kvasir.engine.schedule.schedulers.shortest import Shortest
from kvasir.types import Request, SamplingParams, Sequence, Status
from tests.engine.fake import FULL, STATE, Driver, FakeModel, manager, scheduler, window_group

EPISODES = 20  # per seed
STEPS = 250  # per episode, then until all is done
SEEDS, SHORT = 20, 4  # seeds in all, and those of `make test`

GROUPS = [
    (FULL,),
    (FULL, window_group(6)),
    (window_group(5),),
    (window_group(3), FULL, window_group(9)),
    (FULL, STATE),
    (window_group(6), FULL, STATE),
]


def matched(pages, seq) -> tuple[int, int]:
    """Reference of ``PageManager._match``: a walk from the start of the prompt."""
    if pages.index is None:
        return 0, 0
    held = best = 0
    nodes = list(pages.index.walk(seq, (seq.num_tokens - 1) // pages.page_slots))
    for end in range(1, len(nodes) + 1):
        seen = [nodes[pages.first(pool, end * pages.page_slots) : end] for pool in pages.pools]
        if all(node.pages[pool.group] for pool, part in zip(pages.pools, seen) for node in part):
            held = end
            if pages.states is None or nodes[end - 1].pages[pages.states.group]:
                best = end
    return held * pages.page_slots, best * pages.page_slots


class World:
    """One engine with random settings, and random users."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.page_slots = rng.choice([1, 2, 4, 8])
        groups = rng.choice(GROUPS)
        max_rows = rng.choice([1, 3, 8, 16, 40])
        self.longest = rng.choice([12, 30, 48])
        enough = -(-self.longest // self.page_slots) + rng.choice([0, 1, 4, 30])
        pages = manager(
            [1 + max(enough, rng.choice([0, (12 + max_rows) // self.page_slots + 3])) for _ in groups],
            self.page_slots,
            groups,
            None if rng.random() < 0.2 else b"root",
            state_interval=self.page_slots * rng.choice([1, 2, 4]),
            eviction=random.Random(seed).choice([Lru(), ExpectedLoss()]),
        )
        if pages.states is not None:
            pages.states.rows = rng.choice([2, 5, 16])
        policy = rng.choice(
            [Fcfs(), Affinity(), Shortest(), Priority(Config(threshold=1)), Priority(Config(threshold=10))]
        )
        self.scheduler = scheduler(
            pages,
            policy,
            max_rows=max_rows,
            max_model_len=self.longest,
            max_num_seqs=rng.choice([1, 2, 4, 8]),
            long_prefill_token_threshold=rng.choice([0, 0, 5]),
        )
        self.scheduler.prompts_first = rng.random() < 0.4
        self.scheduler.pace.mixed = rng.choice([None, None, MixedRows(1, 1), MixedRows(6, 3)])
        model = FakeModel(pages)
        for pool in pages.all_pools:
            pool._on_free = model.poison
        self.resumed, resume = 0, pages.resume

        def counted(*args):
            self.resumed += 1
            resume(*args)

        pages.resume = counted
        self.driver = Driver(self.scheduler, model, rng)
        self.driver.draft_length = rng.choice([0, 0, 3, 9])
        self.driver.draft_quality = rng.random()
        self.roots = [[rng.randrange(7) for _ in range(self.longest)] for _ in range(2)]
        self.busy = rng.choice([0.2, 0.5, 0.9])
        self.delayed = rng.random() < 0.5
        self.late = rng.choice([0.0, 0.5, 0.9, 1.0])  # share of steps that are read after the next was launched

    def arrive(self) -> None:
        rng = self.rng
        shared = rng.randint(0, self.longest - 2) * (rng.random() < 0.7)
        prompt = rng.choice(self.roots)[:shared]
        prompt = prompt + [
            rng.randrange(7)
            for _ in range(rng.randint(0 if prompt else 1, max(1, (self.longest - 1 - len(prompt)) // 2)))
        ]
        tenant = rng.choice(["", "", "a"])
        paused = [
            s
            for s in self.driver.sequences[-24:]
            if s.status is Status.FINISHED and s.request.params.lease and s.num_tokens < self.longest
        ]
        if paused and rng.random() < 0.4:  # go on from it, all of it or cut
            before = rng.choice(paused)
            prompt, tenant = (
                before.tokens[: rng.randint(max(1, before.num_tokens - 4), before.num_tokens)],
                before.request.tenant,
            )
        max_tokens = rng.randint(1, self.longest - len(prompt))
        if not self.scheduler.pages.fits(len(prompt) + max_tokens - 1, self.scheduler.max_rows):
            return
        lease = rng.choice([0.0, 0.0, 2.0, 50.0]) if self.scheduler.pages.index is not None else 0.0
        params = SamplingParams(
            n=rng.choice([1, 1, 1, 2, 4]), prompt_logprobs=rng.choice([None] * 5 + [0]), lease=lease
        )
        request = Request(
            id=str(len(self.driver.sequences)),
            prompt_ids=prompt,
            params=params,
            seed=rng.getrandbits(64),
            max_tokens=max_tokens,
            priority=rng.choice([0, 0, 3, 20]),
            arrival=self.driver.now,
            tenant=tenant,
            affinity=rng.choice(["", "p", "q"]),
        )
        parent = None
        for branch in range(params.n):
            seq = Sequence(request, branch)
            seq.parent = parent
            parent = parent or seq
            self.driver.add(seq)

    def disturb(self) -> None:
        """Cancel, block and unblock, in every state."""
        rng = self.rng
        alive = [s for s in self.driver.sequences[-24:] if s.status is not Status.FINISHED]
        if alive and rng.random() < 0.05:
            seq = rng.choice(alive)
            self.scheduler.finish(seq, "cancelled")
            self.scheduler.finish(seq, "stop")
            assert seq.finish_reason == "cancelled"
        if alive and rng.random() < 0.05:
            self.scheduler.block(rng.choice(alive), self.driver.now + 3)
        for seq in list(self.scheduler.backlog.blocked):
            if rng.random() < 0.2:
                self.scheduler.unblock(seq)
        if alive and rng.random() < 0.02:
            self.scheduler.unblock(rng.choice(alive))

    def live(self) -> None:
        rng = self.rng
        for _ in range(STEPS):
            self.driver.now += rng.choice([0.01, 0.3])
            if self.scheduler.num_waiting < 12 and rng.random() < self.busy:
                self.arrive()
            self.disturb()
            max_rows = rng.randint(1, self.scheduler.max_rows) if rng.random() < 0.1 else None
            self.driver.step(
                max_rows=max_rows,
                between=self.disturb,
                delay=self.delayed and rng.random() < 0.7,
                late=rng.random() < self.late,
            )
            for seq in list(self.scheduler.backlog.waiting)[:4]:
                assert self.scheduler.pages._match(seq) == matched(self.scheduler.pages, seq), (
                    "a stale memory of a walk"
                )
        for seq in list(self.scheduler.backlog.blocked):
            self.scheduler.unblock(seq)
        self.driver.drain()
        assert all(seq.status is Status.FINISHED for seq in self.driver.sequences)
        assert self.scheduler.pages.num_free == self.scheduler.pages.num_total, (
            "the pool is not as full as at the start"
        )
        self.driver.assert_outputs()


@pytest.mark.parametrize(
    "seed", [*range(SHORT), *(pytest.param(s, marks=pytest.mark.slow) for s in range(SHORT, SEEDS))]
)
def test_random_steps(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvasir.engine.schedule.pace.SEVERAL_DECODES", range(2, 6))
    monkeypatch.setattr("kvasir.engine.schedule.pace.TILE_ROWS", 2)
    seen: dict[str, int] = {"steps": 0, "preemptions": 0, "hits": 0, "finished": 0, "resumed": 0}
    for episode in range(EPISODES):
        world = World(seed * EPISODES + episode)
        world.live()
        seen["steps"] += next(world.driver.steps)
        seen["preemptions"] += world.scheduler.preemptions
        seen["hits"] += world.scheduler.pages.cached_tokens
        seen["resumed"] += world.resumed
        seen["finished"] += sum(seq.finish_reason == "length" for seq in world.driver.sequences)
    assert (
        seen["steps"] >= EPISODES * STEPS
        and seen["preemptions"]
        and seen["hits"]
        and seen["finished"]
        and seen["resumed"]
    ), seen
