"""Gated DeltaNet: projections, causal convolution, gated delta rule over a state page, gated RMS norm.

Legend: T rows, E model dim, C mixed row (queries, keys, values), H heads of values, K heads of keys, V value dim,
J taps, X = C + 2 H, N outputs of a product.
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
from kvasir.layers.spec import GatedDeltaSpec
from kvasir.layers.weights import Placement, Slot
from kvasir.types import StepBatch


class Mixer(RecurrentMixer):
    """Gated DeltaNet of one layer."""

    captured = True

    def __init__(self, spec: GatedDeltaSpec, hidden_size: int, place: Placement, writes: bool = True) -> None:
        own_state(writes)
        heads, keys = spec.num_value_heads, spec.num_key_heads * spec.key_dim
        self.spec, self.exact = spec, place.exact
        self.scan = gated_chunks.scan  # over long spans; a recurrence backend may take its place
        self.results = spec.num_value_heads, spec.value_dim
        gates = {"b": heads, "a": heads}
        # The two gates stay plain where the others are quantised. Otherwise one product gives all.
        self.gates: Linear | None = None
        widths = {"q": keys, "k": keys, "v": spec.values, **gates, "z": spec.values}
        if place.formats is not None:
            self.gates = Linear(hidden_size, gates, bias=False, place=place.plain())
            widths = {name: width for name, width in widths.items() if name not in gates}
        self.mixed = Linear(hidden_size, widths, bias=False, place=place)
        self.o = Linear(spec.values, {"o": hidden_size}, bias=False, place=place)
        self.norm = RMSNorm(spec.value_dim, spec.norm, place)
        numbers = dict(device=place.device, dtype=torch.float32)
        self.weights = Weights(
            torch.empty(spec.mixed, spec.taps, device=place.device, dtype=place.dtype),
            torch.empty(heads, **numbers),
            torch.empty(heads, **numbers),
            spec.num_key_heads,
        )

    def project(self, x_TE: torch.Tensor, norm: RMSNorm | None) -> tuple[torch.Tensor, torch.Tensor]:
        if self.gates is None:
            return self._split(self.mixed(x_TE, norm))
        if norm is not None and (len(x_TE) > 1 or self.exact):  # two products read it; those of one row apply it
            x_TE, norm = norm(x_TE), None
        mixed_TC, z_TN = self._split(self.mixed(x_TE, norm))
        return torch.cat((mixed_TC, self.gates(x_TE, norm)), -1), z_TN

    def _split(self, found_TN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the product's rows: what the recurrence reads, and the gate after it."""
        return found_TN[:, : -self.spec.values], found_TN[:, -self.spec.values :]

    def finish(self, out_T: torch.Tensor, gate_T: torch.Tensor) -> torch.Tensor:
        return gated_norm(out_T, gate_T, *self.norm.parameters, silu=True, exact=self.exact, fused=self.norm.fused)

    def run(
        self, rows_TX: torch.Tensor, cache: StateCache, batch: StepBatch, out_THV: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The recurrence of these rows: see `kvasir.attention.backend.Recurrence`."""
        return step(
            rows_TX, cache.planes, batch.tables[cache.group], batch, self.weights, self.exact, out_THV, self.scan
        )

    def slots(self) -> dict[str, Slot]:
        """Weight slots. Those of projections stand apart for each head of keys, with its heads of values, because some
        checkpoints store them in this order."""
        found = self.o.slots()
        products = [self.mixed] if self.gates is None else [self.mixed, self.gates]
        for name, slot in [item for product in products for item in product.slots().items()]:
            part, _, leaf = name.rpartition(".")
            for head, rows in enumerate(slot.target.chunk(self.spec.num_key_heads)):
                found[f"{part}.{head}.{leaf}"] = Slot(rows, types=slot.types)
        return found | {
            "conv.weight": Slot(self.weights.conv_CJ.unsqueeze(1)),
            "log_decay": Slot(self.weights.log_decay_H),
            "decay_bias": Slot(self.weights.bias_N),
            "norm.weight": self.norm.slots()["weight"],
        }
