"""A second model with its own runner, pages and prefix index: a drafter runs it next to the served model.

Every sequence has a *shadow* here: the same tokens, the same noise stream, its own page tables. Drawing is plain
decoding of shadows. Moving a counter back forgets the tokens that the served model did not accept; their slots are
written again.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import torch

from kvasir.decoding.max_accept import DRAWN, fresh_stream
from kvasir.engine.drafts.vocabularies import SameIds, Translation
from kvasir.engine.pages.pages import PageManager
from kvasir.engine.schedule.spans import next_span
from kvasir.engine.ways.device_seats import UNKNOWN
from kvasir.engine.ways.runner import Runner
from kvasir.speculation.drafter import Ask
from kvasir.speculation.tree import DraftTree
from kvasir.types import ModelInfo, PageCopy, Plan, Sequence, Span, Status


class SecondModel:
    """Implementation of ``drafter.ChainModel``.

    A sequence that finds no free page or seat takes those of the sequence whose last draft is the oldest. Where the
    vocabularies differ, shadows hold the second model's ids, and everything that callers see the served model's.
    ``keeps``: whether drafts are kept with their distributions.
    """

    tokenizer_file: Path | None = None
    keeps = False

    def __init__(self, info: ModelInfo, runner: Runner, pages: PageManager, max_rows: int, max_num_seqs: int) -> None:
        self.info = info
        self._runner, self._pages, self._max_rows = runner, pages, max_rows
        self._shadows: OrderedDict[Sequence, Sequence] = OrderedDict()  # the sequence with the oldest draft first
        self._free_seats = list(range(max_num_seqs))
        # The weights from which each token of this round's shadows was drawn; None where nobody needs them.
        self._weights: dict[Sequence, list[torch.Tensor]] | None = None
        self._ids: Translation | SameIds = SameIds()

    def translate(self, ids: Translation | None) -> None:
        """Set the translation between this model's ids and the served model's; None: they are the same."""
        self._ids = ids or SameIds()

    def draw(self, asks: Many[Ask], keep: bool = False) -> list[list[int]]:
        self._weights = {} if keep else None
        busy = {ask.seq for ask in asks}
        ready: list[tuple[Sequence, int]] = []  # shadow, tokens to draw
        left = self._max_rows
        for ask in asks:
            shadow = self._shadow(ask.seq, busy)
            length = 0 if shadow is None else min(ask.max_depth, self.info.max_model_len - len(ask.seq.tokens))
            if length > 0 and left > 0 and self._room(shadow, len(shadow.tokens) + length - 1, busy):
                ready.append((shadow, length))
                left -= len(shadow.tokens) - shadow.num_computed
        known = {shadow: len(shadow.tokens) for shadow, _ in ready}
        if keep:
            for ask in asks:
                if (shadow := self._shadows.get(ask.seq)) is not None:
                    shadow.stream = fresh_stream(ask.seq, len(ask.seq.tokens) - 1, b"draft")
        self._step([shadow for shadow, _ in ready], self._max_rows)
        ready = [(shadow, length) for shadow, length in ready if len(shadow.tokens) > known[shadow]]
        for depth in range(1, max((length for _, length in ready), default=0)):
            self._step([shadow for shadow, length in ready if length > depth], self._max_rows)
        drawn = {shadow: shadow.tokens[known[shadow] :] for shadow, _ in ready}
        if keep:
            for ask in asks:
                weights = self._weights.get(self._shadows.get(ask.seq))
                ask.seq.state[DRAWN] = (
                    -1 if weights is None else len(ask.seq.tokens) - 1,
                    weights and torch.stack(weights),
                )
        return [self._ids.to_served(drawn.get(self._shadows.get(ask.seq), [])) for ask in asks]

    def expand(self, asks: Many[Ask], trees: Many[DraftTree], first: Many[int]) -> list[torch.Tensor | None]:
        """Compute the whole tree so far as one span, since its rows are next to nothing for a small model: no state
        remains between levels but the anchor's row."""
        busy = {ask.seq for ask in asks}
        spans: dict[Sequence, Span] = {}
        left = self._max_rows
        for ask, tree, node in zip(asks, trees, first):
            known = len(ask.seq.tokens)
            if known + ask.max_depth > self.info.max_model_len:
                continue
            shadow = self._shadow(ask.seq, busy) if node < 0 else self._shadows[ask.seq]
            if shadow is None or not self._room(shadow, known + max(len(tree), ask.max_nodes if node < 0 else 0), busy):
                continue
            if node < 0:
                span = next_span(shadow, min(known - shadow.num_computed, left))
            else:
                shadow.draft, count = self._ids.to_draft(tree.tokens), 1 + len(tree)
                parents = [-1, *(1 + parent for parent in tree.parents)]
                span = Span(
                    shadow, known - 1, count, {"sample": range(1 + node, count)}, "walk", parents, seat=shadow.seat
                )
            if 0 < span.length <= left:
                spans[ask.seq] = span
                left -= span.length
        rows = self._rows(list(spans.values()))
        return [self._ids.weights(next(rows)) if ask.seq in spans and spans[ask.seq].want else None for ask in asks]

    def _rows(self, spans: list[Span]) -> Iterator[torch.Tensor]:
        """Run a step; yields the log-weights of the sampled rows of each span that has any."""
        if not spans:
            return
        kept = self._runner.sampler.kept = []
        self._runner.launch(Plan(0, spans)).read()
        for span in spans:
            span.seq.draft, span.seq.num_computed = [], min(span.start + span.length, len(span.seq.tokens))
        whole_RV, at = torch.cat(kept) if kept else None, 0
        for span in spans:
            if count := len(span.want.get("sample", ())):
                yield whole_RV[at : at + count]
                at += count

    def close(self, seq: Sequence) -> None:
        shadow = self._shadows.pop(seq, None)
        if shadow is not None:
            self._release(shadow)

    @torch.inference_mode()
    def load(self, weights: Mapping[str, Any]) -> None:
        slots = self._runner.model.slots()
        for name, tensor in weights.items():  # all of them before one is written
            if name not in slots or not torch.isfinite(tensor).all():
                raise ValueError(f"the draft model has no place for {name}, or it holds NaN or infinity")
        for name, tensor in weights.items():
            slots[name].fill(tensor)
        self._runner.weights_changed()

    # --------------------------------------------------------------------------------------------------------- shadows

    def _shadow(self, seq: Sequence, busy: set[Sequence]) -> Sequence | None:
        """The sequence's shadow, brought up to its tokens; None where there is no seat for it."""
        shadow = self._shadows.get(seq)
        if shadow is None:
            if not self._free_seats and not self._evict(busy):
                return None
            # A guess can be good without penalties and grammars, and nobody reads its reports.
            params = dataclasses.replace(
                seq.request.params,
                **self._ids.named(seq.request.params),
                n=1,
                presence_penalty=0.0,
                frequency_penalty=0.0,
                repetition_penalty=1.0,
                bad_words=(),
                grammar=None,
                logprobs=None,
                prompt_logprobs=None,
                confidence=0,
                score_from=None,
                min_tokens=0,
            )
            shadow = Sequence(dataclasses.replace(seq.request, params=params, bad_words=[], processors=[], emitted=[]))
            shadow.stream, shadow.tokens = seq.stream, list(self._ids.to_draft(seq.tokens))
            self._pages.admit(shadow, self._pages.match(shadow))
            shadow.status, shadow.seat = Status.RUNNING, self._free_seats.pop()
            self._runner.open(shadow)
            self._shadows[seq] = shadow
        else:
            # Drawn and computed tokens count up to the first one that the served model did not draw.
            computed = shadow.num_computed
            agreed, end = min(shadow.state["agreed"], computed), min(computed, len(seq.tokens) - 1)
            first = agreed
            told = self._ids.to_draft(seq.tokens[first:])
            while agreed < end and shadow.tokens[agreed] == told[agreed - first]:
                agreed += 1
            shadow.tokens[agreed:], shadow.num_computed = told[agreed - first :], agreed
            self._pages.commit(shadow)
            # The device may hold a token of this position that was not accepted.
            self._runner.seats.drawn([shadow.seat], [UNKNOWN])
            self._shadows.move_to_end(seq)
        shadow.state["agreed"] = len(seq.tokens) - 1
        return shadow

    def _room(self, shadow: Sequence, num_tokens: int, busy: set[Sequence]) -> bool:
        copies: list[PageCopy] = []
        while not self._pages.grow(shadow, num_tokens, copies):
            if not self._evict(busy):
                return False
        if copies:
            self._runner.pool.copy(copies)
        return True

    def _evict(self, busy: set[Sequence]) -> bool:
        victim = next((seq for seq in self._shadows if seq not in busy), None)
        if victim is not None:
            self.close(victim)
        return victim is not None

    def _release(self, shadow: Sequence) -> None:
        self._runner.close(shadow.seat)
        self._free_seats.append(shadow.seat)
        self._pages.release(shadow)

    def _step(self, shadows: list[Sequence], max_rows: int) -> None:
        """Compute the next rows of each shadow, within the budget. Those whose last token is among them get one more
        token."""
        spans: list[Span] = []
        for shadow in shadows:
            length = min(len(shadow.tokens) - shadow.num_computed, max_rows)
            if length > 0:
                spans.append(next_span(shadow, length))
                max_rows -= length
        if not spans:
            return
        kept = self._runner.sampler.kept = None if self._weights is None else []
        results = self._runner.launch(Plan(0, spans)).read()
        rows = iter(torch.cat(kept) if kept else ())
        for span, result in zip(spans, results):
            span.seq.num_computed += span.length
            span.seq.tokens += result.tokens[:1]
            if kept and span.want:
                self._weights.setdefault(span.seq, []).append(next(rows))
