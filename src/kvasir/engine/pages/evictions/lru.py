"""The page that was used least recently goes first, and no request waits for the sake of the cache."""

from __future__ import annotations

from kvasir.engine.pages.eviction import ByRecency


class Lru(ByRecency):
    """Least recently used."""
