"""The hooks of one layer: stacked parameters by slot at each site, and how they act there.

A row whose gate is closed keeps its bits. Behind o the product joins the residual stream in one kernel, so the move is
computed from a second product and added; that costs a layer with hooks at ``attn_out`` the product once more.

Legend: T rows, H heads (1: whole states), D their width, E model dim, C vectors, S slots and one before them, P
positions.
"""

from __future__ import annotations

import torch

from kvasir.hooks.hook import Steer
from kvasir.kernels.steer import SLOT_SHIFT, Steers, steer
from kvasir.layers.linear import Linear
from kvasir.layers.norm import Stream
from kvasir.layers.weights import Placement
from kvasir.types import StepBatch

# Rows of a step on a CPU whose arithmetic is done for all; in a larger step, for those with an open gate.
STATIC_ROWS = 32


class Stage:
    """One hook of each resident set at one site of one layer. ``count``: most vectors that a set has here."""

    def __init__(self, num_slots: int, heads: int, width: int, count: int, shifts: bool, place: Placement) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(num_slots + 1, *shape, dtype=dtype, device=place.device)

        ints = torch.int32
        self.steers = Steers(
            zeros(count, heads, width),
            zeros(count, heads),
            zeros(2),
            zeros(3, dtype=ints),
            zeros(heads, dtype=ints),
            shifts,
        )

    def put(self, slot: int, gate: int, found: Steer | None, strength: float) -> None:
        """Fill slot ``slot`` (0-based) with a hook whose gate is bit ``gate`` of a row's word; None: the set has no
        hook here. On a GPU nothing waits: the copies are behind the work that was launched before."""
        steers, at = self.steers, slot + 1
        steers.words_S3[at].zero_()
        if found is None:
            return
        count = len(found.vectors_CHD)
        for target, source in (
            (steers.vectors_SCHD[at], found.vectors_CHD),
            (steers.biases_SCH[at], found.biases_CH),
        ):
            target[count:].zero_()
            target[:count].copy_(source, non_blocking=True)
        heads = steers.heads_SH[at]
        heads.fill_(1) if found.heads_H is None else heads.copy_(found.heads_H, non_blocking=True)
        steers.numbers_S2[at].copy_(torch.tensor([found.gain * strength, found.target]), non_blocking=True)
        steers.words_S3[at].copy_(torch.tensor([found.mode, 1 << gate, count], dtype=torch.int32), non_blocking=True)

    def poison(self, slot: int) -> None:
        """Fill a slot with NaN, so that a read of a stale set shows."""
        self.steers.vectors_SCHD[slot + 1].fill_(torch.nan)

    def apply(self, x_THD: torch.Tensor, words_T: torch.Tensor, out_THD: torch.Tensor | None = None) -> None:
        """Move the rows of ``x_THD`` whose gate is open, in place, or add their moves to ``out_THD``."""
        if x_THD.device.type == "cpu" and len(words_T) > STATIC_ROWS:
            rows = words_T.nonzero()[:, 0]
            if not len(rows):
                return
            some, target = x_THD[rows], None if out_THD is None else out_THD[rows]
            steer(some, words_T[rows], self.steers, target)
            if out_THD is None:
                x_THD[rows] = some
            else:
                out_THD[rows] = target
        else:
            steer(x_THD, words_T, self.steers, out_THD)


class Recorder:
    """States at one site of one layer, by position. ``bits`` [S]: the gates that open it, by slot."""

    def __init__(self, num_slots: int, num_positions: int, heads: int, width: int, place: Placement) -> None:
        # The last place takes the rows that are not wanted.
        self.states_PHD = torch.zeros(num_positions + 1, heads, width, dtype=place.dtype, device=place.device)
        self.bits_S = torch.zeros(num_slots + 1, dtype=torch.int32, device=place.device)

    def put(self, slot: int, gates: int) -> None:
        self.bits_S[slot + 1] = gates

    def apply(self, x_THD: torch.Tensor, words_T: torch.Tensor, positions_T: torch.Tensor) -> None:
        open_T = (words_T & self.bits_S.index_select(0, (words_T >> SLOT_SHIFT).long())) > 0
        at_T = torch.where(open_T, positions_T, len(self.states_PHD) - 1)
        self.states_PHD.index_copy_(0, at_T, x_THD)


class LayerHooks:
    """The hooks of one layer, by site; empty where no set has any."""

    def __init__(self) -> None:
        self.stages: dict[str, list[Stage]] = {}
        self.recorders: dict[str, Recorder] = {}

    def acts(self, site: str) -> bool:
        return site in self.stages or site in self.recorders

    def attend(
        self, out_TX: torch.Tensor, o: Linear, heads: int, residual_TE: torch.Tensor | None, batch: StepBatch
    ) -> torch.Tensor:
        """The product ``o`` of the heads ``out_TX`` [T, H * D], with what the hooks of both change: [T, E]. What
        attention gave is changed in place. ``residual_TE`` is added, as in ``Linear``."""
        self._act("head_out", out_TX.view(len(out_TX), heads, -1), batch)
        if not self.acts("attn_out"):
            return o(out_TX, residual_TN=residual_TE, batch=batch)
        alone_TE = o(out_TX, batch=batch)
        if residual_TE is None:
            self._act("attn_out", alone_TE[:, None], batch)
            return alone_TE
        sum_TE = o(out_TX, residual_TN=residual_TE, batch=batch)
        self._act("attn_out", alone_TE[:, None], batch, sum_TE[:, None])
        return sum_TE

    def leave(self, stream: Stream, batch: StepBatch) -> None:
        """Change what a layer leaves in the stream."""
        if not self.acts("resid"):
            return
        rest_TE = stream.rest
        if rest_TE is None:
            self._act("resid", stream.h_TE[:, None], batch)
            return
        whole_TE = torch.empty_like(stream.h_TE)
        stream.peek(whole_TE)
        self._act("resid", whole_TE[:, None], batch, rest_TE[:, None])

    def _act(self, site: str, x_THD: torch.Tensor, batch: StepBatch, out_THD: torch.Tensor | None = None) -> None:
        assert batch.hooks is not None, "asked for by steps with hooks alone"
        if site in self.recorders:
            self.recorders[site].apply(x_THD, batch.hooks, batch.positions)
        for i, stage in enumerate(self.stages.get(site, [])):
            assert out_THD is None or not i, "a site whose moves are added has one hook a layer"
            stage.apply(x_THD, batch.hooks, out_THD)
