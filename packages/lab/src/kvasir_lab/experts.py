"""Experts of the lab's model: a router picks a few small feed-forward blocks for each token, as in Qwen3 MoE.

They are for studies of methods that act on experts, at the size of the lab. Training computes every expert for every
token, as one wide block whose parts are weighted: the models are small, and this needs no kernel of its own.

Shape suffixes: T tokens, E model dim, F width of an expert, X experts, K experts per token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

BALANCE = 0.01  # factor of the load-balancing loss, as in Switch Transformer (arXiv:2101.03961)


class _Balanced(torch.autograd.Function):
    """The probabilities [T, X] unchanged. Backward adds the gradient of BALANCE * X * sum(share of choices * mean
    probability), the load-balancing loss."""

    @staticmethod
    def forward(ctx: Any, probabilities_TX: torch.Tensor, chosen_TX: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(chosen_TX.mean(0) / chosen_TX.sum(-1).mean())
        return probabilities_TX.view_as(probabilities_TX)

    @staticmethod
    def backward(ctx: Any, gradient_TX: torch.Tensor) -> tuple[torch.Tensor, None]:
        (shares_X,) = ctx.saved_tensors
        return gradient_TX + BALANCE * len(shares_X) / len(gradient_TX) * shares_X, None


class Experts(nn.Module):
    """A router and ``count`` experts of width ``ffn``, of which each token uses ``top_k``; their weights sum to one.

    ``block``: the class of one expert.
    """

    def __init__(self, dim: int, count: int, top_k: int, block: Any) -> None:
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(dim, count, bias=False)
        self.experts = nn.ModuleList(block() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat_TE = x.flatten(0, -2)
        probabilities_TX = self.gate(flat_TE).float().softmax(-1)
        ids_TK = probabilities_TX.topk(self.top_k, -1).indices
        chosen_TX = torch.zeros_like(probabilities_TX).scatter(1, ids_TK, 1.0)
        if self.training:
            probabilities_TX = _Balanced.apply(probabilities_TX, chosen_TX)
        weights_TX = probabilities_TX * chosen_TX
        weights_TX = weights_TX / weights_TX.sum(-1, keepdim=True)
        gate, up, down = (
            torch.cat([getattr(expert, name).weight for expert in self.experts], dim)
            for name, dim in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1))
        )
        inner = F.silu(F.linear(flat_TE, gate)) * F.linear(flat_TE, up)
        inner = inner.unflatten(-1, (len(self.experts), -1)) * weights_TX.to(inner.dtype).unsqueeze(-1)
        return F.linear(inner.flatten(1), down).view(x.shape)
