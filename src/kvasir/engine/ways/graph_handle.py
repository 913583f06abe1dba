"""Results of a decode step over static buffers, once it is read: a result for each span, chains and trees walked.

Legend: T rows of a step.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np

from kvasir.decoding.guesses import deal, listed
from kvasir.decoding.sampler import NUMERIC_ERROR
from kvasir.decoding.walk import resolve_span
from kvasir.engine.ways.graph_buffers import Stage
from kvasir.types import Span, SpanResult, TokenLogprob


class DecodeHandle:
    """A launched decode step of ``size`` rows. ``words``: with drafts, what its rows started from (``draft_words``).
    ``reports``: whether it reports; ``num_guesses``: guesses of each guest row, where spans have guests."""

    __slots__ = ("_stage", "_size", "_spans", "_words", "_reports", "_num_guesses")

    def __init__(
        self,
        stage: Stage,
        size: int,
        spans: list[Span],
        words: np.ndarray | None = None,
        reports: bool = False,
        num_guesses: int = 0,
    ) -> None:
        self._stage, self._size, self._spans, self._words, self._reports = stage, size, spans, words, reports
        self._num_guesses = num_guesses

    def read(self) -> list[SpanResult]:
        """Wait for the step; one result per span."""
        if self._words is not None:
            results = self._walked(self._words[2], self._words[4])
            return self._guessed(results, self._words[7]) if self._num_guesses else results
        ids, largest, best = self._stage.read(self._size)[:, : len(self._spans)]
        results = [SpanResult([token]) for token in ids.astype(np.int64).tolist()]
        if not (np.isfinite(largest).all() and np.isfinite(best).all()):
            for i in range(len(results)):
                if not largest[i] < np.inf or best[i] == -np.inf:  # under no constraint, or it would not be drawn here
                    results[i] = SpanResult(error=NUMERIC_ERROR)
        return self._reported(results, range(len(results))) if self._reports else results

    def _walked(self, tokens_T: np.ndarray, place_T: np.ndarray) -> list[SpanResult]:
        """Results of spans with drafts. ``tokens``: the token of each row; ``place``: the row's in its span. All chains
        are walked at once: a chain goes on as long as a row holds the token that was drawn from the row before it."""
        ids, largest, best = self._stage.read(self._size)[:, : len(tokens_T)]
        ids = ids.astype(np.int64)
        drawn = ids.tolist()
        errors = dict.fromkeys(np.flatnonzero(~(largest < np.inf) | (best == -np.inf)).tolist(), NUMERIC_ERROR)
        stops = place_T == 0
        firsts = np.flatnonzero(stops)
        stops[1:] |= tokens_T[1:] != ids[:-1]
        ends = np.append(np.flatnonzero(stops), len(drawn))
        # The firsts are among the ends, so a walk ends at the one behind its own.
        last = ends[np.searchsorted(ends, firsts) + 1].tolist()
        results = []
        for span, first, end in zip(self._spans, firsts.tolist(), last):
            if errors or span.parents:
                tokens = tokens_T[first : first + span.length].tolist() if span.length > 1 else []
                results.append(resolve_span(span, tokens, range(first, first + span.length), drawn, errors, {}, {}))
            else:
                path = list(range(end - first)) if span.length > 1 else None
                results.append(SpanResult(drawn[first:end], path=path))
        return self._reported(results, firsts.tolist()) if self._reports else results

    def _guessed(self, results: list[SpanResult], guests_T: np.ndarray) -> list[SpanResult]:
        """The results with what the guest rows guessed. ``guests_T``: each row's guest, -1: none."""
        rows = np.flatnonzero(guests_T >= 0)
        found = deal(self._spans, listed(self._stage.guesses(self._size, self._num_guesses)[:, rows]))
        for result, guesses in zip(results, found):
            result.guesses = None if result.error else guesses
        return results

    def _reported(self, results: list[SpanResult], firsts: Many[int]) -> list[SpanResult]:
        """The results with the log-probabilities of the spans that ask for them. ``firsts``: each span's first row."""
        logprobs, ranks, confidences = self._stage.reports(self._size).tolist()
        for span, result, first in zip(self._spans, results, firsts):
            params = span.seq.request.params
            if params.logprobs is not None and result.error is None:
                rows = [first + i for i in result.path] if result.path else (first,)
                result.logprobs = [
                    TokenLogprob(token, logprobs[m], int(ranks[m]), [], confidences[m] if params.confidence else None)
                    for token, m in zip(result.tokens, rows)
                ]
        return results
