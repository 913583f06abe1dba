"""The weight format of every matrix of a model: what the checkpoint's reader says where its tensors are quantised, or
the one that ``--weights`` asks for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch

from kvasir.errors import ConfigError
from kvasir.layers.mixed_format import MixedFormat
from kvasir.layers.weight_format import MATRIX, PLAIN, WeightFormat, load_format
from kvasir.layers.weights import NUMBERS, Slot
from kvasir.models.fill import Stored
from kvasir.models.quantisation import SUFFIX, Reader
from kvasir.models.stored import View

# Matrices that stay plain where nothing but config.json can be asked, and where plain weights are quantised: the head
# decides between close tokens.
UNQUANTISED = ("head.weight", "mtp.head.weight")


class Formats:
    """Chooses the format of a matrix by the slots that fill it. ``Placement.formats``.

    ``view``: the stored tensor of a slot, by the family. ``tensors``: the stored tensors by that name; empty: only
    config.json can be asked. ``quantised``: slots whose format was found not to be plain."""

    quantises = False  # plain tensors are quantised as they are loaded

    def __init__(self, reader: Reader, view: Callable[[str], View], tensors: Mapping[str, Stored]) -> None:
        self.reader, self._view, self._tensors = reader, view, tensors
        self.quantised: set[str] = set()

    def __call__(self, slots: tuple[str, ...]) -> WeightFormat:
        """Raises ConfigError where experts would need several formats."""
        found: dict[str, str] = {}  # a module of each format
        formats = []
        for slot in slots:
            module = self._view(slot).name.removesuffix(SUFFIX)
            formats.append(self._format(slot, module))
            found.setdefault(formats[-1], module)
        if len(found) > 1 and ".experts." in slots[0]:
            (one, first), (other, second), *_ = found.items()
            raise ConfigError(
                f"'{first}' is stored as {one} and '{second}' as {other}, but one product computes all experts. Use a "
                "checkpoint that quantises them alike."
            )
        self.quantised.update(slot for slot, name in zip(slots, formats) if name != PLAIN)
        return load_format(formats[0]) if len(found) == 1 else MixedFormat([load_format(name) for name in formats])

    def _format(self, slot: str, module: str) -> str:
        tensor = self._tensors.get(module + SUFFIX)
        if tensor is not None and tensor.dtype in NUMBERS:
            return PLAIN
        stored = module if tensor is None else tensor.name.removesuffix(SUFFIX)
        found = self.reader.format_of(stored)
        if tensor is not None and found is None:
            raise ConfigError(
                f"{tensor.file}: tensor '{tensor.name}' has dtype {tensor.dtype}, but quantization_config in "
                "config.json says that it is not quantised"
            )
        return PLAIN if found is None or not self._tensors and slot in UNQUANTISED else found

    def opened(self, name: str, tensor: Stored, names: Collection[str]) -> dict[str, str]:
        """The stored tensors of the planes of a quantised matrix that only plain slots read; none: it is plain."""
        if tensor.dtype in NUMBERS or not name.endswith(SUFFIX) or len(tensor.shape) != 2:
            return {}
        spec = self.reader.format_of(tensor.name.removesuffix(SUFFIX))
        if spec is None:
            return {}
        rows, inputs = tensor.shape
        planes = load_format(spec).planes((rows,), inputs, torch.bfloat16)
        return {plane.name: self.reader.stored(View(name), plane.name, names).name for plane in planes}

    def format_of(self, tensor: Stored) -> WeightFormat:
        """The format of a quantised matrix."""
        return load_format(self.reader.format_of(tensor.name.removesuffix(SUFFIX)))

    def unread(self, name: str) -> bool:
        """Whether a stored tensor is not read."""
        return name.endswith(self.reader.unread)

    def stored(self, slot: str, plane: str, view: View, names: Collection[str]) -> View:
        """The part of a stored tensor that fills a plane, where the matrix itself would be filled by ``view``."""
        return self.reader.stored(view, plane or MATRIX, names) if slot in self.quantised else view

    def fit(self, name: str, tensor: Stored, slot: Slot) -> tuple[Stored, Slot]:
        """A stored tensor and its slot, so that their shapes are the same."""
        base, _, plane = name.partition("/")
        if base in self.quantised:
            return self.reader.fit(plane or MATRIX, tensor, slot)
        return self.reader.fit_plain(tensor, slot)


class Quantising:
    """One format for all matrices of a plain checkpoint, which are quantised as they are loaded.
    ``Placement.formats``."""

    quantises = True

    def __init__(self, spec: str) -> None:
        self.format = load_format(spec)

    def __call__(self, slots: tuple[str, ...]) -> WeightFormat:
        return load_format(PLAIN) if slots[0] in UNQUANTISED else self.format

    def unread(self, name: str) -> bool:
        return False

    def stored(self, slot: str, plane: str, view: View, names: Collection[str]) -> View:
        return view

    def fit(self, name: str, tensor: Stored, slot: Slot) -> tuple[Stored, Slot]:
        return tensor, slot
