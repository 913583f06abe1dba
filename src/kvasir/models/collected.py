"""Stored tensors that are collected whole before they fill anything: plain matrices to be quantised, and quantised ones
whose slots are plain."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import torch

from kvasir.errors import ConfigError
from kvasir.layers.weight_format import MATRIX, Weight, WeightFormat
from kvasir.layers.weights import Placement, Slot
from kvasir.models.fill import DTYPES, Stored
from kvasir.models.quantisation import Reader
from kvasir.models.stored import View


class Collector:
    """Scratch memory for some tensors, filled part by part and from several threads. ``done`` gets them when the last
    part has come, and the memory is freed. ``wanted``: shape and type of each, by name."""

    def __init__(
        self,
        wanted: dict[str, tuple[tuple[int, ...], torch.dtype]],
        device: torch.device,
        done: Callable[[dict[str, torch.Tensor]], None],
    ) -> None:
        self._wanted, self._device, self._done = wanted, device, done
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._sent: list[torch.cuda.Event] = []
        self._left = sum(torch.Size(shape).numel() for shape, _ in self._wanted.values())

    def slot(self, name: str) -> Slot:
        """The place of one of the tensors: a view of it would have no memory."""
        shape, dtype = self._wanted[name]
        return Slot(torch.empty(shape, dtype=dtype, device="meta"), collect=partial(self._fill, name))

    def _fill(self, name: str, place: torch.Tensor, stored: torch.Tensor) -> None:
        """Copy ``stored`` to where ``place``, a view of a tensor without memory, lies in the tensor."""
        with self._lock:
            if name not in self._tensors:
                shape, dtype = self._wanted[name]
                self._tensors[name] = torch.empty(shape, dtype=dtype, device=self._device)
            tensor = self._tensors[name]
        tensor.as_strided(place.shape, place.stride(), place.storage_offset()).copy_(stored)
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(self._device))
            event = torch.cuda.Event()
            event.record()
        with self._lock:
            if tensor.is_cuda:
                self._sent.append(event)
            self._left -= place.numel()
            if self._left:
                return
            tensors, sent = self._tensors, self._sent
            self._reset()
        for event in sent:
            event.wait()
        if tensor.is_cuda:
            for one in tensors.values():
                one.record_stream(torch.cuda.current_stream(self._device))
        self._done(tensors)


def to_fill(slots: dict[str, Slot], dtype: torch.dtype) -> dict[str, Slot]:
    """The places that the tensors of a plain checkpoint fill, where matrices are quantised as they are loaded: one for
    each matrix of ``dtype`` instead of one for each plane."""
    found = {}
    for name, slot in slots.items():
        if slot.whole is not None:
            put, wanted = slot.whole.put, {MATRIX: (slot.whole.shape, dtype)}
            collector = Collector(wanted, slot.target.device, lambda tensors, put=put: put(tensors[MATRIX]))
            found[name] = collector.slot(MATRIX)
        elif slot.random is None:  # others are planes beside the first
            if slot.target.dtype not in (dtype, torch.float32):
                raise ConfigError(f"the layer of '{name}' rearranges its matrices, and is served plain only")
            found[name] = slot
    return found


def open_slots(
    planes: dict[str, Stored],
    format: WeightFormat,
    reader: Reader,
    targets: list[tuple[View, Slot]],
    place: Placement,
) -> list[tuple[Stored, Slot]]:
    """Slots that collect the planes of a quantised matrix and fill plain ``targets`` with its dequantised parts: layers
    that rearrange a matrix keep it plain. ``planes``: the stored tensors."""
    rows, inputs = planes[MATRIX].shape
    wanted = {name: (tensor.shape, DTYPES[tensor.dtype]) for name, tensor in planes.items()}

    def done(tensors: dict[str, torch.Tensor]) -> None:
        scratch = Placement(place.device, place.dtype, formats=lambda _: format)
        weight = Weight({"one": rows}, inputs, scratch)
        for name, slot in weight.slots().items():
            plane = name.partition("/")[2] or MATRIX
            fitted, slot = reader.fit(plane, planes[plane], slot)
            slot.fill(tensors[plane].reshape(fitted.shape))
        whole = weight.dequantise()
        for view, slot in targets:
            slot.through(view.index, view.transposed).fill(whole)

    collector = Collector(wanted, place.device, done)
    return [(tensor, collector.slot(name)) for name, tensor in planes.items()]
