"""Length of the prefix that all levels together hold of a prompt, and the pages that it needs on the device."""

from __future__ import annotations

from collections.abc import Iterator

from kvasir.engine.pages.pages import PageManager
from kvasir.engine.pages.prefix import Node
from kvasir.types import Sequence


def reachable(pages: PageManager, seq: Sequence, limit: int | None) -> int:
    """Tokens that ``PageManager.match`` would find if all pages of lower tiers were on the device."""
    size, reach = pages.page_slots, 0
    limit = len(seq.tokens) - 1 if limit is None else min(limit, len(seq.tokens) - 1)
    runs = [0] * len(pages.pools)  # by group, number of pages in a row that some level has up to here
    for i, node in enumerate(pages.index.walk(seq, limit // size)):
        enough = True
        for g, pool in enumerate(pages.pools):
            runs[g] = runs[g] + 1 if node.has(pool.group) else 0
            if runs[g] < i + 1 - pages.first(pool, (i + 1) * size):
                enough = False
                if pool.window is None:
                    return reach
        if enough and (pages.states is None or node.has(pages.states.group)):
            reach = (i + 1) * size
    return reach


def needed_pages(pages: PageManager, seq: Sequence, num_tokens: int) -> Iterator[tuple[int, Node]]:
    """The pages by group that a hit of ``num_tokens`` needs, first page first."""
    nodes = list(pages.index.walk(seq, num_tokens // pages.page_slots))
    for pool in pages.pools:
        for node in nodes[pages.first(pool, num_tokens) :]:
            yield pool.group, node
    if pages.states is not None:
        yield pages.states.group, nodes[-1]


def first_tier(key: tuple[Node, int]) -> int:
    """The first tier below the device that has the page of a node and group."""
    return min(tier for tier, group in key[0].slots if group == key[1])
