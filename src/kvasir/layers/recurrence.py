"""A step of any recurrence over state pages, in plain torch, so that the step may be run again.

A mixer gives a `Rule`: what rows do to what a sequence keeps. ``step`` does the rest, as
`kvasir.kernels.gated_delta.step_reference` does for its own rule. What a page keeps stands at the page's position. The
rows from there to the span's start are folded in first. A span of up to ``LOOK_AHEAD`` rows then leaves its own rows to
the look-ahead slots; a longer one writes another page.

It reads positions on the host, once a step. So it cannot be captured, and mixers that use it say ``captured = False``.
Short spans that are alike, such as all decodes, run together, except in exact mode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from kvasir.attention.backend import AttentionBackend
from kvasir.errors import ConfigError
from kvasir.kv.state import StateCache
from kvasir.layers.linear import Linear
from kvasir.layers.norm import RMSNorm
from kvasir.layers.rope import Angles
from kvasir.types import StepBatch

Kept = dict[str, torch.Tensor]
OWN = ("ahead", "position")  # planes of the step itself


class Rule(Protocol):
    """A recurrence of one layer."""

    def run(self, rows_TX: torch.Tensor, kept: Kept, start: int, by_row: bool) -> tuple[torch.Tensor, Kept]:
        """Results [T, ...] fp32 of the rows from position ``start`` on, and what is kept after the last one.

        ``kept``: the planes of `MixerSpec.state` other than ``OWN``, zeros at position 0, which are left alone.
        ``by_row``: a row's bits may not depend on the other rows; otherwise a scan may take many at once.
        """


def step(
    rule: Rule,
    rows_TX: torch.Tensor,
    planes: dict[str, torch.Tensor],
    table_SW: torch.Tensor,
    batch: StepBatch,
    exact: bool = False,
) -> torch.Tensor:
    """Results [T, ...] fp32 of a step's rows. ``table_SW``: int32, its first two columns are the pages that each span
    reads and writes. ``exact``: row by row, whatever the length."""
    starts, lengths, pages = batch.starts, batch.lengths, [tuple(pair) for pair in table_SW[:, :2].tolist()]
    spans, at, ahead = [], 0, planes["ahead"].shape[1]
    reads = torch.tensor([read for read, _ in pages], device=rows_TX.device)
    for (read, write), base, start, length in zip(pages, planes["position"][reads, 0].tolist(), starts, lengths):
        base = base if start else 0  # whatever the page holds belongs to an earlier sequence
        assert 0 <= start - base <= ahead, f"a state at {base} cannot reach {start}"
        spans.append(_Span(at, length, start, base, read, write))
        at += length
    groups: dict[tuple[int, ...], list[_Span]] = {}
    for i, span in enumerate(spans):
        alike = (span.length, span.start - span.base, bool(span.start)) if span.length <= ahead else (i,)
        groups.setdefault((i,) if exact else alike, []).append(span)
    found = {}
    for group in groups.values():
        results = (
            [_one(rule, rows_TX, planes, group[0], exact)] if len(group) == 1 else _alike(rule, rows_TX, planes, group)
        )
        found |= {span.first: result for span, result in zip(group, results)}
    return torch.cat([found[span.first] for span in spans])


@dataclass(frozen=True, slots=True)
class _Span:
    """A span of a step: its first row there, its length and first position, the base of the page that it reads, and the
    page that it writes if it is longer than the look-ahead."""

    first: int
    length: int
    start: int
    base: int
    read: int
    write: int

    def rows(self, rows_TX: torch.Tensor) -> torch.Tensor:
        return rows_TX[self.first : self.first + self.length]


def _one(rule: Rule, rows_TX: torch.Tensor, planes: dict[str, torch.Tensor], span: _Span, exact: bool) -> torch.Tensor:
    """Results of one span."""
    aheads, rows, start, base, read = planes["ahead"], span.rows(rows_TX), span.start, span.base, span.read
    kept = {name: plane[read] for name, plane in planes.items() if name not in OWN}
    short = span.length <= aheads.shape[1]
    if not start:
        kept = {name: torch.zeros_like(value) for name, value in kept.items()}
    if start > base:
        _, kept = rule.run(aheads[read, : start - base], kept, base, True)
    if short and (start > base or not start):
        _write(planes, read, kept, start)
        kept = {name: planes[name][read] for name in kept}  # as a step that runs again reads it
    out, kept = rule.run(rows, kept, start, short or exact)
    if short:
        aheads[read, : span.length] = rows
    else:
        _write(planes, span.write, kept, start + span.length)
    return out


def _alike(rule: Rule, rows_TX: torch.Tensor, planes: dict[str, torch.Tensor], spans: list[_Span]) -> torch.Tensor:
    """Results [S, T, ...] of short spans of one length, with as many rows to fold, in one run: as many launches as for
    one of them. Not for exact mode, because a row's bits depend on how many there are."""
    first, run = spans[0], torch.func.vmap(lambda rows, kept: rule.run(rows, kept, 0, True))
    pages = torch.tensor([span.read for span in spans], device=rows_TX.device)
    kept = {name: plane[pages] for name, plane in planes.items() if name not in OWN}
    if not first.start:
        kept = {name: torch.zeros_like(value) for name, value in kept.items()}
    if first.start > first.base:
        _, kept = run(planes["ahead"][pages, : first.start - first.base], kept)
    if first.start > first.base or not first.start:
        starts = torch.tensor([[span.start] for span in spans], device=rows_TX.device)
        _write(planes, pages, kept, starts)
        kept = {name: planes[name][pages] for name in kept}
    rows = torch.stack([span.rows(rows_TX) for span in spans])
    out, _ = run(rows, kept)
    planes["ahead"][pages, : first.length] = rows
    return out


