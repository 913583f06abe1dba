"""Packed draft trees: what drafters propose, the controller cuts and the engine verifies. A chain is a tree without
forks.

Node i holds a token that may follow its parent. Parent -1 is the *anchor*, the last known token, which is not a node.
Parents stand before their children, so the first n nodes of a tree always form a tree. Siblings are distinct tokens:
the walk could reach only one of two equal ones.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Integral


@dataclass(slots=True)
class DraftTree:
    """A draft tree as lists by node.

    ``est``: the drafter's estimate that the node is accepted, given that its parent is. ``depths``: 0 for the anchor's
    children. ``source``: name of the drafter, where there are several. ``guests``: by node, chains of guest rows behind
    it (see ``Span``). ``promise``: by place in such a chain, the tokens that a guest there adds to the next step if the
    walk ends at its node."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    est: list[float] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    source: str = ""
    guests: dict[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    promise: tuple[float, ...] = ()
    # (parent, token) -> node; filled when it is first needed
    _places: dict[tuple[int, int], int] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def chain(cls, tokens: Iterable[int], est: float | list[float] = 1.0) -> DraftTree:
        tree = cls()
        for i, token in enumerate(tokens):
            tree.add(i - 1, token, est if isinstance(est, float) else est[i])
        return tree

    def __len__(self) -> int:
        return len(self.tokens)

    def num_guests(self, node: int) -> int:
        """Number of guest rows behind a node, or behind the anchor (-1)."""
        return sum(map(len, self.guests.get(node, ())))

    @property
    def has_tail(self) -> bool:
        """Whether it is a chain whose guests stand behind its last node alone."""
        return len(self.guests) == 1 and len(self.tokens) - 1 in self.guests and self.is_chain

    def promised(self, node: int) -> float:
        """Tokens that the guests behind a node add to the next step if the walk ends there."""
        return sum(self.promise[: max(map(len, self.guests.get(node, ())), default=0)])

    @property
    def num_rows(self) -> int:
        """Number of rows that its verification takes, without the anchor's."""
        return len(self.tokens) + sum(map(self.num_guests, self.guests))

    @property
    def is_chain(self) -> bool:
        return self.parents == list(range(-1, len(self.parents) - 1))

    def is_whole(self, num_guests: int) -> bool:
        """Whether the lists agree with each other, for trees that were not built by ``add``. ``num_guests``: number of
        guest embeddings of the drafter."""
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
        """Return the node of ``token`` below ``parent``. An existing node keeps the larger of the two estimates."""
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
        """Return the tree of these nodes, with the most likely path first. The parent of every node must be among them.

        That path then lies in the slots right behind the anchor's, where a commit copies nothing. The guests at the end
        of a chain (``has_tail``) go to the last node kept."""
        if self.is_chain:
            count = len(nodes)
            assert not count or max(nodes) == count - 1, "a node is kept whose parent is not"
            guests = self.guests
            if guests:
                tail = guests[len(self) - 1] if self.has_tail else None
                guests = {n: chains for n, chains in guests.items() if n < count} if tail is None else {count - 1: tail}
            return DraftTree(
                self.tokens[:count],
                self.parents[:count],
                self.est[:count],
                self.depths[:count],
                self.source,
                guests,
                self.promise,
            )
        children: dict[int, list[int]] = {}
        for node in sorted(nodes, key=lambda i: -self.est[i]):
            children.setdefault(self.parents[node], []).append(node)
        tree, places = DraftTree(source=self.source, promise=self.promise), {-1: -1}
        stack = children.get(-1, [])[::-1]
        while stack:
            node = stack.pop()
            places[node] = tree.add(places[self.parents[node]], self.tokens[node], self.est[node])
            stack += children.get(node, [])[::-1]
        assert len(tree) == len(nodes), "a node is kept whose parent is not"
        tree.guests = {place: self.guests[node] for node, place in places.items() if node in self.guests}
        return tree

    def trunk(self) -> DraftTree:
        """Return the chain of first children. In a tree made by ``keep`` this is the most likely path."""
        chosen: list[int] = []
        for node, parent in enumerate(self.parents):
            if parent == (chosen[-1] if chosen else -1):
                chosen.append(node)
        return self if len(chosen) == len(self) else self.keep(chosen)

    def path(self, emitted: list[int]) -> list[int]:
        """Return the nodes that ``emitted``, the tokens after the anchor, passes through."""
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
    """Build the tree of the paths with the largest products of estimates, best first.

    Each of K depths has C independent guesses in falling order. The first n nodes are the best tree of n nodes: the
    sparse tree of Medusa (arXiv 2401.10774)."""
    tree, depth = DraftTree(), min(len(est_KC), max_depth)
    # Entries: -product, order, parent, depth, rank, product of the ancestors.
    heap = [(-est_KC[0][0], 0, -1, 0, 0, 1.0)] if depth else []
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
