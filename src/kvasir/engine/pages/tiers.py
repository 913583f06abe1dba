"""Pages in the tiers below the device: what is copied down, what is brought back, and what is written over.

The levels are the device pool (0) and the tiers below it (1, 2, ...), the fastest first. Each copy goes from a level to
a neighbour.

*Down.* Committed full pages are copied to the next level while it has free slots, oldest first. When a level runs out
of free places, the pages that will leave it next are copied down before they do; they are written over the slots below
that were not used for longest. A page that is taken before its copy was begun is lost to the tiers below: no step waits
for a copy. The copy below stays when a page is brought back, so a page is copied down once as long as that lasts.

*Up.* A request for which there is room waits in the queue while the pages of its prefix come back. It is planned like
any other once they are on the device, and computes what did not come. It waits ``MAX_WAITS`` times at most, so requests
that take each other's pages make progress.

*Order.* A copy holds its source and its target until it has landed, so neither is written, freed or taken. A page
counts as stored at a level only when its copy there has landed. Copies into pages that page copies of the same plan
read are launched behind these. Nothing here depends on the order in which copies land.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from concurrent.futures import wait
from functools import partial
from itertools import islice
from typing import Any

import torch

from kvasir.engine.pages.page_pool import PagePool
from kvasir.engine.pages.pages import PageManager
from kvasir.engine.pages.prefix import Node
from kvasir.engine.pages.shelf import Shelf
from kvasir.engine.pages.tier_jobs import Counts, Job, Wait, evictions
from kvasir.engine.pages.tier_reach import first_tier, needed_pages, reachable
from kvasir.engine.part import LiveRequests, Part
from kvasir.errors import ConfigError
from kvasir.kv.links import Link
from kvasir.kv.tier import Found, Move, Place, Tier
from kvasir.logs import log
from kvasir.types import EngineStats, FinishReason, Plan, Sequence

# Most bytes that are on their way down to one tier: a few milliseconds of a PCIe 5 link.
DOWN_BYTES = 256 << 20
# Share of a level's places that copies down may hold at once, so that they keep no page from those who need one.
HELD_SHARE = 0.25
# Times that one request waits for pages of lower tiers.
MAX_WAITS = 6
# Steps without copies down to a tier after one failed (a full disk); doubled with each failure in a row up to the
# second number.
REST_STEPS, MOST_REST_STEPS = 64, 8192
# Seconds that an engine waits for a copy before it looks for messages again: one without requests, and one whose
# requests all wait for copies.
IDLE_SECONDS, REST_SECONDS = 0.001, 0.005

Level = PagePool | Shelf


class PageTiers(Part):
    """The tiers of an engine, which are open. ``found`` by tier: pages from an earlier process. ``in_flight()``: the
    last launched step, or None if it has ended. ``step_pages``: pages that a step may take. ``verify``: compare the
    checksum of each page that comes back with that of the page that left (for debugging)."""

    def __init__(
        self,
        pages: PageManager,
        tiers: Many[Tier],
        place: Place,
        *,
        in_flight: Callable[[], int | None],
        step_pages: int,
        found: Many[Many[Found]] = (),
        verify: bool = False,
    ) -> None:
        assert pages.index is not None, "without a prefix index nobody finds a page again"
        self.pages, self.tiers, self._place = pages, tiers, place
        self._index = pages.index
        self._in_flight, self._look = in_flight, step_pages
        self.links: list[tuple[Link, Link]] = [tier.links(place) for tier in tiers]  # for copies down and up
        self.shelves = [
            [Shelf(t, g, n, self._index) for g, n in enumerate(tier.num_slots)] for t, tier in enumerate(tiers, 1)
        ]
        self._sizes = place.page_bytes
        self._sums: dict[tuple[bytes, int], bytes] | None = {} if verify else None  # by prefix key and group
        self._counts = [Counts() for _ in tiers]
        self._device_hits = 0
        self._queued: list[Job] = []  # launched when the plan is
        self._flying: list[Job] = []
        self._coming: dict[tuple[Node, int], Job] = {}  # copies up, by node and group
        self._waits: dict[Sequence, Wait] = {}
        self._raised: set[tuple[Node, int]] = set()  # pages that came up from a tier below the first
        levels: list[Iterable[Level]] = [pages.all_pools, *self.shelves[:-1]]
        for level in (level for group in levels for level in group):
            level.fresh = {}
        for t, stored in enumerate(found, 1):
            self._adopt(t, stored)
        pages.tiers = self

    # ------------------------------------------------------------------------------------------------- places in a step

    def before_plan(self, requests: LiveRequests) -> None:
        if self._queued:  # nothing was launched since
            self._launch_queued()
        if self._flying:
            self._land()
        self._spill()

    def launched(self, plan: Plan) -> None:
        if self._queued:
            self._launch_queued()

    def rest(self) -> bool:
        self._launch_queued()
        self._wait(REST_SECONDS)
        return self._land()

    def ended(self, seq: Sequence, reason: FinishReason) -> None:
        self._waits.pop(seq, None)

    def idle(self) -> bool:
        """Copy down what is on the device while there are no requests."""
        self._launch_queued()
        self._land()
        self._spill()
        self._wait(IDLE_SECONDS)
        return bool(self._flying)

    def _wait(self, seconds: float) -> None:
        """Wait until a copy has landed, so many seconds at most."""
        if self._flying:
            wait([job.future for job in self._flying], timeout=seconds, return_when="FIRST_COMPLETED")

    def weights_changed(self, model: str | None) -> None:
        """Forget all pages below the device. Tiers whose pages outlast the process are closed, because their pages are
        named after the weights of the start."""
        self.drain()
        for shelves in self.shelves:
            for shelf in shelves:
                for slot in list(shelf.nodes):
                    shelf.drop(slot)
        if any(tier.lasting for tier in self.tiers):
            log.warning("weights were changed in place: pages are not stored on disk until the next start")
            at = next(i for i, tier in enumerate(self.tiers) if tier.lasting)
            self._close(at)

    def refuse_sharing(self) -> None:
        """Raise ConfigError if others are to compute the keys of pages that outlast the process."""
        if any(tier.secret is not None for tier in self.tiers):
            raise ConfigError(
                "--kv-disk keeps pages under a key of its own, and a cluster's replicas and KV events use that of the "
                "cluster. Leave out --kv-disk and use --kv-host-bytes, or run one server without --replicas, --cluster "
                "and --kv-events-config."
            )

    def drain(self) -> None:
        """Wait for all copies."""
        self._launch_queued()
        while self._flying:
            wait([job.future for job in self._flying])
            self._land()

    def close(self) -> None:
        self.drain()
        self._close(0)

    def _close(self, first: int) -> None:
        """Close the tiers from place ``first`` on."""
        for tier, links in zip(self.tiers[first:], self.links[first:]):
            for link in links:
                link.close()
            tier.close()
        self.tiers, self.links, self.shelves = self.tiers[:first], self.links[:first], self.shelves[:first]
        for level in self.shelves[-1] if self.shelves else self.pages.all_pools:
            level.fresh = None

    # ------------------------------------------------------------------------------------------------------------- up

    def arriving(self, seq: Sequence) -> bool:
        waits = self._waits.get(seq)
        return waits is not None and not waits.job.landed

    def fetch(self, seq: Sequence, num_hit: int, limit: int | None) -> bool:
        if not any(shelf.nodes for shelves in self.shelves for shelf in shelves):
            return False
        waits = self._waits.get(seq)
        if waits is not None and waits.count >= MAX_WAITS:
            return False
        reach = reachable(self.pages, seq, limit)
        if reach <= num_hit:
            self._waits.pop(seq, None)
            return False
        needed = list(needed_pages(self.pages, seq, reach))
        for group, node in reversed(needed):
            for tier, slot in [(tier, slot) for (tier, g), slot in node.slots.items() if g == group]:
                self.shelves[tier - 1][group].touch(slot)
        lacking = [(node, group) for group, node in needed if not node.pages[group]]
        job = next((self._coming[key] for key in lacking if key in self._coming), None)
        mine = [key for key in lacking if key not in self._coming]
        if mine:
            deepest = max(map(first_tier, mine))
            keys = [key for key in mine if first_tier(key) == deepest]
            own = self._bring(seq, needed, keys) if deepest == 1 else self._raise(deepest, keys)
            if own is not None and deepest == 1:
                own.tokens = reach - num_hit
            job = own or job
        if job is None:
            return False
        self._waits[seq] = Wait(job, 1 if waits is None else waits.count + 1)
        return True

    def _bring(self, seq: Sequence, needed: list[tuple[int, Node]], keys: list[tuple[Node, int]]) -> Job | None:
        """Copy pages from the first tier to the device; None: there is no room. The pages that the device has of this
        prefix stay there meanwhile."""
        pools = self.pages.all_pools
        kept = [(group, node.pages[group]) for group, node in needed if node.pages[group]]
        for group, page in kept:
            pools[group].hold(page)
        counts = [sum(group == g for _, group in keys) for g in range(len(pools))]
        if any(n > pool.num_available for n, pool in zip(counts, pools)):
            for group, page in reversed(kept):
                pools[group].let_go([page], self._in_flight())
            return None
        taken = [pool.take_held(n) for n, pool in zip(counts, pools)]
        rows = {key: taken[key[1]].pop() for key in keys}
        for (_, group), page in rows.items():
            pools[group].kinds[page] = self.pages.visits.kind(seq)
        held: dict[int, list[int]] = {}
        for group, node in needed:
            if page := node.pages[group] or rows.get((node, group), 0):
                held.setdefault(group, []).append(page)
        late = any(page in pools[group].sources for (_, group), page in rows.items())
        return self._up(1, rows, held, late)

    def _raise(self, tier: int, keys: list[tuple[Node, int]]) -> Job | None:
        """Copy pages from ``tier`` to the tier above it, as many as find a slot; None: none does."""
        rows: dict[tuple[Node, int], int] = {}
        for node, group in keys if self.tiers[tier - 2].ready else ():
            if (slot := self._reserve(tier - 1, group)) is not None:
                rows[node, group] = slot
        return self._up(tier, rows, {}, False) if rows else None

    def _up(self, tier: int, rows: dict[tuple[Node, int], int], held: dict[int, list[int]], late: bool) -> Job:
        """Begin copies from slots of ``tier`` to ``rows`` of the level above. ``late``: when the plan is launched."""
        moves: dict[int, list[Move]] = {}
        for (node, group), row in rows.items():
            slot = node.slots[tier, group]
            self.shelves[tier - 1][group].hold(slot)
            moves.setdefault(group, []).append(Move(row, slot, node))
        job = self._job(tier, False, moves, held)
        self._coming.update(dict.fromkeys(rows, job))
        if late:
            self._queued.append(job)
        else:
            self._launch(job)
        return job

    def _landed_up(self, job: Job, stored: dict[int, list[bool]]) -> None:
        counts, after = self._counts[job.tier - 1], self._in_flight()
        counts.waits += 1
        counts.wait_seconds += time.monotonic() - job.began
        counts.read_bytes += job.num_bytes
        if all(map(all, stored.values())):
            self._count_hits(job)
        for group, moves in job.moves.items():
            shelf = self.shelves[job.tier - 1][group]
            for move, good in zip(moves, stored[group]):
                node: Any = move.page
                del self._coming[node, group]
                shelf.let_go([move.slot])
                self._arrive(job.tier - 1, group, move.row, node, good)
                if good:
                    shelf.touch(move.slot)
                    if job.tier > 1:
                        self._raised.add((node, group))
                else:
                    counts.broken += 1
                    shelf.drop(move.slot)
        if job.tier == 1:
            for group, pages in job.held.items():
                self.pages.all_pools[group].let_go(reversed(pages), after)

    def _count_hits(self, job: Job) -> None:
        """Count the tokens that a request finds because of a job, for the tiers that had their pages."""
        keys: list[Any] = [(move.page, group) for group, moves in job.moves.items() for move in moves]
        if job.tier == 1:
            below = job.tokens * sum(key in self._raised for key in keys) // len(keys)
            self._counts[0].hit_tokens += job.tokens - below
            self._counts[-1].hit_tokens += below
            self._raised.difference_update(keys)

    def _arrive(self, level: int, group: int, place: int, node: Node, good: bool) -> None:
        """Note that a page has come up to a place of ``level``, or has failed to."""
        good = good and self._index.nodes.get(node.key) is node
        if level:
            shelf = self.shelves[level - 1][group]
            if good and (level, group) not in node.slots:
                shelf.settle(place, node)
            else:
                shelf.release(place)
        elif good and not node.pages[group]:  # it may have been computed meanwhile
            if self._sums is not None and (node.key, group) in self._sums:
                assert self._sum(place, group) == self._sums[node.key, group], f"{node.key.hex()} came back changed"
            pool = self.pages.all_pools[group]
            pool.enlist(place, node)
            pool.fresh.pop(place, None)

    # ----------------------------------------------------------------------------------------------------------- down

    def _spill(self) -> None:
        """Begin copies down of pages that will leave their level, and of others while there is room below."""
        for t, tier in enumerate(self.tiers, 1):
            if not any(level.fresh for level in self._level(t - 1)) or not tier.ready:
                continue
            counts = self._counts[t - 1]
            if counts.rest:
                counts.rest -= 1
                continue
            left = DOWN_BYTES - sum(job.num_bytes for job in self._flying if job.down and job.tier == t)
            moves: dict[int, list[Move]] = {}
            held: dict[int, list[int]] = {}
            for group, (above, below) in enumerate(zip(self._level(t - 1), self.shelves[t - 1])):
                for place, urgent in self._to_copy(above, below):
                    if left <= 0 or place not in above.fresh or not self._may_hold(above):
                        continue
                    node = above.nodes[place]
                    if (t, group) in node.slots:
                        del above.fresh[place]
                        continue
                    slot = below.reserve() if below.free else self._reserve(t, group) if urgent else None
                    if slot is None:
                        continue
                    above.hold(place)
                    del above.fresh[place]
                    left -= self._sizes[group]
                    moves.setdefault(group, []).append(Move(place, slot, node))
                    held.setdefault(group, []).append(place)
            if moves:
                self._launch(self._job(t, True, moves, held))

    def _to_copy(self, above: Level, below: Shelf) -> list[tuple[int, bool]]:
        """Places of a level whose pages may be copied down, those that leave it next first, and whether they are."""
        look, found = min(self._look, below.num_slots // 2), []
        limbo = above.limbo if isinstance(above, PagePool) else {}
        if len(above.free) < look:
            found = [(place, True) for place in islice(above.leaving(), look) if place in above.fresh]
        if below.free:
            found += [(place, False) for place in islice(above.fresh, len(below.free)) if place not in limbo]
        return found

    def _may_hold(self, level: Level) -> bool:
        places = level.num_pages if isinstance(level, PagePool) else level.num_slots
        return len(level.holds) < max(1, HELD_SHARE * places)

    def _reserve(self, tier: int, group: int) -> int | None:
        """A slot to write to, for which another page may have to go; None: copies hold all."""
        shelf = self.shelves[tier - 1][group]
        if not shelf.free:
            if (slot := shelf.victim()) is None:
                return None
            node = shelf.nodes[slot]
            shelf.evicted[bool(node.pages[group]) or sum(g == group for _, g in node.slots) > 1] += 1
            shelf.drop(slot)
            self._raised.discard((node, group))
            above = self._level(tier - 1)[group]
            place = node.pages[group] if tier == 1 else node.slots.get((tier - 1, group))
            if place or (tier > 1 and place is not None):
                above.fresh[place] = None
        return shelf.reserve()

    def _landed_down(self, job: Job, stored: dict[int, list[bool]]) -> None:
        counts, after = self._counts[job.tier - 1], self._in_flight()
        good = True
        for group, moves in job.moves.items():
            above, shelf = self._level(job.tier - 1)[group], self.shelves[job.tier - 1][group]
            for move, written in zip(moves, stored[group]):
                node: Any = move.page
                held = (above.nodes[move.row] if isinstance(above, PagePool) else above.nodes.get(move.row)) is node
                if self._sums is not None and held and job.tier == 1:
                    self._sums[node.key, group] = self._sum(move.row, group)
                if written and held and (job.tier, group) not in node.slots:
                    shelf.settle(move.slot, node)
                    counts.written_bytes += self._sizes[group]
                else:
                    shelf.release(move.slot)
                if not written:
                    good = False
                    counts.failed += 1
                    if held:
                        above.fresh[move.row] = None
            above.let_go(reversed(job.held[group]), after)
        counts.last_rest = 0 if good else min(MOST_REST_STEPS, max(REST_STEPS, 2 * counts.last_rest))
        counts.rest = counts.last_rest

    def _sum(self, page: int, group: int) -> bytes:
        row = self._rows(0, group)[page].cpu().numpy()
        return hashlib.blake2b(row.tobytes(), digest_size=16).digest()

    # ----------------------------------------------------------------------------------------------------------- jobs

    def _level(self, level: int) -> Many[Level]:
        """The places of a level by group."""
        return self.shelves[level - 1] if level else self.pages.all_pools

    def _job(self, tier: int, down: bool, moves: dict[int, list[Move]], held: dict[int, list[int]]) -> Job:
        num_bytes = sum(len(listed) * self._sizes[group] for group, listed in moves.items())
        return Job(tier, down, moves, held, num_bytes, began=time.monotonic())

    def _launch_queued(self) -> None:
        queued, self._queued = self._queued, []
        for job in queued:
            self._launch(job)

    def _launch(self, job: Job) -> None:
        tier = self.tiers[job.tier - 1]
        move = tier.write if job.down else tier.read
        calls = [partial(move, group, self._rows(job.tier - 1, group), moves) for group, moves in job.moves.items()]
        job.future = self.links[job.tier - 1][not job.down].submit(lambda: [call() for call in calls])
        self._flying.append(job)

    def _rows(self, level: int, group: int) -> torch.Tensor:
        """The places of a level as memory."""
        return self.tiers[level - 1].rows(group) if level else self._place.pool.pages[group]

    def _land(self) -> bool:
        """Take note of the copies that have landed; whether there were any."""
        done = [job for job in self._flying if job.future.done()]
        if done:
            self._flying = [job for job in self._flying if job not in done]
        for job in done:
            job.landed = True
            if (error := job.future.exception()) is None:
                stored = dict(zip(job.moves, job.future.result()))
            else:
                if isinstance(error, AssertionError):
                    raise error
                if not self._counts[job.tier - 1].last_rest:
                    log.warning("tier %s: a copy failed: %s", self.tiers[job.tier - 1].name, error)
                stored = {group: [False] * len(moves) for group, moves in job.moves.items()}
            (self._landed_down if job.down else self._landed_up)(job, stored)
        return bool(done)

    # ---------------------------------------------------------------------------------------------------------- start

    def _adopt(self, tier: int, found: Many[Found]) -> None:
        """Index the pages that a tier has from an earlier process, least recently stored first."""
        nodes = self._index.restore(found)
        for page in found:
            node = nodes.get(page.key)
            if node is not None and (tier, page.group) not in node.slots:
                shelf = self.shelves[tier - 1][page.group]
                shelf.free.remove(page.slot)
                shelf.written.add(page.slot)
                shelf.settle(page.slot, node)
        for node in nodes.values():
            if self._index.nodes.get(node.key) is node:
                self._index.prune(node)

    # --------------------------------------------------------------------------------------------------------- numbers

    def fill_stats(self, stats: EngineStats) -> None:
        own = self.pages.cached_tokens - sum(counts.hit_tokens for counts in self._counts)
        # A tier's hits count when they land, which is before their request starts, so ``own`` may fall for a moment.
        self._device_hits = max(self._device_hits, own)
        stats.tiers = {"device": {"hit_tokens": self._device_hits}}
        stats.tier_bytes, stats.tier_used = {}, {}
        stats.tiers["device"] |= evictions(pool.evicted for pool in self.pages.all_pools)
        for tier, shelves, counts in zip(self.tiers, self.shelves, self._counts):
            stats.tiers[tier.name] = counts.told() | evictions(shelf.evicted for shelf in shelves)
            stats.tier_bytes[tier.name] = sum(s.num_slots * size for s, size in zip(shelves, self._sizes))
            stats.tier_used[tier.name] = sum(len(s.nodes) * size for s, size in zip(shelves, self._sizes))

    def check(self) -> None:
        """Assert every invariant of the tiers. Slow: for tests and debugging."""
        holds: list[list[list[int]]] = [[[] for _ in self.pages.all_pools] for _ in range(len(self.tiers) + 1)]
        for job in [*self._queued, *self._flying]:
            for group, moves in job.moves.items():
                if not job.down:
                    holds[job.tier][group] += [move.slot for move in moves]
            for group, places in job.held.items():
                holds[job.tier - 1][group] += places
        for level, groups in enumerate(holds):
            for group, held in enumerate(groups):
                assert sorted(self._level(level)[group].holds.elements()) == sorted(held), "a hold without a copy"
        for shelf in (shelf for shelves in self.shelves for shelf in shelves):
            shelf.check()
