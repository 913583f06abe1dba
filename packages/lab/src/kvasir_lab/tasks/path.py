"""Find the shortest way in a small graph, or the one arm of a star that leads to a leaf.

    Roads: A B, C A, D B, C E. Shortest way from D to E?      ->      Answer: D B A C E

In a graph the shortest way is unique, and nothing is written before it. Its length (``min_depth``..``max_depth`` roads)
is the dial. In a star (``form=star``) all arms have the same length. ``back`` writes the arm from the leaf first,
because the first step from the centre cannot be seen otherwise.

Shape suffixes: N problems, V places, E roads (-1 = none), L places of the longest way.
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from dataclasses import dataclass

import numpy as np

from kvasir.errors import ConfigError
from kvasir_lab.sheet import Drawn, Sheet, SheetTask
from kvasir_lab.task import Problem, Split
from kvasir_lab.words import LETTERS

SPACED = tuple(f" {letter}" for letter in LETTERS)
TRIES = 100  # Rounds of drawing until each problem has a graph with a way of the wanted length.
MOST_RETRACED = 12  # Most roads of a candidate that a check follows.
LONGER = 2  # The split ``longer`` has ways of up to this many roads more.


@dataclass(frozen=True)
class Config:
    """The dial of both forms.

    A graph has ``places`` and up to ``places - 1 + extra`` roads; many extra roads make long unique ways rare.
    """

    form: str = "graph"
    places: int = 12
    extra: int = 5
    arms: int = 3
    min_depth: int = 2
    max_depth: int = 5
    back: bool = True

    def __post_init__(self) -> None:
        if self.form not in ("graph", "star"):
            raise ConfigError(f"path: form='{self.form}' is neither 'graph' nor 'star'")
        if not 2 <= self.min_depth <= self.max_depth <= 8:
            raise ConfigError(
                f"path: min_depth={self.min_depth} and max_depth={self.max_depth} must satisfy 2 <= min <= max <= 8"
            )
        if self.form == "graph" and not (
            self.max_depth + 3 <= self.places <= len(LETTERS) - LONGER and 0 <= self.extra <= 2 * self.places
        ):
            raise ConfigError(
                f"path: places={self.places} must lie in {self.max_depth + 3}..{len(LETTERS) - LONGER}, "
                f"extra={self.extra} in 0..{2 * self.places}"
            )
        if self.form == "star" and not 2 <= self.arms <= (len(LETTERS) - 1) // self.max_depth:
            raise ConfigError(
                f"path: arms={self.arms} must lie in 2..{(len(LETTERS) - 1) // self.max_depth}, "
                f"because there are {len(LETTERS)} letters"
            )


@dataclass(slots=True)
class Maps(Drawn):
    """roads [N, E, 2] and way [N, L] as letters, -1 beyond the last; names [N, V]: the letters that are places."""

    roads: np.ndarray
    way: np.ndarray
    names: np.ndarray


class Path(SheetTask):
    """The shortest way between two places, found without writing."""

    # --------------------------------------------------------------------------------------------------------- drawing

    def sample(self, rng: np.random.Generator, count: int, split: Split) -> Maps:
        c = self.config
        low, high = (c.max_depth + 1, c.max_depth + LONGER) if split == "longer" else (c.min_depth, c.max_depth)
        if c.form == "star":
            high = min(high, (len(LETTERS) - 1) // c.arms)
            if low > high:
                raise ConfigError(f"path: no letters are left for arms longer than {c.max_depth}; take fewer arms")
            return self._stars(rng, rng.integers(low, high + 1, count), high)
        return self._wanted(rng, rng.integers(low, high + 1, count), high)

    def _wanted(self, rng: np.random.Generator, depth: np.ndarray, high: int) -> Maps:
        """Draw a graph with a way of each length in ``depth`` [N].

        A graph without such a way is drawn again, so that rare lengths are as likely as others.
        """
        parts, places, missing = [], [], np.arange(len(depth))
        for _ in range(TRIES):
            tries = max(1, len(depth) // (4 * len(missing)))
            found, ok = self._graphs(rng, np.tile(depth[missing], tries), high)
            ok = ok.reshape(tries, -1)
            hit = np.flatnonzero(ok.any(0))
            parts.append(found.take(ok.argmax(0)[hit] * len(missing) + hit))
            places.append(missing[hit])
            missing = np.delete(missing, hit)
            if not len(missing):
                break
        return Maps.join(parts).take(np.argsort(np.concatenate(places)))

    def _graphs(self, rng: np.random.Generator, depth: np.ndarray, high: int) -> tuple[Maps, np.ndarray]:
        """A random graph for each wanted ``depth`` [N], and whether it has a unique way of that length."""
        count = len(depth)
        places = self.config.places + (LONGER if high > self.config.max_depth else 0)
        nodes, rows = np.arange(1, places), np.arange(count)
        parent = nodes - rng.integers(1, np.minimum(nodes, 3) + 1, (count, places - 1))
        first = rng.integers(0, places, (count, self.config.extra))
        second = (first + rng.integers(1, places, first.shape)) % places
        ends = np.stack(
            [np.concatenate([np.broadcast_to(nodes, parent.shape), first], 1), np.concatenate([parent, second], 1)], 2
        )
        linked = np.zeros((count, places, places), dtype=np.float32)
        linked[rows[:, None], ends[..., 0], ends[..., 1]] = linked[rows[:, None], ends[..., 1], ends[..., 0]] = 1
        start = rng.integers(0, places, count)
        ways = np.zeros((count, high + 1, places), dtype=np.float32)  # number of walks of k roads from the start
        ways[rows, 0, start] = 1
        distance = np.where(ways[:, 0] > 0, 0, -1)
        for k in range(1, high + 1):
            ways[:, k] = np.matmul(ways[:, None, k - 1], linked)[:, 0]
            distance = np.where((distance < 0) & (ways[:, k] > 0), k, distance)
        fits = (distance == depth[:, None]) & (ways[rows, depth] == 1)  # a single walk of the shortest length is unique
        target = np.argmax(np.where(fits, rng.random(fits.shape), -1.0), axis=1)
        way = np.full((count, high + 1), -1)
        at = target
        for k in range(high, -1, -1):
            at = np.where(k < depth, np.argmax(linked[rows, at] * (distance == k), axis=1), at)
            way[:, k] = np.where(k <= depth, at, -1)
        upper = np.triu(linked, 1) > 0
        return self._shuffled(rng, depth, upper, way, LETTERS), fits.any(1)

    def _shuffled(
        self, rng: np.random.Generator, depth: np.ndarray, linked: np.ndarray, way: np.ndarray, letters: tuple[str, ...]
    ) -> Maps:
        """Give the places random letters, and the roads of ``linked`` [N, V, V] a random order and direction."""
        count, places = linked.shape[:2]
        names = np.argsort(rng.random((count, len(letters))), axis=1)[:, :places]
        flat = linked.reshape(count, -1)
        width = int(flat.sum(1).max(initial=0))
        order = np.argsort(np.where(flat, rng.random(flat.shape, dtype=np.float32), 2), axis=1)[:, :width]
        there = np.take_along_axis(flat, order, 1)
        ends = np.stack([order // places, order % places], 2)
        ends = np.where(rng.random((count, width, 1)) < 0.5, ends, ends[..., ::-1])
        rows = np.arange(count)[:, None]
        roads = np.where(there[..., None], names[rows[..., None], ends], -1)
        most = places * (places - 1) // 2
        padded = np.full((count, min(most, places - 1 + self.config.extra), 2), -1)
        padded[:, :width] = roads
        return Maps(depth, padded, np.where(way >= 0, names[rows, way], -1), names)

    def _stars(self, rng: np.random.Generator, depth: np.ndarray, high: int) -> Maps:
        """Stars of ``arms`` arms with ``depth`` [N] roads each, written outwards.

        The way leads to the leaf of one arm.
        """
        count, arms = len(depth), self.config.arms
        names = np.argsort(rng.random((count, len(LETTERS))), axis=1)[:, : 1 + arms * high]
        inner = 1 + np.arange(arms * high).reshape(arms, high)
        before = np.concatenate([np.zeros((arms, 1), dtype=np.int64), inner[:, :-1]], 1)
        ends = np.stack([before, inner], 2).reshape(-1, 2)
        there = np.broadcast_to((np.arange(high) < depth[:, None])[:, None], (count, arms, high)).reshape(count, -1)
        order = np.argsort(np.where(there, rng.random(there.shape), 2.0), axis=1)
        rows = np.arange(count)[:, None]
        roads = np.where(np.take_along_axis(there, order, 1)[..., None], names[rows[..., None], ends[order]], -1)
        arm = inner[rng.integers(0, arms, count)]
        way = np.where(
            np.arange(high + 1) <= depth[:, None], np.concatenate([np.zeros((count, 1), dtype=np.int64), arm], 1), -1
        )
        used = np.concatenate([np.ones((count, 1), dtype=bool), there], 1)
        return Maps(depth, roads, np.where(way >= 0, names[rows, way], -1), np.where(used, names, -1))

    # --------------------------------------------------------------------------------------------------------- writing

    def ask(self, sheet: Sheet, drawn: Maps) -> None:
        sheet.put("Roads:")
        for e in range(drawn.roads.shape[1]):
            if e:
                sheet.put(",", drawn.roads[:, e, 0] >= 0)
            sheet.put_choice(SPACED, drawn.roads[:, e])
        star = self.config.form == "star"
        sheet.put(". Way from" if star else ". Shortest way from")
        sheet.put_choice(SPACED, drawn.way[:, 0])
        sheet.put(" to")
        sheet.put_choice(SPACED, drawn.way[np.arange(len(drawn)), drawn.difficulty])
        sheet.put("? Find it backwards." if star and self.config.back else "?")

    def solve(self, sheet: Sheet, drawn: Maps, rng: np.random.Generator, wrong: np.ndarray) -> None:
        way = self._slipped(drawn, rng, wrong)
        if self.config.form == "star" and self.config.back:
            sheet.put("Back:")
            sheet.put_choice(SPACED, way[:, ::-1])
            sheet.put("\n")
        sheet.put("Answer:")
        sheet.put_choice(SPACED, way)

    @staticmethod
    def _slipped(drawn: Maps, rng: np.random.Generator, wrong: np.ndarray) -> np.ndarray:
        """Replace one place between the ends by a place off the way, where ``wrong``.

        The way is unique, so the result is not a shortest way.
        """
        rows = np.arange(len(drawn))
        off = (drawn.names >= 0) & ~(drawn.names[:, :, None] == drawn.way[:, None, :]).any(2)
        other = drawn.names[rows, np.argmax(np.where(off, rng.random(off.shape), -1.0), axis=1)]
        at = 1 + rng.integers(0, 1 << 30, len(drawn)) % (drawn.difficulty - 1)
        way = drawn.way.copy()
        way[rows, at] = np.where(wrong, other, way[rows, at])
        return way

    def check(self, problem: Problem, reply: str) -> bool:
        """Any way along the roads that is as short as can be (in a graph the only one)."""
        way = (self.answer(reply) or "").split(" ")
        start, goal, links = read(problem.messages[-1]["content"], both=self.config.form == "graph")
        along = all(b in links.get(a, ()) for a, b in zip(way, way[1:], strict=False))
        return way[0] == start and way[-1] == goal and along and len(way) - 1 == distance(links, start, goal)

    def work_out(self, problem: Problem) -> list[str]:
        """The places of a graph by distance from the start until the goal is among them, and that distance.

        Each place stands after the place from which it is reached. A star is worked out by its solution.

            D B C / B A, C F / A E / 3
        """
        if self.config.form == "star":
            return super().work_out(problem)
        lines = levels(*read(problem.messages[-1]["content"], both=True))
        return [*lines, str(len(lines))]

    def account(self, problem: Problem, candidate: str) -> str:
        """The candidate's roads in a graph as the question lists them, and their number.

        The list ends with the first road that does not exist.

            A: D B, A B, A E: 3 good / B: D B, B E bad
        """
        if self.config.form == "star":
            return super().account(problem, candidate)
        question = problem.messages[-1]["content"]
        start, goal, _ = read(question, both=True)
        roads = [tuple(road.split(" ")) for road in question.removeprefix("Roads: ").split(". ", 1)[0].split(", ")]
        way = (self.answer(candidate) or "").split(" ")
        if way[0] != start:
            return f"from {way[0][:1]}".strip()
        out = []
        for a, b in itertools.pairwise(way):
            road = next((" ".join(r) for r in roads if set(r) == {a, b}), None)
            if road is None or len(out) == MOST_RETRACED:
                return ", ".join([*out, f"{a} {b[:1]}"])
            out.append(road)
        return ", ".join(out) + (f": {len(out)}" if way[-1] == goal else f" to {way[-1]}")


def levels(start: str, goal: str, links: dict[str, set[str]]) -> list[str]:
    """A line for each distance from ``start`` up to that of ``goal``.

    It lists places, each followed by the new ones reached from it.
    """
    reached, edge, out = {start}, [start], []
    while edge and goal not in reached:
        parts, beyond = [], []
        for place in edge:
            new = sorted(links.get(place, set()) - reached)
            if new:
                parts.append(" ".join([place, *new]))
                reached |= set(new)
                beyond += new
        out.append(", ".join(parts))
        edge = beyond
    return out


def read(question: str, *, both: bool) -> tuple[str, str, dict[str, set[str]]]:
    """Start, goal and neighbours from the question's text. ``both``: roads lead both ways."""
    roads, rest = question.removeprefix("Roads: ").split(". ", 1)
    links: dict[str, set[str]] = {}
    for road in roads.split(", "):
        a, b = road.split(" ")
        links.setdefault(a, set()).add(b)
        if both:
            links.setdefault(b, set()).add(a)
    start, goal = re.findall(r"from (\w+) to (\w+)\?", rest)[0]
    return start, goal, links


def distance(links: dict[str, set[str]], start: str, goal: str) -> int | None:
    """Number of roads of the shortest way, by breadth-first search; None when there is none."""
    reached, queue = {start: 0}, deque([start])
    while queue:
        here = queue.popleft()
        for there in links.get(here, ()):
            if there not in reached:
                reached[there] = reached[here] + 1
                queue.append(there)
    return reached.get(goal)
