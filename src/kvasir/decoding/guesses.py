"""Guesses: what rows of guests draw, for the drafter that put them there.

A guest row draws as the rows of its sequence do: with their temperature, filters, bias and noise. Conditions that
depend on tokens which nobody knows yet (penalties, bad words, grammars, processors) do not hold for it: a guess that
they rule out is not accepted.

Legend: S sampled rows, G guest rows, V vocabulary, K guesses a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvasir.decoding.rows import TEMPERATURE, Rows
from kvasir.kernels.guess import MOST, guess_rows
from kvasir.types import Guess, Guessing, Span


def within(wanted: Guessing) -> bool:
    """Whether a captured step computes these guesses itself."""
    return wanted.coupled and wanted.count <= MOST


def guess(
    x_SV: torch.Tensor,
    tokens_S: torch.Tensor,
    rows: Rows,
    at: np.ndarray,
    wanted: Guessing,
    send: Callable[[np.ndarray], torch.Tensor],
) -> torch.Tensor:
    """Return [2 K, G] fp32, ids and then probabilities, of the rows ``at`` of ``x`` [S, V], constrained logits; the
    tokens that were drawn in all rows are ``tokens`` [S], their numbers and streams in ``rows``."""
    place = send(at)
    x_GV = x_SV.index_select(0, place)
    temperature_G = send(rows.values[at, TEMPERATURE].astype(np.float32))
    if wanted.coupled:
        drawn_G = tokens_S.index_select(0, place)
        streams_G, positions_G = send(rows.streams[at]), send(rows.positions[at])
        whole_G = torch.ones_like(drawn_G, dtype=torch.bool)
        return guess_rows(
            x_GV, drawn_G, temperature_G, streams_G, positions_G, whole_G, x_GV.shape[1], min(wanted.count, MOST)
        )
    scale_G1 = torch.where(temperature_G > 0, temperature_G, 1.0)[:, None]
    weights_GK, ids_GK = (x_GV.float() / scale_G1).softmax(-1).topk(min(wanted.count, x_GV.shape[1]), -1)
    return torch.cat([ids_GK.T.float(), weights_GK.T])


def listed(found_2KG: np.ndarray) -> list[list[Guess]]:
    """The guesses of each row as pairs of a token and its probability; none where the model's output holds NaN."""
    count = len(found_2KG) // 2
    ids, chances = found_2KG[:count].T.astype(np.int64).tolist(), found_2KG[count:].T.tolist()
    good = np.isfinite(found_2KG).all(0).tolist()
    return [[(i, min(1.0, p)) for i, p in zip(*pair)] if whole else [] for *pair, whole in zip(ids, chances, good)]


def deal(spans: Sequence[Span], rows: list[list[Guess]]) -> list[list[list[Guess]] | None]:
    """Give each span with guests its own part of all guest rows, in order; None for the others."""
    found, first = [], 0
    for span in spans:
        count = len(span.guests)
        found.append(rows[first : first + count] if count else None)
        first += count
    return found
