"""Trees that a draft model grows level by level: one forward for all nodes of a level.

DySpec (arXiv 2410.11744) takes the nodes whose path is likeliest under the draft model, as far as a threshold: the
form of its greedy tree that needs no forward a node. ``fixed`` keeps one shape for all texts, the sparse tree of the
mean chances of a rank, to compare with.

Children are coupled draws: the tokens with the largest weight plus the noise that the model will use at that position.
``drawn`` trees are drawn without replacement with noise of their own, for verification by multi-round rejection
(`kvasir.decoding.multi_round`). Whether such a node is in the tree depends on the draws before it and never on its own
token, which would bend the distribution.

Legend: R rows, V vocabulary, C children of a node.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch

from kvasir.kernels.noise import gumbel
from kvasir.speculation import heads
from kvasir.speculation.drafter import Ask
from kvasir.speculation.tree import DraftTree
from kvasir.types import Sequence

# Chances of a rank that the fixed tree is built from: shares of accepted first children, second children and so on,
# of nano's trees for base at T = 0.
RANKS = (0.8, 0.05, 0.02, 0.01, 0.006, 0.005, 0.004, 0.003)
TRUST = 0.7  # estimate of a drawn first child, which may not depend on its token; the controller learns the real rate


class Expands(Protocol):
    """The part of `drafter.ChainModel` that grows trees."""

    def expand(self, asks: Many[Ask], trees: Many[DraftTree], first: Many[int]) -> list[torch.Tensor | None]: ...


@dataclass(frozen=True, slots=True)
class Growth:
    """Rules of growth. ``width``: most children of a node; ``depth``: most levels; ``threshold``: chance of a path
    below which it is not followed, where trees have no fixed shape."""

    kind: Literal["dyspec", "fixed"]
    width: int
    depth: int
    threshold: float

    def grow(self, model: Expands, asks: Many[Ask], streams: Streams | None = None) -> list[Grown]:
        """Return a tree for each ask; an empty one where the model has no place for it.

        ``streams`` gives the noise of drawn trees; None: all children are coupled."""
        grown = [Grown(ask, streams is not None and hot(ask.seq)) for ask in asks]
        for level in range(self.depth):
            going = [g for g in grown if g.goes_on(level)]
            if not going:
                break
            found = model.expand([g.ask for g in going], [g.tree for g in going], [g.first for g in going])
            there = [(g, rows_RV) for g, rows_RV in zip(going, found) if rows_RV is not None]
            for g in going:
                g.stopped = True
            if there:
                self._level(there, level, streams)
        return grown

    def _level(self, there: list[tuple[Grown, torch.Tensor]], level: int, streams: Streams | None) -> None:
        """Add a level to each tree: its nodes follow the rows [R, V] of log-weights, of the last level's nodes."""
        log_RV = torch.cat([rows_RV for _, rows_RV in there]).float()
        owners = [g for g, rows_RV in there for _ in rows_RV]
        noisy = np.array([hot(g.ask.seq) for g in owners])
        weight_RV = log_RV
        if noisy.any():
            stream, position = [], []
            for g, rows_RV in there:
                start = len(g.ask.seq.tokens) - 1
                for i in range(len(rows_RV)):
                    stream.append(streams(g.ask.seq, g.first + i) if g.drawn else g.ask.seq.stream)
                    position.append(start if g.drawn else start + level)
            keys = heads.send(np.array(stream, np.uint64).view(np.int64), log_RV.device)
            noise_RV = gumbel(keys, heads.send(np.array(position, np.int64), log_RV.device), log_RV.shape[1])
            weight_RV = torch.where(heads.send(noisy, log_RV.device)[:, None], log_RV + noise_RV, log_RV)
        best_RC, id_RC = weight_RV.topk(min(self.width, log_RV.shape[1]), -1)
        chance_RC = (best_RC - weight_RV.logsumexp(-1, keepdim=True)).exp()
        q_RC = (log_RV.gather(1, id_RC) - log_RV.logsumexp(-1, keepdim=True)).exp()
        chance, q, ids = torch.stack([chance_RC, q_RC, id_RC.float()]).cpu().tolist()  # ids below 2^24 are exact
        at = 0
        for g, rows_RV in there:
            own = slice(at, at + len(rows_RV))
            at += len(rows_RV)
            if g.drawn:
                g.weights.append(rows_RV)
                self._draw(g, ids[own], q[own])
            else:
                self._couple(g, ids[own], chance[own])

    def _couple(self, g: Grown, ids: list[list[float]], chances: list[list[float]]) -> None:
        """Add the children whose path is likely enough, and keep the most valuable nodes that may be proposed."""
        tree, values, first = g.tree, g.values, len(g.tree)
        for i, (row, estimates) in enumerate(zip(ids, chances)):
            parent = g.first + i
            above = values[parent] if parent >= 0 else 1.0
            for rank, (token, est) in enumerate(zip(row, estimates)):
                value = above * (est if self.kind == "dyspec" else RANKS[min(rank, len(RANKS) - 1)])
                if value >= (self.threshold if self.kind == "dyspec" else 0.0) and est > 0.0:  # false for NaN, too
                    tree.add(parent, int(token), est)
                    values.append(value)
        if len(tree) > g.ask.max_nodes:
            kept = sorted(sorted(range(len(tree)), key=lambda n: (-values[n], n))[: g.ask.max_nodes])
            first = sum(1 for n in kept if n < first)
            g.tree, g.values = _subtree(tree, kept), [values[n] for n in kept]
        g.first, g.stopped = first, first == len(g.tree)

    def _draw(self, g: Grown, ids: list[list[float]], q: list[list[float]]) -> None:
        """Add drawn children, the next one while what is left of its parent's chance allows it."""
        tree, values, first = g.tree, g.values, len(g.tree)
        rows = range(len(ids))
        for i in sorted(rows, key=lambda i: -values[g.first + i]) if g.first >= 0 else rows:
            parent = g.first + i
            above, left = values[parent] if parent >= 0 else 1.0, 1.0
            for token, chance in zip(ids[i], q[i]):
                if len(tree) == g.ask.max_nodes or not above * left >= self.threshold or not left > 1e-6:
                    break
                if not chance > 0.0:  # nothing else can be drawn
                    break
                tree.add(parent, int(token), TRUST * left)
                values.append(above * chance)
                left -= chance
        g.first, g.stopped = first, first == len(tree) or len(tree) == g.ask.max_nodes


