"""Kimi Delta Attention: projections, causal convolution, the delta rule with a decay for each channel, gated RMS norm.

Source: Kimi Team 2025, Kimi Linear (arXiv:2510.26692). The rule, its scan and their kernels are those of
`kvasir.kernels.gated_delta`, with a vector for the decay of a head.

Legend: T rows, E model dim, H heads, D dim of a key and of a value, J taps, X = 4 H D + H.
"""

from __future__ import annotations

import torch

from kvasir.kernels import gated_chunks
from kvasir.kernels.gated_delta import Weights, step
from kvasir.kernels.gated_norm import gated_norm
from kvasir.kv.state import StateCache
from kvasir.layers.linear import Linear
from kvasir.layers.norm import RMSNorm
from kvasir.layers.recurrence import RecurrentMixer, own_state
from kvasir.layers.recurrent_spec import KDASpec
from kvasir.layers.weights import Placement, Slot
from kvasir.types import StepBatch


class Mixer(RecurrentMixer):
    """Kimi Delta Attention of one layer."""

    captured = True

    def __init__(self, spec: KDASpec, hidden_size: int, place: Placement, writes: bool = True) -> None:
        own_state(writes)
        side, plain = spec.side, place.plain()
        self.spec, self.exact = spec, place.exact
        self.scan = gated_chunks.scan  # over long spans; a recurrence backend may take its place
        self.results = spec.num_heads, spec.dim
        self.mixed = Linear(hidden_size, {"q": side, "k": side, "v": side}, bias=False, place=place)
        self.narrow = Linear(
            hidden_size, {"f_a": spec.dim, "g_a": spec.dim, "b": spec.num_heads}, bias=False, place=plain
        )
        self.decay = Linear(spec.dim, {"f_b": side}, bias=False, place=plain)
        self.gate = Linear(spec.dim, {"g_b": side}, bias=False, place=plain)
        self.o = Linear(side, {"o": hidden_size}, bias=False, place=place)
        self.norm = RMSNorm(spec.dim, spec.norm, place)
        numbers = dict(device=place.device, dtype=torch.float32)
        self.weights = Weights(
            torch.empty(3 * side, spec.taps, device=place.device, dtype=place.dtype),
            torch.empty(spec.num_heads, **numbers),
            torch.empty(side, **numbers),
            spec.num_heads,
        )

    def project(self, x_TE: torch.Tensor, norm: RMSNorm | None) -> tuple[torch.Tensor, torch.Tensor]:
        if norm is not None:  # two products read it
            x_TE = norm(x_TE)
        dim = self.spec.dim
        decay_TD, gate_TD, b_TH = self.narrow(x_TE).split((dim, dim, self.spec.num_heads), -1)
        return torch.cat((self.mixed(x_TE), self.decay(decay_TD.contiguous()), b_TH), -1), gate_TD

    def finish(self, out_T: torch.Tensor, gate_T: torch.Tensor) -> torch.Tensor:
        gate_TN = self.gate(gate_T.contiguous())
        return gated_norm(out_T, gate_TN, *self.norm.parameters, silu=False, exact=self.exact, fused=self.norm.fused)

    def run(
        self, rows_TX: torch.Tensor, cache: StateCache, batch: StepBatch, out_T: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The recurrence of these rows: see `kvasir.attention.backend.Recurrence`."""
        return step(rows_TX, cache.planes, batch.tables[cache.group], batch, self.weights, self.exact, out_T, self.scan)

    def slots(self) -> dict[str, Slot]:
        """Weight slots; the convolution's stand apart for queries, keys and values."""
        found = {}
        for product in (self.mixed, self.narrow, self.decay, self.gate, self.o):
            found |= product.slots()
        for name, rows in zip("qkv", self.weights.conv_CJ.chunk(3)):
            found[f"{name}_conv.weight"] = Slot(rows.unsqueeze(1))
        return found | {
            "log_decay": Slot(self.weights.log_decay_H.view(1, 1, -1, 1)),
            "decay_bias": Slot(self.weights.bias_N),
            "norm.weight": self.norm.slots()["weight"],
        }
