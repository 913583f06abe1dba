"""Several formats in one product: the parts of a fused matrix that a checkpoint quantises differently.

Neighbours of one format are one product; the results stand side by side. Q4_K_M files keep v in more bits than q and k.

Legend: T rows, K inputs, N outputs, O outputs after a gated activation, G groups of inputs.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import torch

from kvasir.kernels.native.quantized import CENTRE
from kvasir.layers.norm import RMSNorm
from kvasir.layers.products import finish, normed
from kvasir.layers.weight_format import Codes, Plane, Weight, WeightFormat
from kvasir.layers.weights import Placement, Slot


class MixedFormat(WeightFormat):
    """A format for each part of a product, in their order. It is made by ``models/formats.py``, and has no name that a
    setting could give."""

    exact = False
    name = "mixed"

    def __init__(self, formats: list[WeightFormat]) -> None:
        super().__init__()
        # Neighbours of one format, and how many parts they are.
        self.runs = [(form, len(list(parts))) for form, parts in groupby(formats)]
        self.native = all(form.native for form, _ in self.runs)

    def planes(self, widths: tuple[int, ...], num_inputs: int, dtype: torch.dtype) -> tuple[Plane, ...]:
        found, first = [], 0
        for place, (form, count) in enumerate(self.runs):
            own = form.planes(widths[first : first + count], num_inputs, dtype)
            found += [replace(plane, name=f"{place}.{plane.name}") for plane in own]
            first += count
        return tuple(found)

    def allocate(
        self, count: int | None, widths: tuple[int, ...], num_inputs: int, place: Placement
    ) -> dict[str, torch.Tensor]:
        assert count is None, "experts have one format"
        found, first = {}, 0
        for at, (form, some) in enumerate(self.runs):
            own = form.allocate(None, widths[first : first + some], num_inputs, place)
            found |= {f"{at}.{name}": plane for name, plane in own.items()}
            first += some
        return found

    def quantise(self, w_NK: torch.Tensor) -> dict[str, torch.Tensor]:
        raise NotImplementedError("a checkpoint says which part has which format")

    def parts(self, weight: Weight) -> list[Weight]:
        """The weights of neighbours with one format, in memory that is the weight's."""
        if weight.made is None:
            widths, made = list(weight.widths.items()), []
            for place, (form, count) in enumerate(self.runs):
                own, widths = dict(widths[:count]), widths[count:]
                planes = {name.partition(".")[2]: plane for name, plane in weight.planes.items()
                          if name.startswith(f"{place}.")}  # fmt: skip
                where = replace(weight.place, formats=lambda _, form=form: form)
                made.append(Weight(own, weight.num_inputs, where, planes=planes))
            weight.made = made
        return weight.made  # type: ignore[return-value]

    def slots(self, weight: Weight) -> dict[str, Slot]:
        return {name: slot for part in self.parts(weight) for name, slot in part.slots().items()}

    def dequantise(self, weight: Weight) -> torch.Tensor:
        return torch.cat([part.dequantise() for part in self.parts(weight)])

    def product(
        self,
        weight: Weight,
        x_TK: torch.Tensor,
        *,
        norm: RMSNorm | None = None,
        bias_N: torch.Tensor | None = None,
        activation: str | None = None,
        residual_TO: torch.Tensor | None = None,
        normed_TK: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x_TK = normed(x_TK, norm, normed_TK)
        found, first = [], 0
        for part in self.parts(weight):
            some = slice(first, first + part.num_outputs)
            found.append(part(x_TK, bias_N=None if bias_N is None else bias_N[some]))
            first += part.num_outputs
        return finish(torch.cat(found, -1), activation, residual_TO, weight.place)

    def codes(self, weight: Weight) -> Codes | None:
        """Codes of 8 bits with the smallest groups of all; None where a part has none."""
        found = [part.format.codes(part) for part in self.parts(weight)]
        if any(codes is None or codes.rounded for codes in found):  # no checkpoint asks for rounded inputs
            return None
        groups = max(codes.scales_NG.shape[1] for codes in found)
        signed = [_signed(codes, groups) for codes in found]
        codes_NK, scales_NG, offsets_NG = (torch.cat(planes) for planes in zip(*signed))
        return Codes(codes_NK, scales_NG, offsets_NG=offsets_NG if offsets_NG.any() else None)


def _signed(codes: Codes, groups: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes as int8 with the scales and offsets of so many groups."""
    plain = codes.codes_NK.dtype == torch.int8
    offsets_NG, scales_NG = codes.offsets_NG, codes.scales_NG.float()
    whole = codes.codes_NK if plain else codes.codes_NK.to(torch.int8)
    if codes.zeros_NG is not None:
        offsets_NG = -scales_NG * codes.zeros_NG.float()
    elif offsets_NG is None:
        offsets_NG = torch.zeros_like(scales_NG)
        whole = whole if plain else whole - int(CENTRE)
    more = groups // scales_NG.shape[1]
    return whole, scales_NG.repeat_interleave(more, 1), offsets_NG.repeat_interleave(more, 1)
