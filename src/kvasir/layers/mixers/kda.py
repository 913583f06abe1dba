"""Kimi Delta Attention: projections, causal convolution, the delta rule with a decay for each channel, gated RMS norm.

Source: Kimi Team 2025, Kimi Linear (arXiv:2510.26692). All numbers are fp32 from the convolution on. Row by row it is
S <- exp(g) S + b k (v - k' exp(g) S)', y = S' q, where g [D] scales the rows of S [D, V]. ``chunk_scan`` takes up to 64
rows at once. Both are plain torch on every device: no kernel has this rule yet.

Legend: T rows, E model dim, H heads, D dim of a key and of a value, J taps, X = 4 H D + H.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvasir.attention.backend import AttentionBackend
from kvasir.kernels.activation import sigmoid
from kvasir.kernels.gated_delta import CHUNK, L2_EPS, convolve
from kvasir.kv.state import StateCache
from kvasir.layers.linear import Linear
from kvasir.layers.norm import RMSNorm
from kvasir.layers.recurrence import Kept, moved, own_state, step
from kvasir.layers.recurrent_spec import KDASpec
from kvasir.layers.rope import Angles
from kvasir.layers.weights import Placement, Slot
from kvasir.types import StepBatch


def recurrence(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THV: torch.Tensor,
    decay_THD: torch.Tensor,
    beta_TH: torch.Tensor,
    state_HDV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row after row: results [T, H, V] and the state after the last one. ``decay_THD``: logarithms."""
    out = torch.empty_like(v_THV)
    for t in range(len(q_THD)):
        state_HDV = state_HDV * decay_THD[t].exp().unsqueeze(-1)
        seen = (state_HDV * k_THD[t].unsqueeze(-1)).sum(1)
        change = (v_THV[t] - seen) * beta_TH[t].unsqueeze(-1)
        state_HDV = state_HDV + k_THD[t].unsqueeze(-1) * change.unsqueeze(1)
        out[t] = (state_HDV * q_THD[t].unsqueeze(-1)).sum(1)
    return out, state_HDV


