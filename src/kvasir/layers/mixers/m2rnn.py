"""M2RNN: projections, causal convolution, a non-linear recurrence of a matrix, gated RMS norm. Plain torch everywhere.

Source: M2RNN (arXiv:2603.14360). All numbers are fp32 from the convolution on. One row does, for one head,

    Z = tanh(S W + k v');   f = exp(-exp(A) softplus(forget + bias));   S = f S + (1 - f) Z;   y = S' q + D v

No form takes many rows at once, because a row goes through the tanh of the one before it. So prompts take as many steps
as they have tokens, and chunks of a prompt change no bit, in exact mode or not.

Legend: T rows, E model dim, H heads, K key dim, V value dim, C mixed row (queries, keys, values), X = C + H.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvasir.kernels.activation import sigmoid
from kvasir.kernels.gated_delta import convolve
from kvasir.kv.state import StateCache
from kvasir.layers.linear import Linear
from kvasir.layers.norm import RMSNorm
from kvasir.layers.recurrence import Kept, RecurrentMixer, moved, own_state, step
from kvasir.layers.recurrent_spec import M2RNNSpec
from kvasir.layers.weights import Placement, Slot
from kvasir.types import StepBatch


class Rule:
    """The recurrence with a layer's parameters. A row is queries, keys, values and forget gates."""

    def __init__(self, spec: M2RNNSpec, place: Placement) -> None:
        numbers = dict(device=place.device, dtype=torch.float32)
        heads = spec.num_heads
        self.spec = spec
        self.conv_CJ = torch.empty(spec.mixed, spec.taps, device=place.device, dtype=place.dtype)
        self.log_decay_H, self.bias_H, self.skip_H = (torch.empty(heads, **numbers) for _ in range(3))
        self.inner_HVV = torch.empty(heads, spec.value_dim, spec.value_dim, **numbers)

    def run(self, rows_TX: torch.Tensor, kept: Kept, start: int, by_row: bool) -> tuple[torch.Tensor, Kept]:
        spec, state_HKV = self.spec, kept["matrix"].float()
        mixed_TC, forget_TH = rows_TX.split((spec.mixed, spec.num_heads), -1)
        side = spec.key_heads * spec.key_dim
        q, k, v = convolve(mixed_TC, kept["tail"], self.conv_CJ).split((side, side, spec.values), -1)
        each = spec.num_heads // spec.key_heads
        q, k = (x.unflatten(-1, (spec.key_heads, spec.key_dim)).repeat_interleave(each, 1) for x in (q, k))
        v = v.unflatten(-1, (spec.num_heads, spec.value_dim))
        # In fp64, so that rounding hides which of its two exponentials a CPU took for a row of this batch.
        steps_TH = F.softplus(forget_TH.double() + self.bias_H)
        forget_TH = (-self.log_decay_H.double().exp() * steps_TH).exp().float()
        found = []
        for t in range(len(rows_TX)):
            new = (state_HKV @ self.inner_HVV + k[t].unsqueeze(-1) * v[t].unsqueeze(1)).tanh()
            forget = forget_TH[t][:, None, None]
            state_HKV = forget * state_HKV + (1 - forget) * new
            found.append((state_HKV * q[t].unsqueeze(-1)).sum(1) + self.skip_H[:, None] * v[t])
        return torch.stack(found), {"matrix": state_HKV, "tail": moved(kept["tail"], mixed_TC)}


class Mixer(RecurrentMixer):
    """M2RNN of one layer."""

    captured = False  # its steps read positions on the host

    def __init__(self, spec: M2RNNSpec, hidden_size: int, place: Placement, writes: bool = True) -> None:
        own_state(writes)
        side = spec.key_heads * spec.key_dim
        self.spec, self.exact = spec, place.exact
        self.results = spec.num_heads, spec.value_dim
        self.mixed = Linear(
            hidden_size,
            {"q": side, "k": side, "v": spec.values, "f": spec.num_heads, "g": spec.values},
            bias=False,
            place=place.plain(),
        )
        self.o = Linear(spec.values, {"o": hidden_size}, bias=False, place=place)
        self.norm = RMSNorm(spec.values, spec.norm, place)
        self.rule = Rule(spec, place)

    def project(self, x_TE: torch.Tensor, norm: RMSNorm | None) -> tuple[torch.Tensor, torch.Tensor]:
        spec = self.spec
        rows_TX, gate_TN = self.mixed(x_TE, norm).split((spec.mixed + spec.num_heads, spec.values), -1)
        return rows_TX, gate_TN

    def finish(self, out_T: torch.Tensor, gate_T: torch.Tensor) -> torch.Tensor:
        gate = gate_T.float()
        return self.norm(out_T.flatten(1) * (gate * sigmoid(gate, self.exact))).to(gate_T.dtype)

    def run(
        self, rows_TX: torch.Tensor, cache: StateCache, batch: StepBatch, out_T: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The recurrence of these rows: see `kvasir.attention.backend.Recurrence`."""
        found_T = step(self.rule, rows_TX, cache.planes, batch.tables[cache.group], batch, self.exact)
        return found_T if out_T is None else out_T.copy_(found_T)

    def slots(self) -> dict[str, Slot]:
        rule = self.rule
        return (
            self.mixed.slots()
            | self.o.slots()
            | {
                "conv.weight": Slot(rule.conv_CJ.unsqueeze(1)),
                "inner": Slot(rule.inner_HVV),
                "log_decay": Slot(rule.log_decay_H),
                "forget_bias": Slot(rule.bias_H),
                "skip": Slot(rule.skip_H),
                "norm.weight": self.norm.slots()["weight"],
            }
        )
