"""Typical acceptance (Medusa, arXiv 2401.10774): a draft is accepted if the model finds it likely enough. Lossy.

A candidate x below a row with the model's distribution p is accepted if

    p(x) > min(eps, sqrt(eps) exp(-H(p)))

with H the entropy of p. The longest path of accepted candidates is emitted, the likelier of two equally long ones, and
after it a token that is drawn from the model as ever. Neither the seed's tokens nor the distribution is kept: where a
candidate passes, it is emitted however likely others are. Greedy sequences are verified by the walk.

Legend: B spans, S sampled rows, R rows of a span (the anchor's, then one a candidate), V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from kvasir.decoding.max_accept import Block, Typical


def accept(found: list[Block], rows: np.ndarray, final_SV: torch.Tensor, tokens_S: torch.Tensor) -> None:
    """Replace the draws of the rows that lead to each span's best path by the path's tokens; the walk then follows it.

    ``rows``: for each span, the index of its first row in ``final_SV`` (processed log-weights) and ``tokens_S``; its
    other rows follow. Does not wait for the device."""
    device, most = final_SV.device, 1 + max(len(block.drafts) for block in found)
    table = np.zeros((5, len(found), most), np.int64)  # parent's row, token, depth, whether there is a candidate, row
    eps = np.zeros((len(found), 1), np.float32)
    for b, (block, first) in enumerate(zip(found, rows)):
        parents = [0, *(block.parents or range(len(block.drafts)))]
        count = len(parents)
        table[0, b, :count], table[1, b, 1:count], table[3, b, 1:count] = parents, block.drafts, 1
        for row in range(1, count):
            table[2, b, row] = table[2, b, parents[row]] + 1
        table[4, b] = first + np.minimum(np.arange(most), count - 1)
        assert isinstance(block.weights, Typical)
        eps[b] = block.weights.eps
    deepest = int(table[2].max())
    parent_BR, token_BR, depth_BR, there_BR, at_BR = torch.from_numpy(table).to(device)
    above_BR = at_BR.gather(1, parent_BR)
    log_p_BRV = final_SV.log_softmax(-1)[above_BR]
    chance_BR = log_p_BRV.gather(2, token_BR[..., None])[..., 0].exp()
    passes_BR = (chance_BR > threshold(log_p_BRV, torch.from_numpy(eps).to(device))) & (there_BR > 0)
    passes_BR[:, 0] = True
    path_BR = torch.where(there_BR > 0, chance_BR, 1.0)
    for _ in range(deepest):  # a path is accepted if all of it is
        passes_BR = passes_BR & passes_BR.gather(1, parent_BR)
    product_BR = path_BR
    up_BR = parent_BR
    for _ in range(deepest):
        product_BR = product_BR * path_BR.gather(1, up_BR)
        up_BR = parent_BR.gather(1, up_BR)
    # Deeper is better, and among the deepest the likeliest path.
    best_B1 = torch.where(passes_BR, depth_BR.double() + product_BR.double(), -1.0).argmax(1, keepdim=True)
    for _ in range(deepest):
        target_B1 = above_BR.gather(1, best_B1)
        token_B1 = torch.where(best_B1 > 0, token_BR.gather(1, best_B1), tokens_S[target_B1])
        tokens_S[target_B1] = token_B1
        best_B1 = parent_BR.gather(1, best_B1)


def threshold(log_p: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """min(eps, sqrt(eps) exp(-H)) of distributions [.., V], with ``eps`` broadcast over the leading dimensions."""
    entropy = -(log_p.exp() * log_p.clamp(min=-1e4)).sum(-1)
    return torch.minimum(eps.expand_as(entropy), eps.sqrt() * (-entropy).exp())