def chunk_scan(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THV: torch.Tensor,
    decay_THD: torch.Tensor,
    beta_TH: torch.Tensor,
    state_HDV: torch.Tensor,
    start: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute what ``recurrence`` does in chunks that end at absolute multiples of ``CHUNK``. ``start``: position of
    the first row."""
    rows, parts, at = len(q_THD), [], 0
    while at < rows:
        end = min(rows, at + CHUNK - (start + at) % CHUNK)
        part, state_HDV = _chunk(
            *(x[at:end].transpose(0, 1) for x in (q_THD, k_THD, v_THV, decay_THD, beta_TH)), state_HDV
        )
        parts.append(part.transpose(0, 1))
        at = end
    return torch.cat(parts), state_HDV


def _chunk(q_HTD, k_HTD, v_HTV, decay_HTD, beta_HT, state_HDV) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk. Decays of two rows are multiplied channel by channel, never divided, so that none overflows."""
    total = decay_HTD.cumsum(1)
    lower = torch.ones(2 * (q_HTD.shape[1],), dtype=torch.bool, device=q_HTD.device).tril()
    between = (total.unsqueeze(2) - total.unsqueeze(1)).masked_fill(~lower[..., None], float("-inf")).exp()
    weighted = between * k_HTD.unsqueeze(1)  # [H, T, T, D]
    keys_HTD = k_HTD * beta_HT.unsqueeze(-1)
    system = (weighted @ keys_HTD.unsqueeze(-1)).squeeze(-1)
    seen = (keys_HTD * total.exp()) @ state_HDV
    written = torch.linalg.solve_triangular(
        system, v_HTV * beta_HT.unsqueeze(-1) - seen, upper=False, unitriangular=True
    )
    attention = (weighted @ q_HTD.unsqueeze(-1)).squeeze(-1)
    out = (q_HTD * total.exp()) @ state_HDV + attention @ written
    last = total[:, -1:]
    return out, state_HDV * last.exp().mT + (k_HTD * (last - total).exp()).mT @ written


class Rule:
    """The recurrence with a layer's parameters. A row is queries, keys, values, decays and write strengths."""

    def __init__(self, spec: KDASpec, place: Placement) -> None:
        numbers = dict(device=place.device, dtype=torch.float32)
        self.spec = spec
        self.conv_CJ = torch.empty(3 * spec.side, spec.taps, device=place.device, dtype=place.dtype)
        self.log_decay_H = torch.empty(spec.num_heads, **numbers)
        self.bias_N = torch.empty(spec.side, **numbers)

    def run(self, rows_TX: torch.Tensor, kept: Kept, start: int, by_row: bool) -> tuple[torch.Tensor, Kept]:
        inputs, state_HDV = self.inputs(rows_TX, kept["tail"]), kept["matrix"].float()
        out, state_HDV = recurrence(*inputs, state_HDV) if by_row else chunk_scan(*inputs, state_HDV, start)
        return out, {"matrix": state_HDV, "tail": moved(kept["tail"], rows_TX[:, : len(self.conv_CJ)])}

    def inputs(self, rows_TX: torch.Tensor, tail: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys, values and log decays [T, H, D], and write strengths [T, H], all fp32."""
        spec = self.spec
        heads = spec.num_heads, spec.dim
        mixed, raw_TN, b_TH = rows_TX.split((3 * spec.side, spec.side, spec.num_heads), -1)
        q, k, v = (x.unflatten(-1, heads) for x in convolve(mixed, tail, self.conv_CJ).chunk(3, -1))
        q, k = (x / ((x * x).sum(-1, keepdim=True) + L2_EPS).sqrt() for x in (q, k))
        # In fp64, so that rounding hides which of its two exponentials a CPU took for a row of this batch.
        steps = F.softplus(raw_TN.double() + self.bias_N).unflatten(-1, heads)
        decay = -self.log_decay_H.double().exp().unsqueeze(-1) * steps
        return q * spec.dim**-0.5, k, v, decay.float(), sigmoid(b_TH.float(), exact=True)


class Mixer:
    """Kimi Delta Attention of one layer."""

    native = False  # no C kernel runs recurrences
    captured = False  # its steps read positions on the host
    sinks_H = None

    def __init__(self, spec: KDASpec, hidden_size: int, place: Placement, writes: bool = True) -> None:
        own_state(writes)
        side, plain = spec.side, place.plain()
        self.spec, self.exact = spec, place.exact
        self.results = spec.num_heads, spec.dim
        self.mixed = Linear(hidden_size, {"q": side, "k": side, "v": side}, bias=False, place=place)
        self.narrow = Linear(
            hidden_size, {"f_a": spec.dim, "g_a": spec.dim, "b": spec.num_heads}, bias=False, place=plain
        )
        self.decay = Linear(spec.dim, {"f_b": side}, bias=False, place=plain)
        self.gate = Linear(spec.dim, {"g_b": side}, bias=False, place=plain)
        self.o = Linear(side, {"o": hidden_size}, bias=False, place=place)
        self.norm = RMSNorm(spec.dim, spec.norm, place)
        self.rule = Rule(spec, place)

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
        decay_TD, gate_TD, b_TH = self.narrow(x_TE).split((spec.dim, spec.dim, spec.num_heads), -1)
        rows_TX = torch.cat((self.mixed(x_TE), self.decay(decay_TD.contiguous()), b_TH), -1)
        out_THD = backend.run_recurrence(self, rows_TX, cache, batch)
        if wanted_M is not None:
            out_THD, gate_TD = out_THD.index_select(0, wanted_M), gate_TD.index_select(0, wanted_M)
        gate_TN = self.gate(gate_TD.contiguous())
        normed_TN = self.norm(out_THD).flatten(1) * sigmoid(gate_TN.float(), self.exact)
        return self.o(normed_TN.to(gate_TN.dtype), residual_TN=residual_TE)

    def run(
        self, rows_TX: torch.Tensor, cache: StateCache, batch: StepBatch, out_T: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The recurrence of these rows: see `kvasir.attention.backend.Recurrence`."""
        found_T = step(self.rule, rows_TX, cache.planes, batch.tables[cache.group], batch, self.exact)
        return found_T if out_T is None else out_T.copy_(found_T)

    def slots(self) -> dict[str, Slot]:
        """Weight slots; the convolution's stand apart for queries, keys and values."""
        found = {}
        for product in (self.mixed, self.narrow, self.decay, self.gate, self.o):
            found |= product.slots()
        for name, rows in zip("qkv", self.rule.conv_CJ.chunk(3)):
            found[f"{name}_conv.weight"] = Slot(rows.unsqueeze(1))
        return found | {
            "log_decay": Slot(self.rule.log_decay_H.view(1, 1, -1, 1)),
            "decay_bias": Slot(self.rule.bias_N),
            "norm.weight": self.norm.slots()["weight"],
        }
