"""Mixture of experts: the kernels of ``kernels.moe`` on a GPU, else one dense block after the other over rows sorted by
expert.

Both add a row's contributions in the order of its own top-k, never in the order the experts ran, so that its bits do
not depend on the rest of the batch. With token rounding (``kernels.moe_rounding``), which is off by default, the
experts of a prompt's rows do depend on it.

Legend: T rows, E model dim, F width of an expert, X experts, K experts per row.
"""

from __future__ import annotations

import torch

from kvasir.kernels._triton import use_triton
from kvasir.kernels.activation import ACTIVATIONS, gated, sigmoid
from kvasir.kernels.moe import Experts, moe_row_triton, moe_triton
from kvasir.kernels.moe_rounding import round_reference
from kvasir.kernels.moe_routing import choose_reference, choose_sigmoid_triton
from kvasir.kernels.shared_expert import add_shared
from kvasir.layers.ffn.dense import FFN as Dense
from kvasir.layers.linear import Linear
from kvasir.layers.norm import RMSNorm
from kvasir.layers.rounded_rows import RoundedRows, rounded_rows
from kvasir.layers.spec import DenseSpec, MoESpec
from kvasir.layers.weight_format import Weight
from kvasir.layers.weights import Placement, Slot
from kvasir.types import StepBatch


