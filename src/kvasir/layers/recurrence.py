"""A step of any recurrence over state pages, in plain torch, so that the step may be run again.

A mixer gives a `Rule`: what rows do to what a sequence keeps. ``step`` does the rest, as
`kvasir.kernels.gated_delta.step_reference` does for its own rule. What a page keeps stands at the page's position. The
rows from there to the span's start are folded in first. A span of up to ``LOOK_AHEAD`` rows then leaves its own rows to
the look-ahead slots; a longer one writes another page.

It runs span after span and reads positions on the host. So it cannot be captured, and mixers that use it say
``captured = False``.
"""

from __future__ import annotations

from typing import Protocol

import torch

from kvasir.errors import ConfigError
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
    """Results [T, ...] fp32 of a step's rows, span after span. ``table_SW``: int32, its first two columns are the pages
    that each span reads and writes. ``exact``: row by row, whatever the length."""
    starts, lengths, pages = batch.starts, batch.lengths, [tuple(pair) for pair in table_SW[:, :2].tolist()]
    if batch.span_lengths is not None:  # every row has a span
        lengths = batch.span_lengths.tolist()
        firsts = [row for row, length in enumerate(lengths) if length]
        starts, lengths, pages = ([part[row] for row in firsts] for part in (starts, lengths, pages))
    found, at = [], 0
    for (read, write), start, length in zip(pages, starts, lengths):
        rows, at = rows_TX[at : at + length], at + length
        found.append(_span(rule, rows, planes, read, write, start, exact))
    return torch.cat(found)


def _span(
    rule: Rule, rows_TX: torch.Tensor, planes: dict[str, torch.Tensor], read: int, write: int, start: int, exact: bool
) -> torch.Tensor:
    """Results of one span."""
    aheads, position, length = planes["ahead"], planes["position"], len(rows_TX)
    kept = {name: plane[read] for name, plane in planes.items() if name not in OWN}
    short, base = length <= aheads.shape[1], int(position[read])
    if start:
        assert 0 <= start - base <= aheads.shape[1], f"a state at {base} cannot reach {start}"
    else:  # whatever the page holds belongs to an earlier sequence
        base, kept = 0, {name: torch.zeros_like(value) for name, value in kept.items()}
    if start > base:
        _, kept = rule.run(aheads[read, : start - base], kept, base, True)
    if short and (start > base or not start):
        _write(planes, read, kept, start)
        kept = {name: planes[name][read] for name in kept}  # as a step that runs again reads it
    out, kept = rule.run(rows_TX, kept, start, short or exact)
    if short:
        aheads[read, :length] = rows_TX
    else:
        _write(planes, write, kept, start + length)
    return out


def _write(planes: dict[str, torch.Tensor], page: int, kept: Kept, position: int) -> None:
    for name, value in kept.items():
        planes[name][page] = value
    planes["position"][page] = position


def moved(tail: torch.Tensor, rows_TC: torch.Tensor) -> torch.Tensor:
    """The last rows, as many as ``tail`` [J - 1, C] has, after ``rows_TC`` [T, C]."""
    return torch.cat((tail, rows_TC.to(tail.dtype)))[len(rows_TC) :]


def own_state(writes: bool) -> None:
    """Raise ConfigError for a layer that should read another layer's cache."""
    if not writes:
        raise ConfigError(
            "a recurrent layer keeps a state of its own and cannot read another layer's. Leave out cache_of for this "
            "layer."
        )
