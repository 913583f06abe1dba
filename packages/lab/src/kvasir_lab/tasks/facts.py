"""Follow links between people through a store of facts, writing one hop a line or none (``think=no``).

    Facts: friend of wolf is king; master of king is bear. Who is the master of the friend of wolf?
      ->   friend of wolf is king / master of king is bear / Answer: bear

Shape suffixes: N problems, F facts, H hops (-1 beyond a problem's last hop), P people, R kinds of link.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvasir.errors import ConfigError
from kvasir_lab.sheet import Drawn, Sheet, SheetTask
from kvasir_lab.task import Split
from kvasir_lab.words import LINKS, PEOPLE

SPACED = tuple(f" {person}" for person in PEOPLE)
SPACED_LINKS = tuple(f" {link} of" for link in LINKS)
LINE_LINKS = tuple(f"{link} of" for link in LINKS)
HOPS = tuple(f" the {link} of" for link in LINKS)
LONGER = 2  # The split ``longer`` has this many hops more than the most in training.


@dataclass(frozen=True)
class Config:
    """The dial: more facts and more hops are harder.

    ``think``: yes (a line a hop), no (the answer at once) or mixed.
    """

    min_facts: int = 8
    max_facts: int = 24
    min_hops: int = 1
    max_hops: int = 4
    think: str = "mixed"

    def __post_init__(self) -> None:
        most = len(PEOPLE) * len(LINKS) // 2
        if not self.max_hops <= self.min_facts <= self.max_facts <= most:
            raise ConfigError(
                f"facts: min_facts={self.min_facts} and max_facts={self.max_facts} "
                f"must satisfy max_hops <= min <= max <= {most}"
            )
        if not 1 <= self.min_hops <= self.max_hops <= 8:
            raise ConfigError(
                f"facts: min_hops={self.min_hops} and max_hops={self.max_hops} must satisfy 1 <= min <= max <= 8"
            )
        if self.think not in ("yes", "no", "mixed"):
            raise ConfigError(f"facts: think='{self.think}' is not yes, no or mixed")


@dataclass(slots=True)
class Stores(Drawn):
    """link, who, whom [N, F]; chain [N, H+1] people; asked [N, H] links; think [N] bool."""

    link: np.ndarray
    who: np.ndarray
    whom: np.ndarray
    chain: np.ndarray
    asked: np.ndarray
    think: np.ndarray


class Facts(SheetTask):
    """Multi-hop questions over a key-value store."""

    def sample(self, rng: np.random.Generator, count: int, split: Split) -> Stores:
        c, people, rows = self.config, len(PEOPLE), np.arange(count)[:, None]
        high = c.max_hops + (LONGER if split == "longer" else 0)
        hops = np.full(count, high) if split == "longer" else rng.integers(c.min_hops, high + 1, count)
        wide = max(c.max_facts, high)
        size = rng.integers(max(c.min_facts, high), wide + 1, count)
        chain = np.argsort(rng.random((count, people)), axis=1)[:, : high + 1]
        asked = rng.integers(0, len(LINKS), (count, high))
        whom = (np.arange(people)[:, None] + rng.integers(1, people, (count, people, len(LINKS)))) % people
        whom[rows, chain[:, :-1], asked] = chain[:, 1:]
        whom = whom.reshape(count, -1)
        # The chain's facts come first, then random ones, as many as the store holds; then all are shuffled.
        rank = rng.random(whom.shape)
        needed = np.where(np.arange(high) < hops[:, None], chain[:, :-1] * len(LINKS) + asked, -1)
        for k in range(high):
            chosen = needed[:, k] >= 0
            rank[np.flatnonzero(chosen), needed[chosen, k]] = -1
        cells = np.argsort(rank, axis=1)[:, :wide]
        order = np.argsort(np.where(np.arange(wide) < size[:, None], rng.random(cells.shape), 2.0), axis=1)
        cells = np.where(np.arange(wide) < size[:, None], np.take_along_axis(cells, order, 1), -1)
        there = cells >= 0
        beyond = np.arange(high) >= hops[:, None]
        asked[beyond] = -1
        chain[:, 1:][beyond] = -1
        think = rng.random(count) < {"yes": 1.0, "no": 0.0, "mixed": 0.5}[c.think]
        return Stores(
            hops,
            np.where(there, cells % len(LINKS), -1),
            np.where(there, cells // len(LINKS), -1),
            np.where(there, whom[rows, cells], -1),
            chain,
            asked,
            think,
        )

    def ask(self, sheet: Sheet, drawn: Stores) -> None:
        sheet.put("Facts:")
        for f in range(drawn.link.shape[1]):
            there = drawn.link[:, f] >= 0
            if f:
                sheet.put(";", there)
            sheet.put_choice(SPACED_LINKS, drawn.link[:, f])
            sheet.put_choice(SPACED, drawn.who[:, f])
            sheet.put(" is", there)
            sheet.put_choice(SPACED, drawn.whom[:, f])
        sheet.put(". Who is")
        sheet.put_choice(HOPS, drawn.asked[:, ::-1])
        sheet.put_choice(SPACED, drawn.chain[:, 0])
        sheet.put("?")
        sheet.put(" Answer at once.", ~drawn.think)

    def solve(self, sheet: Sheet, drawn: Stores, rng: np.random.Generator, wrong: np.ndarray) -> None:
        chain, rows = drawn.chain.copy(), np.arange(len(drawn))
        # In a slip, a hop ends at somebody else, and so does every hop after it.
        at = np.where(wrong, rng.integers(0, 1 << 30, len(drawn)) % drawn.difficulty, chain.shape[1])
        for k in range(drawn.asked.shape[1]):
            lost = (k >= at) & (drawn.asked[:, k] >= 0)
            chain[:, k + 1] = np.where(
                lost, (chain[:, k + 1] + rng.integers(1, len(PEOPLE), len(drawn))) % len(PEOPLE), chain[:, k + 1]
            )
        for k in range(drawn.asked.shape[1]):
            used = drawn.think & (drawn.asked[:, k] >= 0)
            sheet.put_choice(LINE_LINKS, drawn.asked[:, k], used)
            sheet.put_choice(SPACED, chain[:, k], used)
            sheet.put(" is", used)
            sheet.put_choice(SPACED, chain[:, k + 1], used)
            sheet.put("\n", used)
        sheet.put("Answer:")
        sheet.put_choice(SPACED, chain[rows, drawn.difficulty])
