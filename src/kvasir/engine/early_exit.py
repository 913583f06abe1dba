"""The served model's first layers as a drafter's model: its weights, its pages, a final norm and head after an early layer.

Keys and values of these layers are those of the whole model, so whatever is committed is there already: nothing is caught up
with, and a prefix hit or a preemption needs no word. Drafted rows go to the slots behind the last known token, which the
verifying step writes again, in all layers, before it reads them.
"""

from __future__ import annotations

import copy
import dataclasses

from kvasir.decoding.sampler import Sampler
from kvasir.engine.build import Built
from kvasir.engine.pages import PageManager
from kvasir.engine.runner import Runner
from kvasir.errors import ConfigError
from kvasir.models.decoder import Decoder
from kvasir.speculation.drafter import Ask
from kvasir.types import PageCopy, Plan, Sequence, Span, Status


class EarlyExit:
    """Implements ``drafter.ExitModel``, once it is bound. ``head_layers``: what the head costs, in layers."""

    def __init__(self, exits: tuple[int, ...]) -> None:
        self.exits = exits
        self.num_layers, self.head_layers = 0, 0.0

    def bind(self, built: Built, pages: PageManager) -> None:
        """The served model and its pages are there."""
        served = built.runner
        self._model, self._pages, self._max_rows = served.model, pages, built.max_rows
        self._max_model_len = built.info.max_model_len
        self.num_layers = len(served.model.spec.layers)
        layers = self.num_layers
        self.exits = self.exits or tuple(sorted({max(1, layers // 4), max(1, layers // 2), max(1, 3 * layers // 4)}))
        if wrong := [e for e in self.exits if not 0 < e < layers]:
            raise ConfigError(f"layer_skip: the model has {layers} layers, so it cannot exit after {wrong[0]}; choose from 1 to {layers - 1}")
        weights = sum(slot.target.numel() for name, slot in served.model.slots().items() if name.startswith("layers."))
        self.head_layers = served.model.head_VE.numel() / max(1.0, weights / self.num_layers)
        sampler = Sampler(served.sampler.vocab_size, served.sampler.tokenizer_size, served.sampler.max_seqs, served.device, served.sampler.eos_ids)
        self._runner = Runner(served.model, served.pool, served.backend, sampler, served.device, max_model_len=self._max_model_len)
        self._runner.native = self._runner.tapes = None  # they run all of a model's layers
        self._models: dict[int, Decoder] = {}
        self._shadows: dict[Sequence, Sequence] = {}
        self._free_rows = list(range(served.sampler.max_seqs))

    def draw(self, asks: list[Ask], num_layers: int) -> list[list[int]]:
        """For each, up to ``max_depth`` tokens after the known ones, by the first ``num_layers`` layers, drawn with the
        sequence's own parameters and noise; none where no page is left for them."""
        self._runner.model = self._cut(num_layers)
        self._runner.caches = [self._runner.pool.layer(i) for i in range(num_layers)]
        ready: dict[Sequence, int] = {}
        for ask in asks[:self._max_rows]:
            length = min(ask.max_depth, self._max_model_len - len(ask.seq.tokens))
            if length > 0 and ask.seq.num_computed == len(ask.seq.tokens) - 1 and self._room(ask.seq, length, len(asks)):
                ready[ask.seq] = length
        shadows = {seq: self._shadow(seq) for seq in ready}
        for depth in range(max(ready.values(), default=0)):
            spans = [Span(shadow, shadow.num_computed, 1, want={"sample": range(1)}, row=shadow.row)
                     for seq, shadow in shadows.items() if ready[seq] > depth]
            for span, result in zip(spans, self._runner.launch(Plan(0, spans)).read()):
                if not result.tokens:  # no number came out: so be it, it was only a guess
                    ready[next(seq for seq, shadow in shadows.items() if shadow is span.seq)] = 0
                span.seq.tokens += result.tokens
                span.seq.num_computed += 1
        return [shadows[ask.seq].tokens[len(ask.seq.tokens):] if ask.seq in shadows else [] for ask in asks]

    def close(self, seq: Sequence) -> None:
        shadow = self._shadows.pop(seq, None)
        if shadow is not None:
            self._runner.close(shadow.row)
            self._free_rows.append(shadow.row)

    def _cut(self, num_layers: int) -> Decoder:
        """The model of its first layers. Not a copy: every weight is the same tensor."""
        if num_layers not in self._models:
            model = copy.copy(self._model)
            model.spec = dataclasses.replace(model.spec, layers=model.spec.layers[:num_layers])
            model.blocks, model.rope_of = model.blocks[:num_layers], model.rope_of[:num_layers]
            self._models[num_layers] = model
        return self._models[num_layers]

    def _room(self, seq: Sequence, length: int, num_asks: int) -> bool:
        """Slots for the anchor and all drafted tokens but the last. A draft takes no page that a running sequence may need."""
        size, last = self._pages.page_slots, len(seq.tokens) - 1
        if -(-(last + length) // size) > len(seq.tables[0]) and self._pages.num_free < 2 * num_asks:
            return False
        copies: list[PageCopy] = []
        if not self._pages.grow(seq, last + length, copies):
            return False
        if copies:
            self._runner.pool.copy(copies)
        return True

    def _shadow(self, seq: Sequence) -> Sequence:
        """The sequence as the drafting runner sees it: the same noise and pages, plain parameters."""
        shadow = self._shadows.get(seq)
        if shadow is None:
            params = dataclasses.replace(seq.request.params, n=1, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, bad_words=(),
                                         grammar=None, logprobs=None, prompt_logprobs=None, confidence=0, score_from=None,
                                         min_tokens=0)
            shadow = Sequence(dataclasses.replace(seq.request, params=params, bad_words=[], emitted=[]))
            shadow.stream, shadow.tokens = seq.stream, list(seq.tokens)
            if not self._free_rows:  # those of preempted sequences
                for other in [other for other in self._shadows if other.status is not Status.RUNNING]:
                    self.close(other)
            shadow.status, shadow.row = Status.RUNNING, self._free_rows.pop()
            self._runner.open(shadow)
            self._shadows[seq] = shadow
        shadow.tokens, shadow.tables, shadow.num_computed = list(seq.tokens), seq.tables, len(seq.tokens) - 1
        return shadow
