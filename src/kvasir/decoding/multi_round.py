"""Multi-round rejection: verify a tree whose nodes were drawn without replacement. It keeps the model's distribution,
not its tokens.

SpecInfer (arXiv 2305.09781), without replacement as in arXiv 2402.14160, which DySpec's trees are made for
(arXiv 2410.11744). At a node whose children x_1, x_2, .. were drawn from q in this order, with the model's p:

    accept x_i with min(1, p(x_i) / q(x_i)); else p = norm(max(p - q, 0)), q(x_i) = 0, q = norm(q), and try x_(i + 1)

If no child is accepted, the token is drawn from the last p. From an accepted child it goes on in the same way. Whether
a child was proposed may depend on the draws before it, and never on its own token.

SpecTr's K-SEQ (arXiv 2310.15141) is not built here: on no load do its independent drafts accept more than coupled ones,
and cutting its trees to a budget depends on the drafts (``tests/decoding/many_drafts.py`` has it as a reference).

Legend: B trees, R rows of a tree (the anchor's, then one a node), C children of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

import numpy as np
import torch

from kvasir.decoding import max_accept, typical
from kvasir.decoding.max_accept import DRAWN, Block, DrawnTree, Typical, coins, fresh_stream
from kvasir.kernels.noise import gumbel
from kvasir.speculation.tree import DraftTree
from kvasir.types import Sequence


def drawing_stream(seq: Sequence, node: int) -> int:
    """The noise stream from which the children of a node are drawn (-1: the anchor's): siblings are drawn together, and
    nothing else shares their noise."""
    return fresh_stream(seq, len(seq.tokens) - 1, b"tree" + (node + 1).to_bytes(2, "little"))


def keep_drawn(seq: Sequence, tree: DraftTree, weights: Many[torch.Tensor]) -> None:
    """Leave for the verification what the tree's nodes were drawn from: log-weights [.., V] of the anchor's row and of
    each node that was expanded, in order."""
    position = len(seq.tokens) - 1 if tree.tokens else -1
    kept = DrawnTree(list(tree.tokens), list(tree.parents), torch.cat(list(weights))) if tree.tokens else None
    seq.state[DRAWN] = position, kept


def accept(found: list[Block], rows: np.ndarray, final_SV: torch.Tensor, tokens_S: torch.Tensor) -> None:
    """Replace the draws of blocks, drawn trees and what is accepted as typical by what they emit; the walk then follows
    it. See `max_accept.accept`."""
    rules: dict[type, Callable[..., None]] = {DrawnTree: accept_trees, Typical: typical.accept}
    by_rule: dict[Callable[..., None], list[int]] = {}
    for i, block in enumerate(found):
        by_rule.setdefault(rules.get(type(block.weights), max_accept.accept), []).append(i)
    for rule, chosen in by_rule.items():
        rule([found[i] for i in chosen], np.asarray(rows)[chosen], final_SV, tokens_S)


class _Tree:
    """A block's tree on the host. ``below``: by row, its children's rows in the order of their draws; ``tried``: how
    many of them are verified; ``source``: by row, the row of the weights that its children were drawn from, or 0."""

    def __init__(self, block: Block) -> None:
        drawn, tokens = block.weights, [-1, *block.drafts]
        parents = [-1, *(block.parents or range(len(block.drafts)))]
        rows = {(parents[row], tokens[row]): row for row in range(1, len(tokens))}
        self.tokens = tokens
        self.below: list[list[int]] = [[] for _ in tokens]
        for row in range(1, len(tokens)):
            self.below[parents[row]].append(row)
        self.source, self.tried = [0] * len(tokens), [0] * len(tokens)
        place = {-1: 0}  # row of the step by node of the drawn tree, as far as the step has it
        missing: set[int] = set()  # nodes below which a draw is missing: what was drawn after it is not verified
        order: list[list[int]] = [[] for _ in tokens]
        for node, (token, parent) in enumerate(zip(drawn.tokens, drawn.parents)):
            row = rows.get((place[parent], token)) if parent in place else None
            if row is None or parent in missing:
                missing.add(parent)
            else:
                place[node] = row
                order[place[parent]].append(row)
                self.source[place[parent]] = parent + 1
        for row, verified in enumerate(order):
            self.tried[row] = len(verified)
            self.below[row] = verified + [other for other in self.below[row] if other not in verified]


def accept_trees(found: list[Block], rows: np.ndarray, final_SV: torch.Tensor, tokens_S: torch.Tensor) -> None:
    """Walk down all trees together, level by level, without waiting for the device."""
    device, size, trees = final_SV.device, final_SV.shape[1], [_Tree(block) for block in found]
    most_rows = max(len(tree.tokens) for tree in trees)
    width = max(len(below) for tree in trees for below in tree.below)
    table = np.zeros((4, len(trees), most_rows, max(1, width)), np.int64)  # child's row, its token, verified, weights
    uniform = np.ones((len(trees), most_rows))
    depth, at = 0, 0
    for b, (tree, block) in enumerate(zip(trees, found)):
        uniform[b, : len(tree.tokens)] = coins(block.seq, block.position, len(tree.tokens))
        level = [0] * len(tree.tokens)
        for row, below in enumerate(tree.below):
            table[3, b, row] = at + tree.source[row]
            for c, child in enumerate(below):
                table[:3, b, row, c] = child, tree.tokens[child], c < tree.tried[row]
                level[child] = level[row] + 1
        depth = max(depth, *level)
        at += len(block.weights.weights)
    weights_WV = torch.cat([block.weights.weights for block in found])
    table_BRC, u_BR, first_B = (torch.from_numpy(np.ascontiguousarray(x)).to(device) for x in (table, uniform, rows))
    streams_B, position_B = (
        torch.from_numpy(x).to(device)
        for x in (
            np.array([fresh_stream(b.seq, b.position, b"rest") for b in found], np.uint64).view(np.int64),
            np.array([b.position for b in found]),
        )
    )
    every = torch.arange(len(trees), device=device)
    row_B, alive_B = torch.zeros_like(every), torch.ones_like(every, dtype=torch.bool)
    for level in range(depth + 1):
        child_BC, token_BC, verified_BC, source_BC = table_BRC[:, every, row_B]
        p_BV = final_SV[first_B + row_B].softmax(-1)
        q_BV = weights_WV[source_BC[:, 0]].float().softmax(-1)
        next_B, taken_B = torch.zeros_like(row_B), torch.zeros_like(alive_B)
        for c in range(width):
            x_B1, tries_B = token_BC[:, c, None], (verified_BC[:, c] > 0) & ~taken_B
            chance_B = (p_BV.gather(1, x_B1) / q_BV.gather(1, x_B1))[:, 0]
            right_B = tries_B & (u_BR[every, child_BC[:, c]] < chance_B)
            next_B = torch.where(right_B, x_B1[:, 0], next_B)
            taken_B = taken_B | right_B
            wrong_B1 = (tries_B & ~right_B)[:, None]
            p_BV = torch.where(wrong_B1, rest(p_BV, q_BV), p_BV)
            q_BV = torch.where(wrong_B1, without(q_BV, x_B1), q_BV)
        noise_BV = gumbel(streams_B, position_B + level, size)  # one draw of a level and no more
        token_B = torch.where(taken_B, next_B, (p_BV.log() + noise_BV).argmax(-1))
        at_B = first_B + row_B
        tokens_S[at_B] = torch.where(alive_B, token_B, tokens_S[at_B])
        same_BC = (token_BC == token_B[:, None]) & (child_BC > 0)
        alive_B = alive_B & same_BC.any(1)
        row_B = torch.where(alive_B, (child_BC * same_BC).amax(1), row_B)


def rest(p_BV: torch.Tensor, q_BV: torch.Tensor) -> torch.Tensor:
    """Return what p has in excess of q, as distributions; p where that is nothing up to rounding."""
    over_BV = (p_BV - q_BV).clamp(min=0.0)
    sum_B1 = over_BV.sum(-1, keepdim=True)
    return torch.where(sum_B1 > 0, over_BV / sum_B1, p_BV)


def without(q_BV: torch.Tensor, x_B1: torch.Tensor) -> torch.Tensor:
    """Distributions q, each without one token."""
    left_BV = q_BV.scatter(1, x_B1, 0.0)
    return left_BV / left_BV.sum(-1, keepdim=True).clamp(min=1e-38)
