"""The loss of packed traces: KL(p || q) along committed text, and along rejected branches with a weight of its own.

The mean over committed guesses plus ``lam`` times the mean over rejected ones, each guess weighted by 0.8 to the power
of its level (Aurora, arXiv 2602.06932, whose released code has the first part alone).

Legend: R committed rows, A all rows, M guesses of a level, D levels, E model dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvasir.learn import losses
from kvasir.learn.base import Base
from kvasir.learn.packed import Packed
from kvasir.speculation.head import Head

ROWS = 256  # guesses that have logits at a time


@dataclass(frozen=True, slots=True)
class Found:
    """``pull``: a number whose gradient is the loss's; ``loss``: the loss; ``by_level`` [D]: mean nats along committed
    text; ``counts`` [D]: guesses they are the mean of. All are on the device."""

    pull: torch.Tensor
    loss: torch.Tensor
    by_level: torch.Tensor
    counts: list[int]


def branch_loss(head: Head, base: Base, packed: Packed, lam: float, num_rows: int = ROWS) -> Found:
    """The loss of all guesses of ``packed``; of those along rejected branches times ``lam``. Raises ValueError where no
    guess is judged."""
    states = packed.states.to(base.device, non_blocking=True)
    normed = base.normed(states[:, -1])
    committed = torch.from_numpy(packed.committed).to(base.device)
    rejected = [level.rejected[level.judge >= 0] for level in packed.levels]
    num_rejected = sum(int(x.sum()) for x in rejected)
    num_committed = sum(map(len, rejected)) - num_rejected
    if not num_committed:
        raise ValueError("nothing to learn from: no guess can be judged")
    guesses = head.unroll_paths(
        packed.read_by(head, states[committed]),
        normed[committed],
        torch.from_numpy(packed.positions).to(base.device),
        int(packed.positions.max()) + len(packed.levels) + 1,
        packed.to_levels(base),
    )
    pull, loss, means = states.new_zeros((), dtype=torch.float32), states.new_zeros((), dtype=torch.float32), []
    with base.autocast():
        for level, guess_ME, branch, discount in zip(
            packed.levels, guesses, rejected, losses.weights(len(packed.levels), torch.device("cpu")).tolist()
        ):
            judged = np.flatnonzero(level.judge >= 0)
            guess = guess_ME[torch.from_numpy(judged).to(base.device)]
            wanted = normed[torch.from_numpy(level.judge[judged]).to(base.device)]
            nats, gradient = losses.pulled(base.logits, guess, wanted, num_rows)
            shares = np.where(branch, lam / max(1, num_rejected), 1 / num_committed) * discount
            weight = torch.from_numpy(shares.astype(np.float32)).to(base.device)
            pull = pull + (guess.float() * gradient.float() * weight[:, None]).sum()
            loss = loss + (nats * weight).sum()
            kept = torch.from_numpy((~branch).astype(np.float32)).to(base.device)
            means.append(losses.weighted_mean(nats, kept))
    return Found(pull, loss, torch.stack(means), [int((~branch).sum()) for branch in rejected])
