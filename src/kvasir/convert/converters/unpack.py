"""Store a packed checkpoint as plain safetensors, which every other program reads. Exact."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvasir.convert.converter import Converter, Source

if TYPE_CHECKING:
    from kvasir.convert.converter import Tensors


class Unpack(Converter):
    """The same tensors in plain shards."""

    exact = True

    def tensors(self, source: Source, tensors: Tensors) -> Tensors:
        return tensors
