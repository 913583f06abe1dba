"""Mixture of experts: the kernels of ``kernels.moe`` on a GPU, else one dense block after the other over rows sorted by
expert.

Both add a row's contributions in the order of its own top-k, never in the order the experts ran, so that its bits do
not depend on the rest of the batch.

Legend: T rows, E model dim, F width of an expert, X experts, K experts per row.
"""

from __future__ import annotations

import torch

from kvasir.kernels._triton import use_triton
from kvasir.kernels.activation import ACTIVATIONS, gated
from kvasir.kernels.moe import moe_row_triton, moe_triton
from kvasir.layers.linear import Linear, linear, matrix
from kvasir.layers.norm import RMSNorm
from kvasir.layers.spec import MoESpec
from kvasir.layers.weights import Placement, Slot
from kvasir.types import StepBatch


class FFN:
    """A router and its experts."""

    native = False  # no C kernel chooses experts
    static = False  # which experts run is read by the host

    def __init__(self, spec: MoESpec, hidden_size: int, place: Placement) -> None:
        self.spec = spec
        self.exact = place.exact
        # Whether ``forward`` takes the norm before it and the residual add after it.
        self.fuses = place.fused and not place.exact
        self.activation = ACTIVATIONS[spec.activation]
        self.router = Linear(hidden_size, {"router": spec.num_experts}, bias=False, place=place)
        self.gate_up_XFE = matrix(spec.num_experts, 2 * spec.intermediate_size, hidden_size, place=place)
        self.arrived = torch.zeros(1, dtype=torch.int32, device=place.device)
        self.down_XEF = matrix(spec.num_experts, hidden_size, spec.intermediate_size, place=place)

    def route(self, x_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [T, K] in x's dtype (largest first) and expert ids [T, K] int64."""
        weights_TK, ids_TK = self.router(x_TE).softmax(-1, dtype=torch.float32).topk(self.spec.top_k, -1)
        if self.spec.renormalize:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return weights_TK.to(x_TE.dtype), ids_TK

    def forward(
        self,
        x_TE: torch.Tensor,
        norm: RMSNorm | None = None,
        residual_TE: torch.Tensor | None = None,
        batch: StepBatch | None = None,
    ) -> torch.Tensor:
        """The block of x, or of ``norm``(x): [T, E]. ``residual_TE`` is added, and its memory may be used for the
        result. Experts have no variants: adapters of them are refused when they are read."""
        spec, kernels = self.spec, use_triton(x_TE)
        if kernels and x_TE.shape[0] == 1 and not self.exact:
            return moe_row_triton(
                x_TE,
                self.router.weight_NK,
                self.gate_up_XFE,
                self.down_XEF,
                spec.top_k,
                spec.renormalize,
                self.arrived,
                spec.activation,
                norm=None if norm is None else norm.parameters,
                residual_1E=residual_TE,
            )
        if norm is not None:
            x_TE = norm(x_TE)
        if kernels:
            return moe_triton(
                x_TE,
                self.router(x_TE),
                self.gate_up_XFE,
                self.down_XEF,
                spec.top_k,
                spec.renormalize,
                spec.activation,
                fixed=self.exact,
                residual_TE=residual_TE,
            )
        out_TE = self._forward_plain(x_TE)
        return out_TE if residual_TE is None else out_TE.add_(residual_TE)

    def _forward_plain(self, x_TE: torch.Tensor) -> torch.Tensor:
        """One expert after the other, in plain torch. The host reads back how many rows each expert has."""
        top_k = self.spec.top_k
        weights_TK, ids_TK = self.route(x_TE)
        order = ids_TK.flatten().argsort(stable=True)  # (row, choice) pairs, grouped by expert
        counts = ids_TK.flatten().bincount(minlength=self.spec.num_experts).tolist()
        sorted_rows = x_TE[order // top_k]
        out_sorted = torch.empty_like(sorted_rows)
        at = 0
        for expert, count in enumerate(counts):
            if count:
                rows = slice(at, at + count)
                inner = gated(
                    linear(sorted_rows[rows], self.gate_up_XFE[expert], exact=self.exact), self.activation, self.exact
                )
                out_sorted[rows] = linear(inner, self.down_XEF[expert], exact=self.exact)
                at += count
        out_TKE = torch.empty_like(out_sorted).index_copy_(0, order, out_sorted).view(*ids_TK.shape, x_TE.shape[-1])
        out_TE = out_TKE[:, 0] * weights_TK[:, :1]
        for k in range(1, top_k):
            out_TE += out_TKE[:, k] * weights_TK[:, k : k + 1]
        return out_TE

    def slots(self) -> dict[str, Slot]:
        found = self.router.slots()
        for expert, (gate_up, down) in enumerate(zip(self.gate_up_XFE, self.down_XEF)):
            gate, up = gate_up.chunk(2)
            found |= {
                f"experts.{expert}.gate.weight": Slot(gate),
                f"experts.{expert}.up.weight": Slot(up),
                f"experts.{expert}.down.weight": Slot(down),
            }
        return found
