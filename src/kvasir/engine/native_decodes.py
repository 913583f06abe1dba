"""Steps of decodes alone where a step is one native call: the host brings a row number and a position a sequence, and reads a token.

As with graphs (``graphs.py``), what a row starts from lies in ``DeviceSeats``, here in the host's own memory: the call gathers it,
runs the model, and draws (``kernels/native/decode.h``). Rows that ask for more than temperature, top-k, top-p and min-p are drawn
by the sampler from the step's logits, as are draws that rounding might decide and rows whose logits hold NaN.
"""

from __future__ import annotations

import torch

from kvasir.decoding.sampler import Sampler
from kvasir.engine.device_seats import DeviceSeats
from kvasir.engine.spans import ONE_SAMPLE
from kvasir.models.native_decoder import Logits, NativeDecoder
from kvasir.types import Span, SpanResult


class NativeDecodes:
    """``native`` draws from its first step on into ``rows``."""

    def __init__(self, native: NativeDecoder, sampler: Sampler, seats: DeviceSeats) -> None:
        self.native, self.sampler, self.seats = native, sampler, seats
        native.keep(seats.kept, sampler.tokenizer_size)

    def takes(self, spans: list[Span]) -> bool:
        """Whether these spans are decodes, and nothing else."""
        return len(spans) <= self.native.most_decodes and all(span.want is ONE_SAMPLE for span in spans)

    def draw(self, spans: list[Span]) -> Drawn:
        """A token each, of spans of which ``Sampler.output`` wants nothing else."""
        results: dict[int, SpanResult] = {}

        def undrawn(places: list[int], logits: torch.Tensor) -> list[int]:
            left = [spans[place] for place in places]
            output = self.sampler.sample(logits, self.sampler.pack(left))
            tokens = output.draws[0].int().clamp_(0, self.sampler.vocab_size - 1)
            self.seats.token[[span.seat for span in left]] = tokens
            results.update(zip(places, output.read()))
            return tokens.tolist()

        rows, starts = self._bring(spans)
        tokens = self.native.decode(rows, starts, undrawn)
        return Drawn(
            [SpanResult([token]) for token in tokens]
            if not results
            else [results.get(i) or SpanResult([token]) for i, token in enumerate(tokens)]
        )

    def logits(self, spans: list[Span]) -> Logits:
        return self.native.decode_logits(*self._bring(spans))

    def _bring(self, spans: list[Span]) -> tuple[list[int], list[int]]:
        """Rows and positions; ``rows`` holds all that they start from."""
        rows, starts = [span.seat for span in spans], [span.start for span in spans]
        self.seats.bring(spans)
        return rows, starts


class Drawn:
    """Of a step that has ended."""

    def __init__(self, results: list[SpanResult]) -> None:
        self._results = results

    def read(self) -> list[SpanResult]:
        return self._results
