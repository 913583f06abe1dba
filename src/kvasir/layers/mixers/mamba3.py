"""Mamba-3: one projection, a rotated state discretised by a trapezoid, and a gate. Plain torch on every device.

Source: Mamba-3 (arXiv:2603.15569), as its authors' code orders the projection and pairs the rotated dimensions. All
numbers of the recurrence are fp32. One row does, for one head,

    dt = softplus(dt + bias);  a = exp(dt A);  l = sigmoid(trap);  angle = (angle + tanh(turn) pi dt) mod 2 pi
    B, C = rotated by the angle, after their norms and biases
    S = a S + (1 - l) dt a sum_r last_x_r B'_last_r + l dt sum_r x_r B'_r;    y_r = S C_r + D x_r

and then y = sum_r out_r (y_r silu(z_r)). For ``rank`` 1 there are no factors of x, z and the result. ``scan`` takes up
to 64 rows at once. It sums the same terms in another order.

Legend: T rows, E model dim, H heads, P channels of a head, N state dim, R rank, A angles, G groups, X = row without z.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from kvasir.kernels.activation import sigmoid
from kvasir.kv.state import StateCache
from kvasir.layers.linear import Linear
from kvasir.layers.norm import RMSNorm
from kvasir.layers.recurrence import Kept, RecurrentMixer, own_state, step
from kvasir.layers.recurrent_spec import Mamba3Spec
from kvasir.layers.weights import Placement, Slot
from kvasir.types import StepBatch

CHUNK = 64  # most rows that the scan takes at once; chunks end at absolute multiples
SLOWEST = -1e-4  # the decay rate that is nearest to none
TURN = 2 * math.pi


def rotate(x: torch.Tensor, angle: torch.Tensor, neighbours: bool) -> torch.Tensor:
    """Turn pairs of x [..., N] by ``angle`` [..., A]: dimensions 2i and 2i + 1 if ``neighbours``, else i and i + N / 2.
    Pairs from A on stay."""
    pairs = x.unflatten(-1, (-1, 2)) if neighbours else x.unflatten(-1, (2, -1)).mT
    cos, sin = angle.cos(), angle.sin()
    count = angle.shape[-1]
    first, second = pairs[..., :count, 0], pairs[..., :count, 1]
    turned = torch.stack((first * cos - second * sin, first * sin + second * cos), -1)
    pairs = torch.cat((turned, pairs[..., count:, :]), -2)
    return pairs.flatten(-2) if neighbours else pairs.mT.flatten(-2)


class Rule:
    """The recurrence with a layer's parameters. A row is x, B, C, dt, A, trap and angle, as they are projected; a
    result is y_r [R, H, P] before the gate."""

    def __init__(self, spec: Mamba3Spec, place: Placement) -> None:
        numbers = dict(device=place.device, dtype=torch.float32)
        heads, rank = spec.num_heads, spec.rank
        self.spec = spec
        self.step_bias_H, self.skip_H = torch.empty(heads, **numbers), torch.empty(heads, **numbers)
        self.B_bias_HRN, self.C_bias_HRN = (torch.empty(heads, rank, spec.state_dim, **numbers) for _ in range(2))
        self.B_norm_N, self.C_norm_N = (torch.empty(spec.state_dim, **numbers) for _ in range(2))
        self.x_HRP = torch.empty(heads, rank, spec.dim, **numbers) if rank > 1 else None

    def run(self, rows_TX: torch.Tensor, kept: Kept, start: int, by_row: bool) -> tuple[torch.Tensor, Kept]:
        spec, parts = self.spec, [width for name, width in self.spec.parts.items() if name != "z"]
        x_TN, B_TN, C_TN, dt, a, trap, turn_TA = rows_TX.float().split(parts, -1)
        # In fp64, so that rounding hides which of its two forms of a function a CPU took for a row of this batch.
        dt_TH = F.softplus(dt.double() + self.step_bias_H)
        rate_TH = self._rate(a.double()).clamp(max=SLOWEST)
        share_TH = trap.double().sigmoid()
        turned = (turn_TA.double().tanh() * math.pi).unsqueeze(1) * dt_TH.unsqueeze(-1)  # [T, H, A]
        angle_THA = self._angles(turned, kept["angle"].double(), by_row)
        x_THP = x_TN.unflatten(-1, (spec.num_heads, spec.dim))
        B_TRHN = self._side(B_TN, self.B_norm_N, self.B_bias_HRN, angle_THA)
        C_TRHN = self._side(C_TN, self.C_norm_N, self.C_bias_HRN, angle_THA)
        decay_TH = (dt_TH * rate_TH).float()
        now_TH, before_TH = (share_TH * dt_TH).float(), ((1 - share_TH) * dt_TH * (dt_TH * rate_TH).exp()).float()
        last_x = torch.cat((kept["last_x"].float()[None], x_THP))
        last_B = torch.cat((kept["last_B"].float()[None], B_TRHN))
        inputs = [
            (now_TH, self._inputs(x_THP), B_TRHN),
            (before_TH, self._inputs(last_x[:-1]), last_B[:-1]),
        ]
        state = kept["matrix"].float()
        walk = recurrence if by_row else scan
        out_TRHP, state = walk(inputs, C_TRHN, decay_TH, state, start)
        out_TRHP = out_TRHP + self.skip_H[:, None] * self._inputs(x_THP)
        after = {"matrix": state, "angle": angle_THA[-1].float(), "last_B": last_B[-1], "last_x": last_x[-1]}
        return out_TRHP, after

    def _rate(self, a: torch.Tensor) -> torch.Tensor:
        if self.spec.rate == "softplus":
            return -F.softplus(a)
        return -torch.where(a >= 0, 1 + a, 1 / (1 - a.clamp(max=0)))

    def _angles(self, turned_THA: torch.Tensor, angle_HA: torch.Tensor, by_row: bool) -> torch.Tensor:
        """Angles after each row, rounded to fp32 as they are kept."""
        if not by_row:
            return torch.remainder(angle_HA + turned_THA.cumsum(0), TURN).float()
        found = []
        for row in turned_THA:
            angle_HA = torch.remainder(angle_HA + row, TURN).float().double()
            found.append(angle_HA)
        return torch.stack(found).float()

    def _side(self, x_TN, norm_N, bias_HRN, angle_THA) -> torch.Tensor:
        """B or C of every head: [T, R, H, N], normed, shifted and rotated."""
        spec = self.spec
        x = x_TN.unflatten(-1, (spec.rank, spec.groups, spec.state_dim))
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + spec.norm.eps) * norm_N
        x = x.repeat_interleave(spec.num_heads // spec.groups, 2) + bias_HRN.transpose(0, 1)
        return rotate(x.double(), angle_THA.double().unsqueeze(1), spec.rank == 1).float()

    def _inputs(self, x_THP: torch.Tensor) -> torch.Tensor:
        """x of every input: [T, R, H, P]."""
        return x_THP.unsqueeze(1) if self.x_HRP is None else x_THP.unsqueeze(1) * self.x_HRP.transpose(0, 1)


Inputs = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]  # weights [T, H], x [T, R, H, P], B [T, R, H, N]


def recurrence(
    inputs: Inputs, C_TRHN: torch.Tensor, decay_TH: torch.Tensor, state_HPN: torch.Tensor, start: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row after row: S C_r [T, R, H, P] and the state after the last one. Shapes do not depend on the batch, and so do
    not a row's bits. ``inputs``: this row's and the one before; ``start`` is not needed."""
    found = []
    for t in range(len(C_TRHN)):
        state_HPN = state_HPN * decay_TH[t].exp()[:, None, None]
        for weight_TH, x_TRHP, B_TRHN in inputs:
            added = (x_TRHP[t].unsqueeze(-1) * B_TRHN[t].unsqueeze(-2)).sum(0)
            state_HPN = state_HPN + weight_TH[t][:, None, None] * added
        found.append((state_HPN * C_TRHN[t].unsqueeze(-2)).sum(-1))
    return torch.stack(found), state_HPN


