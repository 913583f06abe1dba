"""Hidden states for listeners: the outputs of chosen layers for every row of a step, with the step's results.

A listener is a drafter that reads hidden states, or the recorder of traces that drafters learn from. The decoder writes
the layers of all listeners where a `Taps` says: into fresh memory in a step that is launched kernel by kernel, and into
a static buffer in a step that is a CUDA graph or a CPU tape, from which the rows in use are copied once the step is
launched. Without a listener there is no `Taps`, and none of this runs.

Legend: T rows, L tapped layers, E model dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvasir.models.decoder import Decoder
from kvasir.types import Handle, Span, SpanResult


@dataclass(frozen=True, slots=True)
class Tapped:
    """Memory for hidden states, and by layer the views of it that the decoder fills."""

    hidden_TLE: torch.Tensor
    by_layer: dict[int, torch.Tensor]


@dataclass(slots=True, eq=False)
class Listener:
    """A reader of the outputs of ``layers``. ``on``: whether it wants what steps over static buffers write.
    ``columns``: its layers among all tapped ones; None: they are the same."""

    layers: tuple[int, ...]
    on: bool = True
    columns: list[int] | None = None

    def of(self, hidden_TLE: torch.Tensor) -> torch.Tensor:
        """The listener's part [T, own layers, E] of what was tapped."""
        return hidden_TLE if self.columns is None else hidden_TLE[:, self.columns]


class Taps:
    """Outputs of all layers that ``listeners`` read. Steps with prompts always hand theirs out, because no later step
    shows them again."""

    def __init__(self, listeners: list[Listener], model: Decoder) -> None:
        layers = tuple(sorted({layer for listener in listeners for layer in listener.layers}))
        assert layers and all(0 <= i < len(model.spec.layers) for i in layers), layers
        self.layers, self.listeners = layers, listeners
        for listener in listeners:
            columns = [layers.index(layer) for layer in listener.layers]
            listener.columns = None if columns == list(range(len(layers))) else columns
        self._size, self._place = model.spec.hidden_size, model.place

    @property
    def on(self) -> bool:
        """Whether any listener wants what steps over static buffers write."""
        return any(listener.on for listener in self.listeners)

    def memory(self, num_rows: int) -> Tapped:
        """Fresh memory for the outputs of ``num_rows`` rows."""
        hidden_TLE = torch.empty(
            num_rows, len(self.layers), self._size, device=self._place.device, dtype=self._place.dtype
        )
        return Tapped(hidden_TLE, {layer: hidden_TLE[:, i] for i, layer in enumerate(self.layers)})

    def taken(self, buffer: Tapped, num_rows: int) -> torch.Tensor | None:
        """A copy of the first rows of a static buffer, which the next step overwrites; None while taps are off."""
        return buffer.hidden_TLE[:num_rows].clone() if self.on else None


class TappedHandle:
    """A launched step whose results bring their spans' hidden states along."""

    __slots__ = ("_handle", "_hidden_TLE", "_spans")

    def __init__(self, handle: Handle, spans: list[Span], hidden_TLE: torch.Tensor) -> None:
        self._handle, self._spans, self._hidden_TLE = handle, spans, hidden_TLE

    def read(self) -> list[SpanResult]:
        results, first = self._handle.read(), 0
        for span, result in zip(self._spans, results):
            result.hidden = self._hidden_TLE[first : first + span.length]
            first += span.length
        return results
