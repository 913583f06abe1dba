"""Steps in which a KV policy watches the attention of some rows: layer by layer, with the log-sum-exp of each row.

The weight that a row gives a key is exp(scale q.k - lse), so nothing is computed twice but the products of queries and
keys. This is plain torch, the definition of the evidence; a kernel that gives the same numbers may take its place.

Legend: T rows of a step, L rows of a span, H query heads, G KV heads, R query heads of a KV head, N tokens, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvasir.attention.backend import AttentionBackend, AttentionSpec
from kvasir.engine.pages.page_pool import pages_for
from kvasir.engine.ways.eager_steps import EagerSteps
from kvasir.engine.ways.step_way import StepParts
from kvasir.kv.codec import LayerCache
from kvasir.kv.policy import KVPolicy, Memory
from kvasir.types import Handle, Span, StepBatch

BLOCK = 1 << 26  # weights that are shown at once


@dataclass(frozen=True, slots=True)
class Watched:
    """A span whose rows are watched: its place in the step, its first row there, and who watches from which of its
    rows on."""

    index: int
    row: int
    span: Span
    policies: list[tuple[KVPolicy, int]]


class WatchedSteps(EagerSteps):
    """Takes steps with rows whose attention some policy watches."""

    def __init__(self, parts: StepParts) -> None:
        super().__init__(parts)
        self._watched: list[Watched] = []

    @classmethod
    def of(cls, parts: StepParts) -> WatchedSteps | None:
        """This way for a model whose policies watch attention; None: none does."""
        return cls(parts) if parts.policy is not None and parts.policy.observers else None

    def takes(self, spans: list[Span]) -> bool:
        self._watched, row = [], 0
        for index, span in enumerate(spans):
            seq, plan = span.seq, span.seq.forgetting
            if plan is not None and (policies := plan.stack.watchers(plan, seq.num_prompt, span.start, span.length)):
                self._watched.append(Watched(index, row, span, policies))
            row += span.length
        return bool(self._watched)

    def run(self, spans: list[Span]) -> Handle:
        backend: Any = _Watching(self._parts.backend, self._parts, self._watched)
        return self.run_with(backend, spans)


class _Watching:
    """An attention backend that shows the attention of watched spans to their policies."""

    def __init__(self, backend: AttentionBackend, parts: StepParts, watched: list[Watched]) -> None:
        self._backend, self._watched = backend, watched
        self._exact = parts.model.place.exact
        self._layers = {id(parts.pool.layer(i)): i for group in parts.pool.groups for i in group.layers}
        self._windows = {g for g, group in enumerate(parts.pool.groups) if group.window is not None}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def run(
        self,
        q_THD: torch.Tensor,
        cache: LayerCache,
        spec: AttentionSpec,
        batch: StepBatch,
        *,
        sinks_H: torch.Tensor | None = None,
        out_THD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`AttentionBackend.run`, watched."""
        if cache.group in self._windows:
            return self._backend.run(q_THD, cache, spec, batch, sinks_H=sinks_H, out_THD=out_THD)  # type: ignore
        out_THD, lse_TH = self._backend.run(
            q_THD, cache, spec, batch, sinks_H=sinks_H, return_lse=True, out_THD=out_THD
        )
        layer = self._layers[id(cache)]
        for watched in self._watched:
            span, plan, start = watched.span, watched.span.seq.forgetting, batch.starts[watched.index]
            if plan.seen.get(layer, 0) > span.start:
                continue  # the step failed behind this layer, and is run again
            plan.seen[layer] = span.start + span.length
            pages = batch.tables[cache.group][watched.index, : pages_for(start + span.length, cache.page_slots)].long()
            for policy, first in watched.policies:
                # The window of a prompt is shown whole, others in parts that take a bounded amount of memory.
                whole, weights = policy.evidence == "last_rows", spec.num_heads * (start + span.length)
                for at in range(first, span.length, step := span.length if whole else max(1, BLOCK // weights)):
                    length = min(step, span.length - at)
                    rows, count = slice(watched.row + at, watched.row + at + length), start + at + length
                    facts = span.seq.num_prompt, span.start + at, span.seq.stream, plan.notes
                    memory = Memory(layer, cache, pages, count, *facts)
                    shown = q_THD[rows], memory.keys(), spec, lse_TH[rows], start + at
                    policy.observe(memory, attention(*shown, by_row=self._exact), span.start + at)
        return out_THD


def attention(
    q_LHD: torch.Tensor, k_GND: torch.Tensor, spec: AttentionSpec, lse_LH: torch.Tensor, start: int, by_row: bool
) -> torch.Tensor:
    """The weights fp32 [G, R, L, N] that the rows of a span give the tokens in the cache, of which the last L are its
    own. ``start``: tokens before them. ``by_row``: row by row, so that a weight has the same bits in any span."""
    length, count = q_LHD.shape[0], k_GND.shape[1]
    q_GRLD = q_LHD.float().view(length, spec.num_kv_heads, -1, spec.head_dim).permute(1, 2, 0, 3)
    k_GDN, weights = k_GND.float().transpose(1, 2), q_GRLD.new_zeros(*q_GRLD.shape[:3], count)
    lse_GRL = lse_LH.view(length, spec.num_kv_heads, -1).permute(1, 2, 0)
    for row in range(length) if by_row else ():
        scores_GRN = q_GRLD[:, :, row] @ k_GDN[..., : start + row + 1] * spec.scale
        weights[:, :, row, : start + row + 1] = _of(scores_GRN, spec, lse_GRL[..., row])
    if not by_row:
        scores_GRLN = (q_GRLD.flatten(1, 2) @ k_GDN).view(weights.shape) * spec.scale
        places = torch.arange(count, device=k_GND.device)
        unseen_LN = places > places[start:, None]
        weights = _of(scores_GRLN, spec, lse_GRL).masked_fill_(unseen_LN, 0)
    return weights


def _of(scores: torch.Tensor, spec: AttentionSpec, lse: torch.Tensor) -> torch.Tensor:
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    return torch.exp(scores - lse[..., None])
