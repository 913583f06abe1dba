"""Gated DeltaNet: projections, causal convolution, gated delta rule over a state page, gated RMS norm.

Legend: T rows, E model dim, C mixed row (queries, keys, values), H heads of values, K heads of keys, V value dim,
J taps, X = C + 2 H.
"""

from __future__ import annotations

import torch

from kvasir.attention.backend import AttentionBackend
from kvasir.kernels import gated_chunks
from kvasir.kernels.activation import sigmoid
from kvasir.kernels.gated_delta import Weights, step
from kvasir.kv.state import StateCache
from kvasir.layers.linear import Linear
from kvasir.layers.norm import RMSNorm
from kvasir.layers.recurrence import own_state
from kvasir.layers.rope import Angles
from kvasir.layers.spec import GatedDeltaSpec
from kvasir.layers.weights import Placement, Slot
from kvasir.types import StepBatch


class Mixer:
    """Gated DeltaNet of one layer."""

    native = False  # no C kernel runs recurrences
    captured = True
    sinks_H = None

    def __init__(self, spec: GatedDeltaSpec, hidden_size: int, place: Placement, writes: bool = True) -> None:
        own_state(writes)
        heads, keys = spec.num_value_heads, spec.num_key_heads * spec.key_dim
        self.spec, self.exact = spec, place.exact
        self.scan = gated_chunks.scan  # over long spans; a recurrence backend may take its place
        self.results = spec.num_value_heads, spec.value_dim
        self.mixed = Linear(
            hidden_size, {"q": keys, "k": keys, "v": spec.values, "z": spec.values}, bias=False, place=place
        )
        # Checkpoints keep the two gates plain where they quantise the others.
        self.gates = Linear(hidden_size, {"b": heads, "a": heads}, bias=False, place=place.plain())
        self.o = Linear(spec.values, {"o": hidden_size}, bias=False, place=place)
        self.norm = RMSNorm(spec.value_dim, spec.norm, place)
        numbers = dict(device=place.device, dtype=torch.float32)
        self.weights = Weights(
            torch.empty(spec.mixed, spec.taps, device=place.device, dtype=place.dtype),
            torch.empty(heads, **numbers),
            torch.empty(heads, **numbers),
            spec.num_key_heads,
        )

    def forward(
        self,
        x_TE: torch.Tensor,
        angles: Angles,
        cache: StateCache,
        backend: AttentionBackend,
        batch: StepBatch,
        norm: RMSNorm | None = None,
        residual_TE: torch.Tensor | None = None,
        wanted_M: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Results of x, or of ``norm``(x): [T, E] -> [T, E]. ``residual_TE`` is added, and its memory may be used for
        the result. ``wanted_M``: the rows of the result, and of ``residual_TE``; None: all. Rows have no angles."""
        assert batch.ancestors is None, "drafts of a model with recurrent layers are chains"
        spec = self.spec
        if norm is not None:  # two products read it
            x_TE = norm(x_TE)
        mixed_TC, z_TN = self.mixed(x_TE).split((spec.mixed, spec.values), -1)
        rows_TX = torch.cat((mixed_TC, self.gates(x_TE)), -1)
        out_THV = backend.run_recurrence(self, rows_TX, cache, batch)
        if wanted_M is not None:
            out_THV, z_TN = out_THV.index_select(0, wanted_M), z_TN.index_select(0, wanted_M)
        return self.o(self._gated(out_THV, z_TN), residual_TN=residual_TE)

    def run(
        self, rows_TX: torch.Tensor, cache: StateCache, batch: StepBatch, out_THV: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The recurrence of these rows: see `kvasir.attention.backend.Recurrence`."""
        return step(
            rows_TX, cache.planes, batch.tables[cache.group], batch, self.weights, self.exact, out_THV, self.scan
        )

    def _gated(self, out_THV: torch.Tensor, z_TN: torch.Tensor) -> torch.Tensor:
        """Norm of every head's result, times silu of its gate: [T, H * V] in the model's dtype."""
        gate = z_TN.float()
        normed = self.norm(out_THV).flatten(1) * (gate * sigmoid(gate, self.exact))
        return normed.to(z_TN.dtype)

    def slots(self) -> dict[str, Slot]:
        """Weight slots. Those of projections stand apart for each head of keys, with its heads of values, because some
        checkpoints store them in this order."""
        found = self.o.slots()
        for name, slot in [*self.mixed.slots().items(), *self.gates.slots().items()]:
            part, _, leaf = name.rpartition(".")
            for head, rows in enumerate(slot.target.chunk(self.spec.num_key_heads)):
                found[f"{part}.{head}.{leaf}"] = Slot(rows, types=slot.types)
        return found | {
            "conv.weight": Slot(self.weights.conv_CJ.unsqueeze(1)),
            "log_decay": Slot(self.weights.log_decay_H),
            "decay_bias": Slot(self.weights.bias_N),
            "norm.weight": self.norm.slots()["weight"],
        }
