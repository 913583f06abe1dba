"""Steps of decodes alone as one native call on a CPU: the host sends a seat and a position for each sequence, and reads
a token.

As with graphs (``graphs.py``), what a row starts from lies in ``DeviceSeats``, here in the host's own memory: the call
gathers it, runs the model, and draws (``kernels/native/decode.h``). The sampler draws from the step's logits for rows
that ask for more than temperature, top-k, top-p and min-p, for draws that rounding might decide, and for rows whose
logits hold NaN.
"""

from __future__ import annotations

import torch

from kvasir.decoding.sampler import StepOutput
from kvasir.engine.schedule.spans import ONE_SAMPLE
from kvasir.engine.ways.step_way import StepParts, StepWay
from kvasir.models.native_decoder import Logits, NativeDecoder
from kvasir.types import Handle, Span, SpanResult


class NativeDecodes(StepWay):
    """Takes steps of decodes alone. ``native`` draws into the seats of ``parts``, from its first step on."""

    def __init__(self, parts: StepParts, native: NativeDecoder) -> None:
        self.native = native
        self._parts, self._sampler, self._seats = parts, parts.sampler, parts.seats
        native.keep(parts.seats.kept, parts.sampler.tokenizer_size)

    def takes(self, spans: list[Span]) -> bool:
        """Nothing is taken while hidden states are wanted, which are not handed out here, nor rows with variants."""
        taps = self._parts.taps
        return (
            (taps is None or not taps.on and self.native.can_tap(taps.layers))
            and len(spans) <= self.native.most_decodes
            and all(span.want is ONE_SAMPLE for span in spans)
            and not self._parts.varied(spans)
        )

    def run(self, spans: list[Span]) -> Handle:
        if self._sampler.output(spans) is StepOutput.DRAWS:
            return self.draw(spans)
        with torch.inference_mode():
            return self._parts.sample(spans, self._logits(spans))

    def weights_changed(self) -> None:
        self.native.weights_changed()

    def draw(self, spans: list[Span]) -> Drawn:
        """Run and draw one token for each span, where ``Sampler.output`` asks for draws alone."""
        results: dict[int, SpanResult] = {}

        def undrawn(places: list[int], logits: torch.Tensor) -> list[int]:
            left = [spans[place] for place in places]
            output = self._sampler.sample(logits, self._sampler.pack(left))
            tokens = output.draws[0].int().clamp_(0, self._sampler.vocab_size - 1)
            self._seats.token[[span.seat for span in left]] = tokens
            results.update(zip(places, output.read()))
            return tokens.tolist()

        seats, starts = self._bring(spans)
        tokens = self.native.decode(seats, starts, undrawn)
        return Drawn(
            [SpanResult([token]) for token in tokens]
            if not results
            else [results.get(i) or SpanResult([token]) for i, token in enumerate(tokens)]
        )

    def _logits(self, spans: list[Span]) -> Logits:
        return self.native.decode_logits(*self._bring(spans))

    def _bring(self, spans: list[Span]) -> tuple[list[int], list[int]]:
        """Seats and positions of the spans, once the seats hold all that the step starts from."""
        seats, starts = [span.seat for span in spans], [span.start for span in spans]
        self._seats.bring(spans)
        return seats, starts


class Drawn:
    """Handle of a step that has ended."""

    def __init__(self, results: list[SpanResult]) -> None:
        self._results = results

    def read(self) -> list[SpanResult]:
        return self._results
