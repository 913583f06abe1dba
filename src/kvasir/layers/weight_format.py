"""The seam of weight formats: how a matrix lies in memory, how it is multiplied, and what fills it.

A format is one module in `kvasir/layers/formats/`. ``Weight`` holds the tensors of one matrix, its *planes*, and hands
every question on to its format. A weight has one slot a plane, so each slot is filled by one stored tensor, part by
part: ``models/quantisation.py`` says which one of a checkpoint that is.

Legend: T rows, K inputs, N outputs, O outputs after a gated activation, X experts.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from kvasir.kernels.lora import Shrunk
from kvasir.kernels.moe import Experts
from kvasir.layers.adapters import LowRank
from kvasir.layers.norm import RMSNorm
from kvasir.layers.products import finish, linear, normed, streams
from kvasir.layers.weights import NUMBERS, Placement, Slot, Whole
from kvasir.technique import Technique, find_also, load

PACKAGE = "kvasir.layers.formats"
PLAIN = "plain"  # the format of weights that nobody quantised
QUANTISED_ROWS = 1024  # outputs that are quantised at a time; whole blocks of every format
MATRIX = "weight"  # the plane whose slots have the names of plain weights


@dataclass(frozen=True, slots=True)
class Plane:
    """One tensor of a weight [rows, columns], ``columns`` None: [rows]. A row stands for ``outputs`` rows of the
    matrix. ``types``: names of the safetensors types that may fill it. ``random``: as in ``Slot``."""

    name: str
    rows: int
    columns: int | None
    dtype: torch.dtype
    outputs: int = 1
    types: tuple[str, ...] = NUMBERS
    random: tuple[float, float] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows,) if self.columns is None else (self.rows, self.columns)

    def of(self, first: int, count: int) -> slice:
        """The rows that stand for so many outputs from the ``first`` on."""
        return slice(first // self.outputs, -(-(first + count) // self.outputs))


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix as the C kernels take it: codes [N, K], int8 or 0 .. 15 as uint8, scales [N, G] and perhaps zero points
    [N, G] of its groups of inputs, or in their place offsets [N, G], which are added to scaled codes. ``rounded``:
    inputs are rounded to 8 bits."""

    codes_NK: torch.Tensor
    scales_NG: torch.Tensor
    zeros_NG: torch.Tensor | None = None
    offsets_NG: torch.Tensor | None = None
    rounded: bool = False


