"""The tier seam: where pages of the cache lie that have left the device pool, or are copied in advance.

Tiers stand in a row below the pool, the fastest first, and each exchanges whole pages with its neighbour above. A tier
has slots for the pages of each cache group. The engine decides which page goes to which slot, and when a slot is
written over (``engine/pages/tiers.py``). A tier moves bytes: ``write`` and ``read`` run on its links, so a step never
waits for them. Pages are raw bytes, so a quantised codec's scales and a recurrent model's states travel as they are.

The engine keeps source and target of each copy as they are until the copy has landed, and it never has two copies on
one slot. So a link may run copies in any order, and late.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvasir.client.interface import StoredPage
from kvasir.kv.links import Link, StreamLink, ThreadLink
from kvasir.technique import Technique

if TYPE_CHECKING:
    import torch

    from kvasir.kv.pool import KVPool

TIERS = "kvasir.kv.tiers"


@dataclass(frozen=True, slots=True)
class Move:
    """A page to copy between ``row`` of the level above and ``slot`` of a tier."""

    row: int
    slot: int
    page: StoredPage


@dataclass(frozen=True, slots=True)
class Found:
    """A page that a tier holds from an earlier process. ``tenant``: digest of the tenant's name for pages without a
    page before them; else empty. ``before``: the key of the page before, or of the tenant's root."""

    key: bytes
    before: bytes
    tokens: list[int]
    variant: str
    tenant: bytes
    group: int
    slot: int


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a tier: the pool above it, the device and the model.

    ``pool``: the pages of the device. ``root``: names everything that changes a page's bytes, the weights included.
    ``above``: the tier above; None: the device pool is.
    """

    pool: KVPool
    device: torch.device
    root: bytes
    above: Tier | None = None

    @property
    def page_bytes(self) -> list[int]:
        """Bytes of a page by group."""
        return [self.pool.page_bytes(group) for group in range(len(self.pool.groups))]

    def slots_in(self, num_bytes: int, extra: Sequence[int] = ()) -> tuple[int, ...]:
        """Number of slots by group in ``num_bytes``, which the groups share as they share the pool's bytes. ``extra``:
        bytes of a slot by group in addition to its page's."""
        sizes = [size + more for size, more in zip(self.page_bytes, extra or [0] * len(self.page_bytes))]
        whole = sum(n * size for n, size in zip(self.pool.num_pages, self.page_bytes))
        shares = [n * size / whole for n, size in zip(self.pool.num_pages, self.page_bytes)]
        return tuple(int(num_bytes * share) // size for share, size in zip(shares, sizes))


class Tier(Technique):
    """A place for pages below the device pool. ``num_slots`` by group is known once it is open."""

    exact = True
    affects_kv = False
    lasting: ClassVar[bool] = False  # whether a later process finds the pages again
    num_slots: tuple[int, ...] = ()

    @abstractmethod
    def open(self, place: Place) -> list[Found]:
        """Make room, and return the pages that are there from before. Raises ConfigError with the nearest choice."""
        raise NotImplementedError

    @property
    def ready(self) -> bool:
        """Whether pages may be copied: memory that takes long to prepare is prepared while the engine serves."""
        return True

    @property
    def secret(self) -> bytes | None:
        """The key of the prefix index that the pages were stored under; None: they end with the process."""
        return None

    def links(self, place: Place) -> tuple[Link, Link]:
        """The links on which ``write`` and ``read`` run."""
        if place.device.type == "cuda":
            return StreamLink(place.device, place.pool), StreamLink(place.device, place.pool)
        return ThreadLink(f"{self.name}-write"), ThreadLink(f"{self.name}-read")

    @abstractmethod
    def write(self, group: int, rows: torch.Tensor, moves: Sequence[Move]) -> list[bool]:
        """Copy pages from ``rows`` [N, bytes] uint8, the level above, into slots. Returns for each whether it is
        stored."""
        raise NotImplementedError

    @abstractmethod
    def read(self, group: int, rows: torch.Tensor, moves: Sequence[Move]) -> list[bool]:
        """Copy pages from slots into ``rows``. Returns for each whether the slot held just this page, unharmed; if not,
        nothing may be served from the row."""
        raise NotImplementedError

    def rows(self, group: int) -> torch.Tensor:
        """The slots as memory [N, bytes] uint8, for the tier below. Raises NotImplementedError where there is none."""
        raise NotImplementedError(f"nothing can stand below the tier '{self.name}'")

    def close(self) -> None:
        """Give everything back. No copy runs any more."""


def runs(moves: Sequence[Move]) -> list[tuple[int, int, int]]:
    """Moves as (first row, first slot, count) of pages that lie side by side in both places: one copy each."""
    found: list[tuple[int, int, int]] = []
    for move in sorted(moves, key=lambda m: m.row):
        if found:
            row, slot, count = found[-1]
            if (move.row, move.slot) == (row + count, slot + count):
                found[-1] = row, slot, count + 1
                continue
        found.append((move.row, move.slot, 1))
    return found
