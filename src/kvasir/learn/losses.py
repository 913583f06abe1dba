"""Losses of drafters: the divergence of guesses from the distribution of the served model, in nats.

The offline trainer (`kvasir_lab.drafters`) and the online one (`kvasir.learn.learner`) share it.

Legend: M guesses, D depths, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

DISCOUNT = 0.8  # weight of a guess relative to the one a token earlier, as in Medusa and EAGLE-3


@dataclass(frozen=True, slots=True)
class Target:
    """Distributions [M, V] that guesses should have, in fp32, and their negative entropies [M]."""

    p_MV: torch.Tensor
    negative_entropy_M: torch.Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, logits_MV: torch.Tensor) -> Target:
        """The distributions that the served model draws from at temperature 1."""
        log_p = logits_MV.log_softmax(-1)
        p = log_p.exp()
        return cls(p, (p * log_p).sum(-1))

    def divergence(self, logits_MV: torch.Tensor) -> torch.Tensor:
        """KL(p || q) [M] in nats of the guesses with these logits."""
        log_q = logits_MV.log_softmax(-1)
        return self.negative_entropy_M - (self.p_MV * log_q).sum(-1)


def weights(depths: int, device: torch.device) -> torch.Tensor:
    """Weights [D] of the losses by depth, from 1 down."""
    return DISCOUNT ** torch.arange(depths, device=device)


def weighted_mean(nats_M: torch.Tensor, weight_M: torch.Tensor) -> torch.Tensor:
    """The mean where the weights are not 0; 0 where all are."""
    return (nats_M * weight_M).sum() / weight_M.sum().clamp(min=1)


def discounted(nats_D: torch.Tensor) -> torch.Tensor:
    """The sum of mean losses by depth, each weighted by its depth."""
    return (nats_D * weights(len(nats_D), nats_D.device)).sum()


def pulled(
    logits: Callable[[torch.Tensor], torch.Tensor], guesses_ME: torch.Tensor, wanted_ME: torch.Tensor, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(p || q) [M] of guesses without a gradient, and the gradient [M, E] of its sum.

    ``logits`` makes them of normed states: of the guesses, and of those of the served model. At most ``num_rows`` rows
    have logits at a time, so that memory does not grow with guesses times vocabulary.
    """
    nats, gradients = [], []
    for guess, wanted in zip(guesses_ME.detach().split(num_rows), wanted_ME.split(num_rows)):
        guess.requires_grad_()
        with torch.enable_grad():
            found = Target.of(logits(wanted)).divergence(logits(guess))
        gradients.append(torch.autograd.grad(found.sum(), guess)[0])
        nats.append(found.detach())
    return torch.cat(nats), torch.cat(gradients)
