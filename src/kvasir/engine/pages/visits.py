"""Requests as the prefix cache sees them: each comes, perhaps goes on with an earlier conversation, and leaves.

Whether conversations come back is what ``returns.py`` learns from. What a request that waits has found is kept for it.
"""

from __future__ import annotations

from collections import abc

from kvasir.engine.pages.page_pool import PagePool
from kvasir.engine.pages.prefix import PrefixIndex
from kvasir.engine.pages.returns import Kind, Returns
from kvasir.types import Sequence


class Visits:
    """Tells ``returns`` and the pools about sequences.

    ``index``: None without prefix caching. ``pools``: those whose pages are of use only together with the ones before.
    """

    def __init__(
        self, index: PrefixIndex | None, returns: Returns, page_slots: int, pools: abc.Sequence[PagePool]
    ) -> None:
        self._index = index
        self._returns = returns
        self._page_slots = page_slots
        self._pools = pools
        self._asked: dict[Sequence, list[tuple[PagePool, object]]] = {}  # pools, and what they gave for ``withdraw``

    def kind(self, seq: Sequence) -> Kind:
        """The kind of the prefix of ``seq``."""
        return self._returns.kind(seq.request.tenant, seq.num_returns)

    def came(self, seq: Sequence, now: float) -> None:
        """Note that ``seq`` arrives at ``now``, in monotonic seconds. It may go on with a conversation."""
        self._returns.pass_time(now)
        full = seq.num_prompt // self._page_slots
        if self._index is not None and not seq.branch and full:
            self._index.key(seq, full - 1)
            seq.num_returns = self._returns.came(reversed(seq.page_keys[:full]))

    def left(self, seq: Sequence, now: float) -> None:
        """Note that ``seq``, which has run, ends at ``now``. Its conversation may come back."""
        self._returns.pass_time(now)
        full = min(seq.num_prompt, seq.num_computed) // self._page_slots
        if self._index is not None and not seq.branch and full:
            self._returns.left(seq.request.tenant, self._index.key(seq, full - 1), seq.num_returns)

    def ask(self, seq: Sequence) -> None:
        """Keep what the waiting ``seq`` has found in the cache (``PageManager.match``), until ``withdraw``."""
        node = seq.found[1]
        if node is None or seq in self._asked:
            return
        for pool in self._pools:
            page = node.pages[pool.group]
            if page in pool.cached and (asked := pool.cached.ask(page)) is not None:
                self._asked.setdefault(seq, []).append((pool, asked))

    def withdraw(self, seq: Sequence) -> None:
        """Take back what was asked for: ``seq`` starts, ends, or is held."""
        for pool, asked in self._asked.pop(seq, ()):
            pool.cached.withdraw(asked)
