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
from kvasir.learn.packed import Packed, evened, place
from kvasir.speculation.head import Head

ROWS = 256  # guesses that have logits at a time
MULTIPLE = 64  # of numbers of rows and guesses on a GPU, see `evened`


@dataclass(frozen=True, slots=True)
class Found:
    """``pull``: a number whose gradient is the loss's; ``loss``: the loss; ``nats`` [D]: sums by level along committed
    text, all three on the device; ``counts`` [D]: guesses in these sums."""

    pull: torch.Tensor
    loss: torch.Tensor
    nats: torch.Tensor
    counts: list[int]


def branch_loss(
    head: Head, base: Base, packed: Packed, lam: float, num_rows: int = ROWS, multiple: int | None = None
) -> Found:
    """The loss of all guesses of ``packed``; of those along rejected branches times ``lam``. Nothing waits for the
    device. ``multiple``: of rows and guesses that are computed (None: as the device likes it). Raises ValueError where
    no guess is judged."""
    if multiple is None:
        multiple = MULTIPLE if base.device.type == "cuda" else 1
    judged = [np.flatnonzero(level.judge >= 0) for level in packed.levels]
    rejected = [level.rejected[places] for level, places in zip(packed.levels, judged)]
    num_rejected = sum(int(x.sum()) for x in rejected)
    num_committed = sum(map(len, rejected)) - num_rejected
    if not num_committed:
        raise ValueError("nothing to learn from: no guess can be judged")
    discounts = losses.weights(len(packed.levels), torch.device("cpu")).tolist()
    further: list[np.ndarray] = []
    for level, places, branch, discount in zip(packed.levels, judged, rejected, discounts):
        shares = np.where(branch, lam / max(1, num_rejected), 1 / num_committed) * discount
        columns = places, level.judge[places], shares.astype(np.float32), (~branch).astype(np.float32)
        # Zeros behind them: guess 0, with no share in anything.
        further += [np.pad(column, (0, -len(places) % multiple)) for column in columns]
    placed = place(evened(packed, multiple), base.device, further)
    normed = base.normed(placed.states[:, -1])
    pull, loss = normed.new_zeros((), dtype=torch.float32), normed.new_zeros((), dtype=torch.float32)
    sums = []
    with base.autocast():
        for j, guess_ME in enumerate(placed.unroll(head, base, normed)):
            places, judge, share, kept = placed.further[4 * j : 4 * j + 4]
            guess = guess_ME[places]
            nats, gradient = losses.pulled(base.logits, guess, normed[judge], num_rows)
            pull = pull + (guess.float() * gradient.float() * share[:, None]).sum()
            loss = loss + (nats * share).sum()
            sums.append((nats * kept).sum())
    return Found(pull, loss, torch.stack(sums), [int((~branch).sum()) for branch in rejected])