class FFN:
    """A router and its experts, and perhaps an expert that every row uses."""

    native = False  # no C kernel chooses experts
    static = False  # which experts run is read by the host

    def __init__(self, spec: MoESpec, hidden_size: int, place: Placement) -> None:
        self.spec = spec
        self.exact = place.exact
        # Whether ``forward`` takes the norm before it and the residual add after it.
        self.fuses = place.fused and not place.exact
        self.activation = ACTIVATIONS[spec.activation]
        # Whether the kernels route. Sigmoids are close to each other where many are near 0 or 1: they need fp32.
        self.softmax = spec.by_softmax
        self.rounding = place.rounding
        # Rows of prompts from which a step is rounded; 0: none is.
        self.rounds_from = 0 if place.rounding is None else place.rounding.least_rows(spec.num_experts, spec.top_k)
        scores = place.plain(None if spec.scoring == "softmax" else torch.float32)
        self.router = Linear(hidden_size, {"router": spec.num_experts}, bias=spec.router_bias, place=scores)
        self.correction_X = None
        if spec.correction:
            self.correction_X = torch.empty(spec.num_experts, device=place.device, dtype=torch.float32)
        self.scale_X = None
        if spec.expert_scale:
            self.scale_X = torch.empty(spec.num_experts, device=place.device, dtype=torch.float32)
        widths = {"gate": spec.intermediate_size, "up": spec.intermediate_size}
        self.gate_up = Weight(widths, hidden_size, place, spec.num_experts)
        self.arrived = torch.zeros(1, dtype=torch.int32, device=place.device)
        self.down = Weight({"down": hidden_size}, spec.intermediate_size, place, spec.num_experts)
        self.biases = None
        if spec.bias:
            sizes = 2 * spec.intermediate_size, hidden_size
            first, second = (torch.empty(spec.num_experts, n, device=place.device, dtype=place.dtype) for n in sizes)
            self.biases = first, second
        self.shared = self.shared_gate = None
        if spec.shared_size:
            self.shared = Dense(DenseSpec(spec.shared_size, spec.activation), hidden_size, place.within("shared"))
        if spec.shared_gate:
            self.shared_gate = Linear(hidden_size, {"shared_gate": 1}, bias=False, place=place)

    def route(self, x_TE: torch.Tensor, logits_TX: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [T, K] fp32 and expert ids [T, K] int64, the best choice first. ``logits_TX``: the router's, if they
        are known."""
        spec = self.spec
        if logits_TX is None:
            logits_TX = self.router(x_TE.to(self.router.place.dtype))
        if spec.scoring == "sigmoid":
            scores_TX = sigmoid(logits_TX.float(), self.exact)
        else:
            scores_TX = logits_TX.softmax(-1, dtype=torch.float32)
        weights_TK, ids_TK = choose_reference(
            scores_TX,
            self.correction_X,
            spec.top_k,
            spec.renormalize,
            spec.weight_scale,
            spec.groups,
            spec.top_groups,
            spec.group_best,
        )
        return (weights_TK if self.scale_X is None else weights_TK * self.scale_X[ids_TK]), ids_TK

    def forward(
        self,
        x_TE: torch.Tensor,
        norm: RMSNorm | None = None,
        residual_TE: torch.Tensor | None = None,
        batch: StepBatch | None = None,
        routed: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """The block of x, or of ``norm``(x): [T, E]. ``residual_TE`` is added, and its memory may be used for the
        result. Experts have no variants: adapters of them are refused when they are read. ``routed``: what ``route``
        returned for other rows than x; None: x is routed."""
        spec, kernels = self.spec, use_triton(x_TE)
        alone = x_TE.shape[0] == 1 and routed is None
        if kernels and alone and not self.exact and self.softmax:
            if self.shared is not None:
                residual_TE = self._shared(x_TE, residual_TE, norm)
            return moe_row_triton(
                x_TE,
                self.router.weight.tensor,
                *self._experts(len(x_TE)),
                spec.top_k,
                spec.renormalize,
                self.arrived,
                spec.activation,
                norm=None if norm is None else norm.parameters,
                residual_1E=residual_TE,
                biases=self.biases,
                router_bias_X=self.router.bias_N,
            )
        if norm is not None:
            x_TE = norm(x_TE)
        if self.shared is not None:
            residual_TE = self._shared(x_TE, residual_TE)
        rounded = rounded_rows(batch, len(x_TE), self.rounds_from)
        if kernels:
            if self.softmax and routed is None:
                logits_TX, chosen = self.router(x_TE), None
            else:
                weights_TK, ids_TK = self._choose(x_TE) if routed is None else routed
                logits_TX, chosen = x_TE.new_empty(len(x_TE), spec.num_experts), (weights_TK, ids_TK.int())
            return moe_triton(
                x_TE,
                logits_TX,
                *self._experts(len(x_TE)),
                spec.top_k,
                spec.renormalize,
                spec.activation,
                fixed=self.exact,
                residual_TE=residual_TE,
                biases=self.biases,
                routed=chosen,
                rounding=None if rounded is None else self.rounding,
                fixed_T=None if rounded is None else rounded.fixed_T,
            )
        if rounded is None:
            out_TE = self._forward_plain(x_TE, *(self.route(x_TE) if routed is None else routed))
        else:
            out_TE = self._forward_rounded(x_TE, rounded)
        return out_TE if residual_TE is None else out_TE.add_(residual_TE)

    def _experts(self, rows: int) -> tuple[Experts, Experts]:
        """The experts' matrices as the kernels take them for so many rows."""
        pairs = rows * self.spec.top_k / self.spec.num_experts
        return self.gate_up.format.grouped(self.gate_up, pairs), self.down.format.grouped(self.down, pairs)

    def _choose(self, x_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Route as ``route`` does, with ids int32: by a kernel where one group of experts is scored by sigmoids."""
        spec = self.spec
        if spec.scoring == "sigmoid" and spec.groups == 1 and self.scale_X is None:
            logits_TX = self.router(x_TE.to(self.router.place.dtype))
            return choose_sigmoid_triton(logits_TX, self.correction_X, spec.top_k, spec.renormalize, spec.weight_scale)
        weights_TK, ids_TK = self.route(x_TE)
        return weights_TK, ids_TK.int()

    def _shared(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor | None, norm: RMSNorm | None = None
    ) -> torch.Tensor:
        """The sum of the residual, if there is one, and what the expert that every row uses makes of x, or of
        ``norm``(x): [T, E]. The residual's memory may be used for the result, except where x is the residual: other
        experts read it."""
        apart = residual_TE is None or residual_TE.data_ptr() != x_TE.data_ptr()
        if self.shared_gate is None and apart:
            return self.shared.forward(x_TE, norm, residual_TE)
        out_TE = self.shared.forward(x_TE, norm)
        if self.shared_gate is not None:
            gate = self.shared_gate.weight
            if use_triton(x_TE) and not self.exact and gate.is_matrix:
                return add_shared(x_TE, gate.tensor[0], out_TE, residual_TE, None if norm is None else norm.parameters)
            out_TE *= sigmoid(self.shared_gate(x_TE, norm), self.exact)
        return out_TE if residual_TE is None else out_TE.add_(residual_TE)

    def _forward_plain(self, x_TE: torch.Tensor, weights_TK: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        """One expert after the other, in plain torch. The host reads back how many rows each expert has."""
        top_k = self.spec.top_k
        weights_TK = weights_TK.to(x_TE.dtype)
        order = ids_TK.flatten().argsort(stable=True)  # (row, choice) pairs, grouped by expert
        counts = ids_TK.flatten().bincount(minlength=self.spec.num_experts).tolist()
        out_sorted = self._by_expert(x_TE[order // top_k], counts)
        out_TKE = torch.empty_like(out_sorted).index_copy_(0, order, out_sorted).view(*ids_TK.shape, x_TE.shape[-1])
        out_TE = out_TKE[:, 0] * weights_TK[:, :1]
        for k in range(1, top_k):
            out_TE += out_TKE[:, k] * weights_TK[:, k : k + 1]
        return out_TE

    def _forward_rounded(self, x_TE: torch.Tensor, rounded: RoundedRows) -> torch.Tensor:
        """The same after token rounding; a row's contributions are added by expert."""
        logits_TX = self.router(x_TE)
        routed = self.route(x_TE, logits_TX)
        kept_TX, weights_TX = round_reference(logits_TX, *routed, self.spec.renormalize, self.rounding, rounded.fixed_T)
        experts_P, rows_P = kept_TX.T.nonzero().unbind(1)
        out_PE = self._by_expert(x_TE[rows_P], kept_TX.sum(0).tolist())
        out_PE *= weights_TX[rows_P, experts_P].to(x_TE.dtype).unsqueeze(1)
        return torch.zeros_like(x_TE).index_add_(0, rows_P, out_PE)

    def _by_expert(self, sorted_PE: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Each expert's result of its rows, which follow each other in ``sorted_PE``: [P, E]."""
        out_PE = torch.empty_like(sorted_PE)
        at = 0
        for expert, count in enumerate(counts):
            if count:
                rows = slice(at, at + count)
                first, second = (None, None) if self.biases is None else (bias[expert] for bias in self.biases)
                gate_up = self.gate_up[expert](sorted_PE[rows], bias_N=first)
                inner = gated(gate_up, self.activation, self.exact)
                out_PE[rows] = self.down[expert](inner, bias_N=second)
                at += count
        return out_PE

    def slots(self) -> dict[str, Slot]:
        found = self.router.slots()
        if self.correction_X is not None:
            found["correction"] = Slot(self.correction_X)
        if self.scale_X is not None:
            found["expert_scale"] = Slot(self.scale_X)
        if self.shared is not None:
            found |= {f"shared.{name}": slot for name, slot in self.shared.slots().items()}
        if self.shared_gate is not None:
            found |= self.shared_gate.slots()
        for expert in range(self.spec.num_experts):
            parts = self.gate_up.slots(expert) | self.down.slots(expert)
            found |= {f"experts.{expert}.{name}": slot for name, slot in parts.items()}
        if self.biases is not None:
            for expert, (gate_up, down) in enumerate(zip(*self.biases)):
                gate, up = gate_up.chunk(2)
                found |= {
                    f"experts.{expert}.gate.bias": Slot(gate),
                    f"experts.{expert}.up.bias": Slot(up),
                    f"experts.{expert}.down.bias": Slot(down),
                }
        return found