def _write(planes: dict[str, torch.Tensor], page: int | torch.Tensor, kept: Kept, at: int | torch.Tensor) -> None:
    """Let a page, or several, keep this, with a base of ``at``."""
    for name, value in kept.items():
        planes[name][page] = value.to(planes[name].dtype)
    planes["position"][page] = at


def moved(tail: torch.Tensor, rows_TC: torch.Tensor) -> torch.Tensor:
    """The last rows, as many as ``tail`` [J - 1, C] has, after ``rows_TC`` [T, C]."""
    return torch.cat((tail, rows_TC.to(tail.dtype)))[len(rows_TC) :]


class RecurrentMixer:
    """Mixer of a recurrent layer: a recurrence between two products.

    A mixer has ``o``, the last product; ``exact``; ``results``, as `kvasir.attention.backend.Recurrence` has it; its
    ``run``; and the two methods below.
    """

    native = False  # no C kernel runs recurrences
    sinks_H = None
    o: Linear

    def project(self, x_TE: torch.Tensor, norm: RMSNorm | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [T, X] that the recurrence reads, and what ``finish`` needs of each row, of x or of ``norm``(x)."""
        raise NotImplementedError

    def finish(self, out_T: torch.Tensor, gate_T: torch.Tensor) -> torch.Tensor:
        """The input of the last product: the recurrence's results, gated, in the model's dtype."""
        raise NotImplementedError

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
        the result. ``wanted_M``: the rows of the result, and of ``residual_TE``; None: all. No use is made of
        ``angles``."""
        # A captured step of short spans gives the rows of chains ancestors, too.
        chains = batch.ancestors is None or batch.together is not None
        assert chains, "drafts of a model with recurrent layers are chains"
        rows_TX, gate_T = self.project(x_TE, norm)
        out_T = backend.run_recurrence(self, rows_TX, cache, batch)
        if wanted_M is not None:
            out_T, gate_T = out_T.index_select(0, wanted_M), gate_T.index_select(0, wanted_M)
        return self.o(self.finish(out_T, gate_T), residual_TN=residual_TE)


def own_state(writes: bool) -> None:
    """Raise ConfigError for a layer that should read another layer's cache."""
    if not writes:
        raise ConfigError(
            "a recurrent layer keeps a state of its own and cannot read another layer's. Leave out cache_of for this "
            "layer."
        )
