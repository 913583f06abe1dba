"""Invariants of pages, for `PageManager.check`. Slow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from kvasir.engine.pages.page_pool import PagePool
from kvasir.types import Sequence


def check_pages(pages: Any, sequences: Iterable[Sequence]) -> None:
    """Assert the invariants of pages, given all sequences that have some."""
    sequences = [seq for seq in sequences if seq.tables]
    for pool in pages.all_pools:
        _check_pool(pages, pool, sequences)
    if pages.tiers is not None:
        pages.tiers.check()
    for seq in sequences:
        _check_sequence(pages, seq)
        if pages.states is not None:
            pages.states.check(seq)
    if pages.index is not None:
        _check_index(pages, sequences)


def _check_pool(pages: Any, pool: PagePool, sequences: list[Sequence]) -> None:
    in_use = Counter(page for seq in sequences for page in seq.tables[pool.group] if page) + pool.holds
    assert all(pool.refs[page] == in_use[page] for page in range(pool.num_pages)), (
        f"group {pool.group}: references and tables differ"
    )
    places = Counter([*pool.free, *pool.cached, *pool.limbo, *in_use])
    assert places == Counter(range(1, pool.num_pages)), f"group {pool.group}: a page is in no place or in two"
    for page, node in enumerate(pool.nodes):
        assert node is None or (node.pages[pool.group] == page and pages.index.nodes.get(node.key) is node), (
            f"page {page}: stale node"
        )
    assert not any(pool.nodes[page] for page in pool.free), "a free page is in the prefix index"
    assert all(pool.nodes[page] for page in pool.cached), "a cached page is not in the prefix index"


def _check_sequence(pages: Any, seq: Sequence) -> None:
    size = pages.page_slots
    for pool, table in zip(pages.pools, seq.tables):
        needed = -(-seq.place(pool.group, seq.num_computed) // size)
        first = pages.first(pool, seq.num_computed)
        assert len(table) >= needed and all(table[first:]), f"{seq} misses a page of group {pool.group}"
        for i, page in enumerate(table):
            node = pool.nodes[page] if page else None
            depth = i
            while node is not None and node.parent is not None:
                # A fork that starts inside a page has computed only a part of it.
                known = min(seq.num_computed - depth * size, size)
                assert known > 0, f"{seq}: page {i} is indexed before it is committed"
                assert node.tokens[:known] == seq.tokens[depth * size : depth * size + known], (
                    f"{seq}: page {i} is indexed under other tokens"
                )
                same = known < size or node.variant == seq.kv_variant((depth + 1) * size)
                assert same, f"{seq}: page {i} is another variant's"
                node, depth = node.parent, depth - 1
            assert node is None or (depth == -1 and node.tokens == [seq.request.tenant]), (
                f"{seq}: page {i} is indexed elsewhere"
            )


def _check_index(pages: Any, sequences: list[Sequence]) -> None:
    users = Counter(node.parent for node in pages.index.nodes.values() if node.parent)
    users.update(tail for _, tail in pages.tails.values() if tail is not None)
    assert set(pages.tails) == set(sequences), "a sequence that is gone is still being indexed"
    for key, node in pages.index.nodes.items():
        assert node.key == key and node.users == users[node], "a prefix node's users are miscounted"
        assert node.users or node.slots or any(node.pages), "a prefix node that nothing uses"
        assert node.parent is None or pages.index.nodes.get(node.parent.key) is node.parent, (
            "a prefix node hangs in the air"
        )
        for pool in pages.all_pools:
            assert not node.pages[pool.group] or pool.nodes[node.pages[pool.group]] is node, (
                "a prefix node names a page that is gone"
            )
