"""The changes of a prefix index since they were last asked for: which pages it has stored, and which it has evicted.

A router and KV events follow one cache group: the first that keeps every token, since a prefix hit ends where that
group ends. A model that has windows only is followed by its first group, and hits may then be shorter than told.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.client.interface import StoredPage


@dataclass(slots=True)
class PageChanges:
    """Net changes: a page that was stored and evicted in between stands among the evicted only. ``stored``: nodes, each
    after the one before it in its prefix. ``evicted``: keys. ``cleared``: everything known before is void."""

    stored: list[StoredPage]
    evicted: list[bytes]
    cleared: bool = False

    def __bool__(self) -> bool:
        return bool(self.stored or self.evicted or self.cleared)


class PageLog:
    """Follows the pages of cache group ``group``."""

    def __init__(self, group: int) -> None:
        self.group = group
        self._held: dict[bytes, StoredPage] = {}
        self._changed: dict[bytes, StoredPage | None] = {}  # by key, in order; None: evicted
        self._cleared = False

    def stored(self, node: StoredPage, group: int) -> None:
        """Note that ``node`` has got a page of a group."""
        if group == self.group:
            self._held[node.key] = node
            self._changed.pop(node.key, None)
            self._changed[node.key] = node

    def evicted(self, node: StoredPage, group: int) -> None:
        """Note that ``node`` has lost its page of a group."""
        if group == self.group and self._held.pop(node.key, None) is not None:
            self._changed[node.key] = None

    def clear(self) -> None:
        """Note that nothing stored so far will be found again."""
        self._held.clear()
        self._changed.clear()
        self._cleared = True

    def take(self) -> PageChanges:
        """The changes since the last call."""
        changes = PageChanges(
            [node for node in self._changed.values() if node is not None],
            [key for key, node in self._changed.items() if node is None],
            self._cleared,
        )
        self._changed, self._cleared = {}, False
        return changes

    def held(self) -> list[StoredPage]:
        """The nodes of all pages that are stored now."""
        return list(self._held.values())