class WeightFormat(Technique):
    """A layout of matrices with the products that read it.

    ``rows_skippable``: a product may leave out inputs (rows of W^T) and read fewer bytes. ``native``: the C kernels
    take it (``kernels/native``), as ``codes`` or as a plain matrix. ``code_planes``: planes that `of_codes` makes again
    from what ``codes`` gave; empty: it cannot. ``also``: other names that it goes by, such as vLLM's."""

    affects_kv = True
    rows_skippable = False
    native = False
    code_planes: ClassVar[tuple[str, ...]] = ()
    also: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def planes(self, widths: tuple[int, ...], num_inputs: int, dtype: torch.dtype) -> tuple[Plane, ...]:
        """The planes of a matrix [N, K] whose outputs are ``widths`` of several stored ones, in a model of ``dtype``.
        Raises ConfigError for shapes that the format cannot hold."""

    def allocate(
        self, count: int | None, widths: tuple[int, ...], num_inputs: int, place: Placement
    ) -> dict[str, torch.Tensor]:
        """Undefined memory for the planes of a matrix, or of ``count`` of them."""
        lead = () if count is None else (count,)
        return {
            plane.name: torch.empty(*lead, *plane.shape, dtype=plane.dtype, device=place.device)
            for plane in self.planes(widths, num_inputs, place.dtype)
        }

    def of_codes(self, codes_NK: torch.Tensor) -> dict[str, torch.Tensor]:
        """The ``code_planes`` that hold these codes."""
        raise NotImplementedError(f"{self.name} keeps its planes")

    @abstractmethod
    def quantise(self, w_NK: torch.Tensor) -> dict[str, torch.Tensor]:
        """The planes of one matrix [N, K]."""

    def stored_as(self, planes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of a module in a checkpoint of this format, by the last part of their names."""
        raise NotImplementedError(f"{self.name} is not written")

    def quantization_config(self, ignore: list[str]) -> dict[str, Any]:
        """The field of config.json that describes such a checkpoint. ``ignore``: modules that are not quantised."""
        raise NotImplementedError(f"{self.name} is not written")

    @abstractmethod
    def dequantise(self, weight: Weight) -> torch.Tensor:
        """The matrix [..., N, K] in the model's dtype; a plain one is not copied."""

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
        shrunk: Shrunk | None = None,
    ) -> torch.Tensor:
        """x W^T + bias of x, or of ``norm``(x): [T, N] in x's dtype. With ``activation`` the halves of N are gate and
        up, and the result is [T, O]. ``residual_TO`` is added, and its memory may be used for the result.
        ``normed_TK``: ``norm``(x), where the caller has it. ``shrunk``: what adapters add before activation, given only
        where the format ``folds``."""
        x_TK = normed(x_TK, norm, normed_TK)
        place = weight.place
        return finish(linear(x_TK, self.dequantise(weight), bias_N, place.exact), activation, residual_TO, place)

    def folds(self, weight: Weight, rows: int, biased: bool, activation: str | None, low_rank: LowRank) -> bool:
        """Whether the product of so many rows adds what adapters say as it ends (``shrunk``)."""
        return False

    def sums(
        self, weight: Weight, x_TK: torch.Tensor, norm: RMSNorm | None, bias_N: torch.Tensor | None,
        normed_TK: torch.Tensor, activation: str,
    ) -> torch.Tensor:  # fmt: skip
        """The product [T, N] before ``activation``: in fp32 where ``product`` applies it to fp32 sums, so that it gives
        the same bits."""
        return self.product(weight, x_TK, norm=norm, bias_N=bias_N, normed_TK=normed_TK)

    def slots(self, weight: Weight) -> dict[str, Slot]:
        """The places that stored tensors fill: ``part.weight``, and ``part.weight/plane`` for other planes."""
        rows_of = {plane.name: plane for plane in self.planes_of(weight)}
        found, first = {}, 0
        for part, width in weight.widths.items():
            for name, tensor in weight.planes.items():
                plane = rows_of[name]
                rows = tensor[plane.of(first, width)]
                slot = Slot(rows, types=plane.types, random=plane.random)
                if name == MATRIX and plane.random is not None:  # a quantised one
                    put = functools.partial(weight.put, first)
                    slot = replace(slot, whole=Whole((width, weight.num_inputs), put))
                found[f"{part}.weight" if name == MATRIX else f"{part}.weight/{name}"] = slot
            first += width
        return found

    def planes_of(self, weight: Weight) -> tuple[Plane, ...]:
        """The planes of a weight."""
        return self.planes(tuple(weight.widths.values()), weight.num_inputs, weight.place.dtype)

    def codes(self, weight: Weight) -> Codes | None:
        """The codes of a matrix, for the C kernels; None: they take what ``dequantise`` returns."""
        return None

    def grouped(self, weight: Weight, pairs: float) -> Experts:
        """The matrices of all experts [X, N, K], as ``kernels.moe`` takes them for so many ``pairs`` of a row and an
        expert, by expert on average."""
        return self.dequantise(weight)


@functools.cache
def load_format(spec: str) -> WeightFormat:
    """Build a format from ``name:key=value,key=value``, which may have another name that it goes by (``also``). Raises
    ConfigError for an unknown name, key or value."""
    name, *options = spec.split(":", 1)
    return load(PACKAGE, ":".join([find_also(PACKAGE, name.strip(), WeightFormat).name, *options]), WeightFormat)


