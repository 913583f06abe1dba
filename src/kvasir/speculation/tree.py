"""Packed draft trees: what drafters propose, the controller cuts and the engine verifies. A chain is a tree without forks.

Node i holds a token that may follow its parent; parent -1 is the *anchor*, the last known token, which is no node. Parents
stand before their children, so every leading part of a tree is a tree. Duplicate siblings do not occur: the walk could
reach only one of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class DraftTree:
    """``tokens``, ``parents`` and ``est`` by node; ``est``: the drafter's estimate that the node is right, given that its
    parent is. ``depths``: 0 for the anchor's children."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    est: list[float] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    source: str = ""  # the drafter, where there are several
    _places: dict[tuple[int, int], int] | None = field(default=None, repr=False, compare=False)  # (parent, token) -> node, when it is first needed

    @classmethod
    def chain(cls, tokens: Iterable[int], est: float | list[float] = 1.0) -> DraftTree:
        tree = cls()
        for i, token in enumerate(tokens):
            tree.add(i - 1, token, est if isinstance(est, float) else est[i])
        return tree

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return self.parents == list(range(-1, len(self.parents) - 1))

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
            return DraftTree(self.tokens[:count], self.parents[:count], self.est[:count], self.depths[:count], self.source)
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
