"""The served model's first layers as a drafter's model: its weights, its pages, and its final norm and head after an
early layer.

Keys and values of these layers are those of the whole model, so committed tokens are already there. The drafter has
nothing to catch up with, and needs no notice of prefix hits and preemptions. Drafted rows go to the slots after the
last known token. The verifying step writes these again, in all layers, before it reads them.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from kvasir.decoding.sampler import Sampler
from kvasir.engine.pages.pages import PageManager
from kvasir.engine.schedule.spans import ONE_SAMPLE
from kvasir.engine.ways.eager_steps import EagerSteps
from kvasir.engine.ways.runner import Runner
from kvasir.engine.ways.step_way import StepParts
from kvasir.errors import ConfigError
from kvasir.speculation.drafter import Ask
from kvasir.types import PageCopy, Sequence, Span, SpanResult, Status


class EarlyExit:
    """Implementation of ``drafter.ExitModel``, usable once it is bound. ``head_layers`` is the head's cost in
    layers."""

    def __init__(self, exits: tuple[int, ...]) -> None:
        self.exits = exits
        self.num_layers, self.head_layers = 0, 0.0

    def bind(self, served: Runner, pages: PageManager, max_rows: int, max_model_len: int) -> None:
        """Take the served model's runner and pages. Raises ConfigError for an exit that the model does not have."""
        if served.parts.packer.states:
            raise ConfigError(
                "this model has recurrent layers, whose states the first layers alone cannot move on. Choose another "
                "drafter, such as --drafter suffix."
            )
        self._model, self._pages, self._max_rows = served.model, pages, max_rows
        self._max_model_len = max_model_len
        self.num_layers = len(served.model.spec.layers)
        layers = self.num_layers
        self.exits = self.exits or tuple(sorted({max(1, layers // 4), max(1, layers // 2), max(1, 3 * layers // 4)}))
        if wrong := [e for e in self.exits if not 0 < e < layers]:
            raise ConfigError(
                f"the model has {layers} layers, so a draft cannot exit after {wrong[0]}; "
                f"choose exits from 1 to {layers - 1}"
            )
        weights = sum(slot.target.numel() for name, slot in served.model.slots().items() if name.startswith("layers."))
        head = served.model.head.num_outputs * served.model.head.num_inputs
        self.head_layers = head / max(1.0, weights / self.num_layers)
        sampler = Sampler(
            served.sampler.vocab_size,
            served.sampler.tokenizer_size,
            served.sampler.max_seqs,
            served.device,
            served.sampler.eos_ids,
        )
        self._parts = StepParts(
            served.model, served.pool, served.backend, sampler, served.device, max_model_len=self._max_model_len
        )
        self._ways: dict[int, EagerSteps] = {}  # by number of layers
        self._shadows: dict[Sequence, Sequence] = {}
        self._free_seats = list(range(served.sampler.max_seqs))

    def draw(self, asks: list[Ask], num_layers: int, stops: list[float]) -> list[tuple[list[int], list[float]]]:
        """Draw up to ``max_depth`` tokens after the known ones of each sequence by the first ``num_layers`` layers,
        with its own parameters and noise. Returns tokens and their probabilities; none where no page is left for them.
        The first one below ``stops`` is the last."""
        way = self._way(num_layers)
        ready: dict[Sequence, int] = {}
        stop_of = {ask.seq: stop for ask, stop in zip(asks, stops)}
        for ask in asks[: self._max_rows]:
            length = min(ask.max_depth, self._max_model_len - len(ask.seq.tokens))
            if (
                length > 0
                and ask.seq.num_computed == len(ask.seq.tokens) - 1
                and self._room(ask.seq, length, len(asks))
            ):
                ready[ask.seq] = length
        shadows = {seq: self._shadow(seq) for seq in ready}
        sure: dict[Sequence, list[float]] = {seq: [] for seq in ready}
        for depth in range(max(ready.values(), default=0)):
            busy = [seq for seq in shadows if ready[seq] > depth]
            if not busy:
                break
            spans = [
                Span(shadows[seq], shadows[seq].num_computed, 1, want=ONE_SAMPLE, seat=shadows[seq].seat)
                for seq in busy
            ]
            for seq, span, result in zip(busy, spans, way.run(spans).read()):
                token, chance = _drawn(result)
                if token >= 0:
                    span.seq.tokens.append(token)
                    sure[seq].append(chance)
                if chance < stop_of[seq]:
                    ready[seq] = 0
                span.seq.num_computed += 1
        return [
            (shadows[ask.seq].tokens[len(ask.seq.tokens) :], sure[ask.seq]) if ask.seq in shadows else ([], [])
            for ask in asks
        ]

    @torch.inference_mode()
    def judge(self, pieces: list[tuple[Sequence, int, torch.Tensor]]) -> list[list[list[tuple[int, float]]]]:
        """The token that each exit would have drawn and its probability, by piece, exit and row, with one call of the
        head for all."""
        spans: list[Span] = []
        for seq, start, hidden_RXE in pieces:
            shadow, count = self._shadow(seq), len(hidden_RXE)
            # Every row is drawn by itself. The later rows are conditioned on the tokens after the first, given as a
            # draft.
            shadow.tokens, shadow.draft = seq.tokens[: start + 1], seq.tokens[start + 1 : start + count]
            spans += [Span(shadow, start + i, 1, want=ONE_SAMPLE, seat=shadow.seat) for i in range(count)]
        hidden_ME = torch.cat([hidden_RXE for _, _, hidden_RXE in pieces]).transpose(0, 1).flatten(0, 1)  # exit by exit
        sampler = self._parts.sampler
        output = sampler.sample(lambda a, b: self._model.logits(hidden_ME[a:b]), sampler.pack(spans * len(self.exits)))
        drawn = list(map(_drawn, output.read()))
        found, first = [], 0
        for _, _, hidden_RXE in pieces:
            found.append([drawn[at : at + len(hidden_RXE)] for at in range(first, len(drawn), len(spans))])
            first += len(hidden_RXE)
        return found

    def close(self, seq: Sequence) -> None:
        shadow = self._shadows.pop(seq, None)
        if shadow is not None:
            self._parts.close(shadow.seat)
            self._free_seats.append(shadow.seat)

    def _way(self, num_layers: int) -> EagerSteps:
        """The way to run a step of the first ``num_layers`` layers."""
        if num_layers not in self._ways:
            self._ways[num_layers] = EagerSteps(self._parts.first_layers(num_layers))
        return self._ways[num_layers]

    def _room(self, seq: Sequence, length: int, num_asks: int) -> bool:
        """Make room for the anchor and all drafted tokens but the last. A draft takes no page that a running sequence
        may need."""
        size, last = self._pages.page_slots, len(seq.tokens) - 1
        if -(-(last + length) // size) > len(seq.tables[0]) and self._pages.num_free < 2 * num_asks:
            return False
        copies: list[PageCopy] = []
        if not self._pages.grow(seq, last + length, copies):
            return False
        if copies:
            self._parts.pool.copy(copies)
        return True

    def _shadow(self, seq: Sequence) -> Sequence:
        """The sequence as drafting sees it: with the same noise and pages, and plain parameters."""
        shadow = self._shadows.get(seq)
        if shadow is None:
            params = dataclasses.replace(
                seq.request.params,
                n=1,
                presence_penalty=0.0,
                frequency_penalty=0.0,
                repetition_penalty=1.0,
                bad_words=(),
                grammar=None,
                logprobs=0,
                logprobs_mode="raw",
                prompt_logprobs=None,
                confidence=0,
                score_from=None,
                min_tokens=0,
            )
            shadow = Sequence(dataclasses.replace(seq.request, params=params, bad_words=[], processors=[], emitted=[]))
            shadow.stream, shadow.tokens = seq.stream, list(seq.tokens)
            if not self._free_seats:  # take those of preempted sequences
                for other in [other for other in self._shadows if other.status is not Status.RUNNING]:
                    self.close(other)
            shadow.status, shadow.seat = Status.RUNNING, self._free_seats.pop()
            self._parts.open(shadow)
            self._shadows[seq] = shadow
        shadow.tokens, shadow.tables, shadow.num_computed = list(seq.tokens), seq.tables, len(seq.tokens) - 1
        shadow.draft, shadow.forgotten = [], seq.forgotten
        return shadow


def _drawn(result: SpanResult) -> tuple[int, float]:
    """The token of a span of one row and its probability before temperature; (-1, 0) where the logits held no numbers:
    it was a guess."""
    return (result.tokens[0], math.exp(result.logprobs[0].logprob)) if result.tokens else (-1, 0.0)