class Weight:
    """A matrix [N, K] in the planes of its format, or one for each of ``count`` experts.

    Its outputs are ``widths`` of stored matrices with the same input, one below the other. ``streams``: products of few
    rows may take kernels whose bits depend on the number of rows. ``copies``: they may keep a copy of the weight."""

    def __init__(
        self,
        widths: dict[str, int],
        num_inputs: int,
        place: Placement,
        count: int | None = None,
        planes: dict[str, torch.Tensor] | None = None,
    ) -> None:
        self.widths, self.num_inputs, self.count, self.place = widths, num_inputs, count, place
        self.num_outputs = sum(widths.values())
        self.format = load_format(PLAIN)
        if place.formats is not None:
            experts = [""] if count is None else [f"experts.{i}." for i in range(count)]
            self.format = place.formats(tuple(f"{place.path}{e}{part}.weight" for e in experts for part in widths))
        self.streams, self.copies = streams(place), True
        self.made: object | None = None  # by the format, for faster products
        self._restore: Callable[[], dict[str, torch.Tensor]] | None = None
        self._lent_bytes = 0
        sizes = tuple(widths.values())
        self.planes = self.format.allocate(count, sizes, num_inputs, place) if planes is None else planes

    def __call__(self, x_TK: torch.Tensor, **options: object) -> torch.Tensor:
        """The product; see ``WeightFormat.product``."""
        return self.format.product(self, x_TK, **options)  # type: ignore[arg-type]

    def __getitem__(self, expert: int) -> Weight:
        """The matrix of one expert."""
        found = object.__new__(Weight)
        vars(found).update(vars(self), count=None, made=None, copies=False)
        found.planes = {name: plane[expert] for name, plane in self.planes.items()}
        return found

    @property
    def planes(self) -> dict[str, torch.Tensor]:
        """The tensors by name. Those that were lent are made again, and stay."""
        if self._restore is not None:
            self._planes |= self._restore()
            self._restore, self._lent_bytes = None, 0
        return self._planes

    @planes.setter
    def planes(self, planes: dict[str, torch.Tensor]) -> None:
        self._planes, self._restore, self._lent_bytes = planes, None, 0

    def lend(self, restore: Callable[[], dict[str, torch.Tensor]]) -> None:
        """Give up the format's ``code_planes``, because somebody else holds the same in another layout: ``restore``
        makes them from it."""
        self._lent_bytes = sum(self._planes.pop(name).nbytes for name in self.format.code_planes)
        self._restore = restore

    @property
    def num_bytes(self) -> int:
        """Bytes of all planes, those included that are lent."""
        return self._lent_bytes + sum(plane.nbytes for plane in self._planes.values())

    @property
    def is_matrix(self) -> bool:
        """Whether it is one plain matrix, so that ``tensor`` is all of it."""
        return self._restore is None and self._planes.keys() == {MATRIX}

    @property
    def tensor(self) -> torch.Tensor:
        """The matrix [..., N, K] of a plain weight."""
        return self.planes[MATRIX]

    def dequantise(self) -> torch.Tensor:
        """The matrix [..., N, K] in the model's dtype; a plain one is not copied."""
        return self.format.dequantise(self)

    def put(self, first: int, w_NK: torch.Tensor) -> None:
        """Quantise the outputs from the ``first`` on, some at a time: it takes memory of several times their size."""
        rows_of = {plane.name: plane for plane in self.format.planes_of(self)}
        for start in range(0, len(w_NK), QUANTISED_ROWS):
            rows = w_NK[start : start + QUANTISED_ROWS]
            for name, part in self.format.quantise(rows).items():
                self.planes[name][rows_of[name].of(first + start, len(rows))].copy_(part)

    def forget(self) -> None:
        """Drop what was made of the planes, since they have changed."""
        self.made = None

    def slots(self, expert: int | None = None) -> dict[str, Slot]:
        """The places that stored tensors fill, of one expert or of all that the weight is; see
        ``WeightFormat.slots``."""
        own = self if expert is None else self[expert]
        return own.format.slots(own)
