"""Linear probes and directions of many heads at once.

Legend: N states, L sites (heads of all layers), D their width, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Share of the variance that the directions may lie in.
KEPT = 0.95
STEPS, DECAY = 300, 1e-3


@dataclass(frozen=True, slots=True)
class Probes:
    """Probes of raw states, ``weights_LCD`` and ``biases_LC``, and their accuracy on held-out states, the mean over the
    classes, ``accuracy_L``."""

    weights_LCD: torch.Tensor
    biases_LC: torch.Tensor
    accuracy_L: torch.Tensor


def fit(states_NLD: torch.Tensor, labels_N: torch.Tensor, num_classes: int, held_N: torch.Tensor) -> Probes:
    """Fit one softmax probe a site, on the states that are not ``held_N``. Classes weigh the same, however rare. The
    work is that of STEPS steps of Adam over all sites together."""
    own_N, x = ~held_N, states_NLD.float()
    mean_LD, deviation_LD = x[own_N].mean(0), x[own_N].std(0).clamp(min=1e-6)
    x = (x - mean_LD) / deviation_LD
    counts_C = torch.bincount(labels_N[own_N], minlength=num_classes).clamp(min=1)
    weight_N = (1.0 / counts_C.float())[labels_N[own_N]] / num_classes
    sites, width = x.shape[1:]
    w = torch.zeros(sites, num_classes, width, device=x.device, requires_grad=True)
    b = torch.zeros(sites, num_classes, device=x.device, requires_grad=True)
    adam = torch.optim.Adam([w, b], lr=0.05)
    with torch.enable_grad():
        for _ in range(STEPS):
            adam.zero_grad()
            scores_NLC = torch.einsum("nld,lcd->nlc", x[own_N], w) + b
            picked_NL = scores_NLC.log_softmax(-1).gather(2, labels_N[own_N][:, None, None].expand(-1, sites, 1))[
                ..., 0
            ]
            loss = -(picked_NL * weight_N[:, None]).sum(0).sum() + DECAY * (w * w).sum()
            loss.backward()
            adam.step()
    with torch.no_grad():
        found_NL = (torch.einsum("nld,lcd->nlc", x[held_N], w) + b).argmax(-1)
        right_NL = found_NL == labels_N[held_N][:, None]
        classes = [c for c in range(num_classes) if (labels_N[held_N] == c).any()]
        accuracy = torch.stack([right_NL[labels_N[held_N] == c].float().mean(0) for c in classes]).mean(0)
        raw = w / deviation_LD[:, None]
        return Probes(raw, b - (raw * mean_LD[:, None]).sum(-1), accuracy)


def directions(states_NLD: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """The unit difference of the means of the states with label 1 and with 0 [L, D], within the principal components
    that hold ``KEPT`` of a site's variance."""
    x = states_NLD.float()
    difference_LD = x[labels_N == 1].mean(0) - x[labels_N == 0].mean(0)
    centred = (x - x.mean(0)).transpose(0, 1)
    values_LD, vectors_LDD = torch.linalg.eigh(centred.transpose(1, 2) @ centred)
    values_LD, vectors_LDD = values_LD.flip(1).clamp(min=0), vectors_LDD.flip(2)
    before_LD = values_LD.cumsum(1) - values_LD
    kept_LD = before_LD < KEPT * values_LD.sum(1, keepdim=True)
    along_LD = torch.einsum("ldk,ld->lk", vectors_LDD, difference_LD) * kept_LD
    inside_LD = torch.einsum("ldk,lk->ld", vectors_LDD, along_LD)
    return inside_LD / inside_LD.norm(dim=1, keepdim=True).clamp(min=1e-12)


def held_out(count: int, share: float = 0.25) -> torch.Tensor:
    """The states [N] bool that are held out: whole quarters of the traces would share their problems, so every fourth
    one is."""
    return torch.arange(count) % round(1 / share) == 0