class Streams(Protocol):
    """The noise stream that the children of a node are drawn with (-1: the anchor's)."""

    def __call__(self, seq: Sequence, node: int) -> int: ...


class Grown:
    """A tree in growth. ``values``: by node, the chance of its path; ``first``: the first node of the last level;
    ``weights``: log-weights [R, V] of the anchor and then of each node that was expanded, for drawn trees."""

    __slots__ = ("ask", "drawn", "first", "stopped", "tree", "values", "weights")

    def __init__(self, ask: Ask, drawn: bool) -> None:
        self.ask, self.drawn = ask, drawn
        self.tree = DraftTree()
        self.values: list[float] = []
        self.weights: list[torch.Tensor] = []
        self.first, self.stopped = -1, False

    def goes_on(self, level: int) -> bool:
        return not self.stopped and level < self.ask.max_depth and self.ask.max_nodes > 0


def hot(seq: Sequence) -> bool:
    """Whether the sequence draws with noise."""
    return heads.hot([seq])


def _subtree(tree: DraftTree, nodes: list[int]) -> DraftTree:
    """Return the tree of ``nodes``, in their order. A node's parent is among them, for its path is likelier."""
    found, places = DraftTree(), {-1: -1}
    for node in nodes:
        places[node] = found.add(places[tree.parents[node]], tree.tokens[node], tree.est[node])
    return found
