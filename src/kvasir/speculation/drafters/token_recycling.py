"""Propose recently likely successors of each token as a tree. Exact; needs no training.

Token Recycling (arXiv 2408.08696) keeps a row of ``width`` likely successors for every token. The logits of every
verified row overwrite it, those of rejected drafts included. A proposal is the best-first tree below the last token,
with the most likely ranks first. The controller learns what a rank is worth at a depth. ``tree=published`` keeps to the
paths of the paper's static tree of 80 nodes. Texts fill rows, too, so rows are not empty where nothing was verified.
The drafter looks at no context: it pays where nothing repeats that could be copied, and with few tokens a step, as on a
CPU.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

from kvasir.speculation.drafter import Ask, Drafter
from kvasir.speculation.tree import DraftTree
from kvasir.types import Sequence

RANKS = (0.5, 0.2, 0.1, 0.06, 0.04, 0.03, 0.02, 0.02)  # prior chance of each rank; the controller has a bin for each
MAX_TENANTS = 64  # tenants whose rows are kept, the ones used last
READ_TOKENS = 4096  # last tokens of a prompt that are read
ROW_BYTES = 260  # measured bytes of a token's row
# Number of children by path of ranks from the anchor: the tree of 80 nodes, 6 deep, of the authors' release (2.2.2).
PUBLISHED = {
    "": 8,
    **dict(zip("01234567", (8, 4, 3, 2, 1, 1, 1, 1))),
    **{"00": 8, "01": 3, "02": 2, "03": 1, "04": 1, "05": 1, "06": 1, "07": 1},
    **{"10": 2, "11": 1, "20": 1, "30": 1, "40": 1, "50": 1},
    **{"000": 5, "001": 2, "002": 1, "003": 1, "004": 1, "010": 1, "020": 1, "100": 1, "200": 1, "300": 1},
    **{"0000": 3, "0001": 1, "0002": 1, "0010": 1, "0100": 1, "1000": 1},
    **{"00000": 2, "00010": 1},
}


@dataclass(frozen=True, slots=True)
class Config:
    """``scope``: who shares rows; ``tree``: any best-first tree, or paths of the published static tree only."""

    scope: Literal["tenant", "request"] = "tenant"
    tree: Literal["learnt", "published"] = "learnt"


Rows = dict[int, tuple[int, ...]]  # token -> its likely successors, best first


class TokenRecycling(Drafter):
    topology = "tree"
    top_tokens = len(RANKS)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._tenants: OrderedDict[str, Rows] = OrderedDict()

    def propose(self, asks: list[Ask]) -> list[DraftTree]:
        found = [self._read(ask.seq) for ask in asks]
        return [self._tree(rows, ask) for rows, ask in zip(found, asks)]

    def recycle(self, seq: Sequence, tokens: list[int], top: list[list[int]]) -> None:
        rows = self._rows(seq)
        for token, likely in zip(tokens, top):  # where a token occurs twice, the later row counts
            rows[token] = tuple(likely)

    def state_bytes(self) -> int:
        return ROW_BYTES * sum(map(len, self._tenants.values()))

    def _rows(self, seq: Sequence) -> Rows:
        if self.config.scope == "request":
            return seq.state.setdefault("recycled_rows", {})
        rows = self._tenants.setdefault(seq.request.tenant, {})
        self._tenants.move_to_end(seq.request.tenant)
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)
        return rows

    def _read(self, seq: Sequence) -> Rows:
        """Read the new tokens of the text: the successor of a token joins its row, after those that are there."""
        rows, tokens = self._rows(seq), seq.tokens
        for at in range(seq.state.get("recycled", max(0, len(tokens) - READ_TOKENS)), len(tokens) - 1):
            known = rows.get(tokens[at], ())
            if tokens[at + 1] not in known:
                rows[tokens[at]] = (*known[: len(RANKS) - 1], tokens[at + 1])
        seq.state["recycled"] = max(0, len(tokens) - 1)
        return rows

    def _tree(self, rows: Rows, ask: Ask) -> DraftTree:
        tree, published = DraftTree(), self.config.tree == "published"
        heap: list[tuple[float, int, float, int, int, str]] = []  # -survival, order, est, parent, token, ranks
        pushed = 0

        def push(parent: int, token: int, chance: float, path: str) -> None:
            nonlocal pushed
            count = PUBLISHED.get(path, 0) if published else len(RANKS)
            for rank, (est, successor) in enumerate(zip(RANKS[:count], rows.get(token, ()))):
                heapq.heappush(heap, (-chance * est, pushed, est, parent, successor, f"{path}{rank}"))
                pushed += 1

        push(-1, ask.seq.tokens[-1], 1.0, "")
        while heap and len(tree) < ask.max_nodes:
            chance, _, est, parent, token, path = heapq.heappop(heap)
            node = tree.add(parent, token, est)
            if tree.depths[node] + 1 < ask.max_depth:
                push(node, token, -chance, path)
        return tree.keep(range(len(tree)))
