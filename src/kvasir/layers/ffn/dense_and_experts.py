"""A dense block and experts side by side, each with norms of its own, as in Gemma 4.

The experts' branch and the router read the residual stream itself, not what the norm before the block makes of it.

Legend: T rows, E model dim, K experts per row.
"""

from __future__ import annotations

import torch

from kvasir.layers.ffn.dense import FFN as Dense
from kvasir.layers.ffn.moe import FFN as Experts
from kvasir.layers.norm import RMSNorm
from kvasir.layers.spec import DenseAndExpertsSpec
from kvasir.layers.weights import Placement, Slot
from kvasir.types import StepBatch


class FFN:
    """norm(dense(norm(h))) + norm(experts(norm(h)))."""

    native = False  # no C kernel chooses experts
    static = False  # which experts run is read by the host
    fuses = True  # ``forward`` takes the norm before it
    reads_stream = True

    def __init__(self, spec: DenseAndExpertsSpec, hidden_size: int, place: Placement) -> None:
        self.dense = Dense(spec.dense, hidden_size, place)
        self.experts = Experts(spec.experts, hidden_size, place)
        self.norms = {
            name: RMSNorm(hidden_size, spec.norm, place)
            for name in ("dense_post_norm", "experts_norm", "experts_post_norm", "router_norm")
        }
        self.router_scale = hidden_size**-0.5

    def forward(self, h_TE: torch.Tensor, norm: RMSNorm | None = None, batch: StepBatch | None = None) -> torch.Tensor:
        """The block of the stream's rows [T, E], which stay as they are; ``norm`` is that of the dense part."""
        dense_TE = self.norms["dense_post_norm"](self.dense.forward(h_TE, norm, batch=batch))
        routed = self.experts.route(self.norms["router_norm"](h_TE).mul_(self.router_scale))
        experts_TE = self.experts.forward(self.norms["experts_norm"](h_TE), routed=routed)
        return self.norms["experts_post_norm"](experts_TE).add_(dense_TE)

    def slots(self) -> dict[str, Slot]:
        found = self.dense.slots() | self.experts.slots()
        for name, norm in self.norms.items():
            found |= {f"{name}.{leaf}": slot for leaf, slot in norm.slots().items()}
        return found
