"""Pooling on the device: hidden states of a prompt's rows to one embedding or score.

A prompt may be computed in chunks, so each chunk adds its rows to the sum of those before it. Sums are kept by the
position where they end, not overwritten: a step that failed is run again, and must find the sum that it started from.

Legend: M rows with a wanted state, K spans that pool, E model dim, W outputs (E, or the labels of the head).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kvasir.decoding.sampler import NUMERIC_ERROR, to_host
from kvasir.models.decoder import Decoder
from kvasir.types import Handle, Pooling, Span, SpanResult

# Smallest length that an embedding is divided by, as in torch and sentence-transformers.
TINY = 1e-12


class Pooler:
    """The pooling of one model, with the sums of prompts that are computed in part, by seat. ``send`` brings a small
    host tensor to the device without waiting."""

    def __init__(self, model: Decoder, pooling: Pooling, send: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.pooling = pooling
        self._model, self._send = model, send
        self._sums: dict[int, dict[int, torch.Tensor]] = {}  # seat -> position where the sum ends -> [E] fp32

    @property
    def all_rows(self) -> bool:
        """Whether the hidden state of every row is wanted."""
        return self.pooling.rows == "mean"

    def pool(self, spans: list[Span], hidden_ME: torch.Tensor) -> Pooled | None:
        """Add the rows of these spans to their sums, and launch the outputs of those that end. ``hidden_ME``: states of
        the step's wanted rows before the final norm. None: no span pools."""
        mine = [span for span in spans if "pool" in span.want]
        if not mine:
            return None
        rows: list[int] = []
        others: list[int] = []
        at = 0
        for span in spans:
            count = sum(map(len, span.want.values()))
            (rows if "pool" in span.want else others).extend(range(at, at + count))
            at += count
        states_ME = self._rows(hidden_ME, rows)
        sums_KE = self._sum(mine, self._model.norm(states_ME).float() if rows else states_ME.float())
        ended = [i for i, span in enumerate(mine) if span.ends_draw]
        ends = [mine[i] for i in ended]
        found = self._finish(ends, self._rows(sums_KE, ended)) if ended else sums_KE[:0]
        return Pooled(ends, found, self._rows(hidden_ME, others))

    def close(self, seat: int) -> None:
        """Forget the sums of a seat, which belongs to another sequence or starts again."""
        self._sums.pop(seat, None)

    def _rows(self, x: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """These rows of ``x``, which ascend."""
        if rows == list(range(len(rows))):
            return x[: len(rows)]
        return x.index_select(0, self._send(torch.tensor(rows)))

    def _sum(self, spans: list[Span], states_ME: torch.Tensor) -> torch.Tensor:
        """The sums [K, E] of the spans' own rows and of the rows before them."""
        counts = [len(span.want["pool"]) for span in spans]
        if all(count == 1 for count in counts):
            sums_KE = states_ME
        else:
            lengths = self._send(torch.tensor(counts))
            sums_KE = torch.segment_reduce(states_ME, "sum", lengths=lengths, unsafe=True, initial=0)
        for i, span in enumerate(spans):
            if self.pooling.rows == "last" or span.ends_draw and not span.start:
                continue
            kept = self._sums.setdefault(span.seat, {})
            if span.start:
                sums_KE[i] += kept[span.start]
            for end in [end for end in kept if end < span.seq.num_computed]:
                del kept[end]
            kept[span.start + span.length] = sums_KE[i].clone()
        return sums_KE

    def _finish(self, spans: list[Span], sums_KE: torch.Tensor) -> torch.Tensor:
        """Outputs [K, W] fp32 of whole prompts. A shortened embedding is followed by zeros."""
        params, width = [span.seq.request.pooling for span in spans], sums_KE.shape[1]
        if self.all_rows:
            sums_KE = sums_KE / self._send(torch.tensor([[float(span.seq.num_prompt)] for span in spans]))
        active = [self.pooling.activation if p.use_activation is None else p.use_activation for p in params]
        on_K1 = self._send(torch.tensor(active)[:, None])
        if self.pooling.task == "score":
            scores_K1 = self._scores(sums_KE)
            return torch.where(on_K1, scores_K1.sigmoid(), scores_K1)
        sizes = [p.dimensions or width for p in params]
        if min(sizes) < width:
            kept_K1 = self._send(torch.tensor(sizes)[:, None])
            sums_KE = sums_KE * (torch.arange(width, device=sums_KE.device) < kept_K1)
        return torch.where(on_K1, F.normalize(sums_KE, dim=-1, eps=TINY), sums_KE)

    def _scores(self, states_KE: torch.Tensor) -> torch.Tensor:
        """Scores [K, 1]: of the head for classes, or how much likelier the token for yes is than that for no. Sums run
        along single rows, so that a score does not depend on its batch."""
        model = self._model

        def logit(head_E: torch.Tensor) -> torch.Tensor:
            return (states_KE * head_E.float()).sum(-1, keepdim=True)

        if self.pooling.labels:
            return logit(model.labels_LE[0])
        no, yes = self.pooling.tokens
        head_VE = model.head.dequantise()
        wanted = model.scaled(logit(head_VE[yes]))
        return wanted if no is None else wanted - model.scaled(logit(head_VE[no]))


@dataclass(slots=True)
class Pooled:
    """Vectors that a step pools. ``spans``: those whose prompts end. ``found`` [K, W] fp32: their outputs. ``rest_ME``:
    hidden states of the rows that are not pooled."""

    spans: list[Span]
    found: torch.Tensor
    rest_ME: torch.Tensor


class PooledHandle:
    """A launched step whose results bring embeddings and scores along. The copy to the host starts at once."""

    __slots__ = ("_done", "_found", "_handle", "_pooled", "_spans")

    def __init__(self, handle: Handle, spans: list[Span], pooled: Pooled) -> None:
        self._handle, self._spans, self._pooled = handle, spans, pooled
        self._found = to_host(pooled.found)
        self._done = torch.cuda.Event() if pooled.found.is_cuda else None
        if self._done is not None:
            self._done.record()

    def read(self) -> list[SpanResult]:
        results = self._handle.read()
        if self._done is not None:
            self._done.synchronize()
        rows = iter(self._found)
        ended = {id(span) for span in self._pooled.spans}
        for i, span in enumerate(self._spans):
            if id(span) in ended:
                results[i] = _result(span, next(rows))
        return results


def _result(span: Span, row: torch.Tensor) -> SpanResult:
    values = row[: span.seq.request.pooling.dimensions or len(row)]
    if not torch.isfinite(values).all():
        return SpanResult(error=NUMERIC_ERROR)
    return SpanResult(pooled=values.numpy().astype("<f4", copy=False).tobytes())