def scan(
    inputs: Inputs, C_TRHN: torch.Tensor, decay_TH: torch.Tensor, state_HPN: torch.Tensor, start: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute what ``recurrence`` does in chunks. ``start``: position of the first row."""
    found, at = [], 0
    while at < len(C_TRHN):
        end = min(len(C_TRHN), at + CHUNK - (start + at) % CHUNK)
        total_TH = decay_TH[at:end].cumsum(0)
        lower = torch.ones(2 * (end - at,), dtype=torch.bool, device=C_TRHN.device).tril()
        between = (total_TH[:, None] - total_TH[None]).masked_fill(~lower[..., None], float("-inf")).exp()  # [T, T, H]
        C, left_TH = C_TRHN[at:end], (total_TH[-1:] - total_TH).exp()
        out = torch.einsum("trhn,hpn,th->trhp", C, state_HPN, total_TH.exp())
        state_HPN = state_HPN * total_TH[-1].exp()[:, None, None]
        for weight, x, B in ([part[at:end] for part in parts] for parts in inputs):
            scores = torch.einsum("trhn,skhn->tsrkh", C, B) * (between * weight)[:, :, None, None]
            out = out + torch.einsum("tsrkh,skhp->trhp", scores, x)
            state_HPN = state_HPN + torch.einsum("sh,skhp,skhn->hpn", left_TH * weight, x, B)
        found.append(out)
        at = end
    return torch.cat(found), state_HPN


class Mixer(RecurrentMixer):
    """Mamba-3 of one layer."""

    captured = False  # its steps read positions on the host

    def __init__(self, spec: Mamba3Spec, hidden_size: int, place: Placement, writes: bool = True) -> None:
        own_state(writes)
        self.spec, self.exact = spec, place.exact
        self.results = spec.rank * spec.num_heads, spec.dim
        self.mixed = Linear(hidden_size, spec.parts, bias=False, place=place.plain())
        self.o = Linear(spec.inner, {"o": hidden_size}, bias=False, place=place)
        self.rule = Rule(spec, place)
        numbers = dict(device=place.device, dtype=torch.float32)
        self.z_HRP = self.out_HRP = None
        if spec.rank > 1:
            self.z_HRP, self.out_HRP = (torch.empty_like(self.rule.x_HRP, **numbers) for _ in range(2))

    def project(self, x_TE: torch.Tensor, norm: RMSNorm | None) -> tuple[torch.Tensor, torch.Tensor]:
        mixed_TN = self.mixed(x_TE, norm)
        z_TN, rows_TX = mixed_TN.split((self.spec.inner, mixed_TN.shape[1] - self.spec.inner), -1)
        return rows_TX, z_TN

    def finish(self, out_T: torch.Tensor, gate_T: torch.Tensor) -> torch.Tensor:
        spec = self.spec
        z = gate_T.float().unflatten(-1, (spec.num_heads, spec.dim)).unsqueeze(1)
        if self.z_HRP is not None:
            z = z * self.z_HRP.transpose(0, 1)
        out = out_T.unflatten(1, (spec.rank, spec.num_heads)) * (z * sigmoid(z, self.exact))
        if self.out_HRP is not None:
            out = out * self.out_HRP.transpose(0, 1)
        return out.sum(1).flatten(1).to(gate_T.dtype)

    def run(
        self, rows_TX: torch.Tensor, cache: StateCache, batch: StepBatch, out_T: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The recurrence of these rows: see `kvasir.attention.backend.Recurrence`."""
        found_T = step(self.rule, rows_TX, cache.planes, batch.tables[cache.group], batch, self.exact)
        found_T = found_T.flatten(1, 2)
        return found_T if out_T is None else out_T.copy_(found_T)

    def slots(self) -> dict[str, Slot]:
        rule = self.rule
        found = self.mixed.slots() | self.o.slots()
        vectors = {"step_bias": rule.step_bias_H, "skip": rule.skip_H, "B_bias": rule.B_bias_HRN,
                   "C_bias": rule.C_bias_HRN, "B_norm": rule.B_norm_N, "C_norm": rule.C_norm_N}  # fmt: skip
        factors = {"x_factor": rule.x_HRP, "z_factor": self.z_HRP, "out_factor": self.out_HRP}
        return found | {name: Slot(x) for name, x in (vectors | factors).items() if x is not None}
