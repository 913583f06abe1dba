"""Protocol of the tiers below the device pool, as the page manager uses them."""

from __future__ import annotations

from typing import Protocol

from kvasir.engine.pages.shelf import Shelf
from kvasir.types import Sequence


class LowerTiers(Protocol):
    """The tiers below the device pool; see ``tiers.py``. ``shelves``: their slots, by tier and group."""

    shelves: list[list[Shelf]]

    def fetch(self, seq: Sequence, num_hit: int, limit: int | None) -> bool:
        """Start to copy the pages that lower tiers have for ``seq`` beyond its hit of ``num_hit`` tokens, and return
        whether to wait for them. There is room for all of them. ``limit``: most tokens of a hit."""

    def arriving(self, seq: Sequence) -> bool:
        """Whether pages for which ``seq`` waits are still being copied."""

    def check(self) -> None:
        """Assert every invariant of the tiers. Slow: for tests and debugging."""
