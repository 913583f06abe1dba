"""Packed draft trees: what drafters propose, the controller cuts and the engine verifies. A chain is a tree without forks.

Node i holds a token that may follow its parent; parent -1 is the *anchor*, the last known token, which is no node. Parents
stand before their children, so every leading part of a tree is a tree. Duplicate siblings do not occur: the walk could
reach only one of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Integral


@dataclass(slots=True)
class DraftTree:
    """``tokens``, ``parents`` and ``est`` by node; ``est``: the drafter's estimate that the node is right, given that its
    parent is. ``depths``: 0 for the anchor's children."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    est: list[float] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    source: str = ""  # the drafter, where there are several
    guests: dict[int, tuple[tuple[int, ...], ...]] = field(
        default_factory=dict
    )  # by node: chains of guest rows behind it, see ``Span``
    _places: dict[tuple[int, int], int] | None = field(
        default=None, repr=False, compare=False
    )  # (parent, token) -> node, when it is first needed

    @classmethod
    def chain(cls, tokens: Iterable[int], est: float | list[float] = 1.0) -> DraftTree:
        tree = cls()
        for i, token in enumerate(tokens):
            tree.add(i - 1, token, est if isinstance(est, float) else est[i])
        return tree

    def __len__(self) -> int:
        return len(self.tokens)

    def num_guests(self, node: int) -> int:
        """Guest rows behind a node, or the anchor."""
        return sum(map(len, self.guests.get(node, ())))

    @property
    def num_rows(self) -> int:
        """Rows that verifying it takes beside the anchor's."""
        return len(self.tokens) + sum(map(self.num_guests, self.guests))

    @property
    def is_chain(self) -> bool:
        return self.parents == list(range(-1, len(self.parents) - 1))

    def is_whole(self, num_guests: int) -> bool:
        """Whether its parts agree with each other, for one that was not built by ``add``; ``num_guests``: embeddings that there are."""
        nodes = range(len(self.tokens))
        depths: list[int] = []
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                return False
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return (
            depths == self.depths
            and len(depths) == len(self.est) == len(nodes)
            and all(isinstance(token, Integral) for token in self.tokens)
            and all(
                (node in nodes or node == -1) and all(0 <= guest < num_guests for chain in chains for guest in chain)
                for node, chains in self.guests.items()
            )
        )

    def add(self, parent: int, token: int, est: float) -> int:
        """The node of ``token`` below ``parent``: a new one, or the one that is there, which gets the larger estimate."""
        node = self._by_place().setdefault((parent, token), len(self.tokens))
        if node < len(self.tokens):
            self.est[node] = max(self.est[node], est)
            return node
        self.tokens.append(token)
        self.parents.append(parent)
        self.est.append(est)
        self.depths.append(0 if parent < 0 else self.depths[parent] + 1)
        return node

    def keep(self, nodes: Collection[int]) -> DraftTree:
        """The tree of these nodes, which hold the parents of each, with the most likely path first.

        That path then lies in the slots behind the anchor's, where committing it copies nothing."""
        if self.is_chain:  # its leading part
            count = len(nodes)
            assert not count or max(nodes) == count - 1, "a node is kept whose parent is not"
            guests = {node: chains for node, chains in self.guests.items() if node < count} if self.guests else {}
            return DraftTree(
                self.tokens[:count], self.parents[:count], self.est[:count], self.depths[:count], self.source, guests
            )
        children: dict[int, list[int]] = {}
        for node in sorted(nodes, key=lambda i: -self.est[i]):
            children.setdefault(self.parents[node], []).append(node)
        tree, places = DraftTree(source=self.source), {-1: -1}
        stack = children.get(-1, [])[::-1]
        while stack:
            node = stack.pop()
            places[node] = tree.add(places[self.parents[node]], self.tokens[node], self.est[node])
            stack += children.get(node, [])[::-1]
        assert len(tree) == len(nodes), "a node is kept whose parent is not"
        tree.guests = {place: self.guests[node] for node, place in places.items() if node in self.guests}
        return tree

    def trunk(self) -> DraftTree:
        """The chain of the first child, its first child, and so on: of a kept tree, the most likely path."""
        chosen: list[int] = []
        for node, parent in enumerate(self.parents):
            if parent == (chosen[-1] if chosen else -1):
                chosen.append(node)
        return self if len(chosen) == len(self) else self.keep(chosen)

    def path(self, emitted: list[int]) -> list[int]:
        """The nodes that ``emitted``, the tokens after the anchor, runs through."""
        found, node = [], -1
        places = self._by_place()
        for token in emitted:
            if (node := places.get((node, token), -2)) < -1:
                break
            found.append(node)
        return found

    def _by_place(self) -> dict[tuple[int, int], int]:
        if self._places is None:
            self._places = dict(zip(zip(self.parents, self.tokens), range(len(self.tokens))))
        return self._places


def products(
    est_KC: Sequence[Sequence[float]], ids_KC: Sequence[Sequence[int]], max_nodes: int, max_depth: int
) -> DraftTree:
    """Of guesses that do not see each other, C for each of K depths in falling order, the paths with the largest products of
    estimates. Best first: every leading part is the best tree of its size, the sparse tree of Medusa (arXiv 2401.10774)."""
    tree, depth = DraftTree(), min(len(est_KC), max_depth)
    heap = (
        [(-est_KC[0][0], 0, -1, 0, 0, 1.0)] if depth else []
    )  # -product, order, parent, depth, rank, product of the ancestors
    order = 0
    while heap and len(tree) < max_nodes:
        product, _, parent, k, rank, above = heapq.heappop(heap)
        node = tree.add(parent, ids_KC[k][rank], est_KC[k][rank])
        order += 2
        if rank + 1 < len(est_KC[k]):
            heapq.heappush(heap, (-above * est_KC[k][rank + 1], order, parent, k, rank + 1, above))
        if k + 1 < depth:
            heapq.heappush(heap, (product * est_KC[k + 1][0], order + 1, node, k + 1, 0, -product))
    return tree
