"""A slot that is filled while steps run: in pieces between them, so that no step waits for more than one.

Another thread copies a piece into pinned memory (``stage``; it calls nothing of the device, which may be capturing).
The engine's thread then starts the copies to the device, on a stream of their own, and the next piece is staged
meanwhile. The first copy waits for the steps that were launched before, which may read what the slot held. Steps that
are launched after the last piece wait for it, on the device.
"""

from __future__ import annotations

from concurrent.futures import Executor, Future
from contextlib import nullcontext

import torch

from kvasir.layers.adapters import HostPair
from kvasir.models.adapters import Adapter, AdapterSlots

# Bytes of a piece: 0.3 ms of a PCIe bus of 25 GB/s, and as long on the host, which starts some 60 copies. A product of
# more is a piece of its own.
PIECE_BYTES = 8 << 20
ALIGNMENT = 256  # bytes; of a tensor in staging memory


class Staging:
    """Pinned memory for two pieces, and the stream that copies them. One slot is filled at a time."""

    def __init__(self, slots: AdapterSlots) -> None:
        self.slots, self.pieces = slots, _pieces(slots)
        device = slots.device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        size = max((sum(_bytes(slots, name) for name in piece) for piece in self.pieces), default=0)
        self.memory = [torch.empty(size, dtype=torch.uint8, pin_memory=self.stream is not None) for _ in range(2)]
        self.copied: list[torch.cuda.Event | None] = [None, None]

    def free(self, half: int) -> bool:
        """Whether the copies out of a half have ended."""
        event = self.copied[half]
        return event is None or event.query()

    def stage(self, half: int, pairs: dict[str, HostPair]) -> dict[str, HostPair]:
        """Copy matrices into half of the memory, and return them there."""
        memory, at, staged = self.memory[half], 0, {}
        for name, pair in pairs.items():
            there = []
            for tensor in (pair.a_PRK, pair.b_NR, pair.columns_PR):
                if tensor is not None:
                    place = memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                    there.append(place.copy_(tensor))
                    at += _aligned(tensor.nbytes)
            staged[name] = HostPair(*there)
        return staged


class Filling:
    """An adapter on its way into slot ``slot``."""

    def __init__(self, staging: Staging, executor: Executor, slot: int, adapter: Adapter) -> None:
        self.slot = slot
        self._staging, self._executor, self._adapter = staging, executor, adapter
        self._sent = 0  # pieces whose copies were started
        self._staged: Future[dict[str, HostPair]] | None = None
        if staging.stream is not None:
            staging.stream.wait_stream(torch.cuda.current_stream(staging.slots.device))
        self._stage()

    @property
    def done(self) -> bool:
        """Whether whatever is launched now finds the adapter in its slot."""
        return self._sent == len(self._staging.pieces)

    def advance(self) -> None:
        """Start the copies of the next piece, if it is staged."""
        if self._staged is None:
            self._stage()
        elif self._staged.done():
            self._send(self._staged.result())

    def finish(self) -> None:
        """Fill the whole slot now; waits for the other thread."""
        while not self.done:
            if self._staged is None:
                self._staging.copied[self._sent % 2].synchronize()
                self._stage()
            self._send(self._staged.result())

    def _stage(self) -> None:
        """Stage the next piece where its half of the memory is free."""
        half = self._sent % 2
        if not self.done and self._staging.free(half):
            names, pairs = self._staging.pieces[self._sent], self._adapter.pairs
            mine = {name: pairs[name] for name in names if name in pairs}
            self._staged = self._executor.submit(self._staging.stage, half, mine)

    def _send(self, staged: dict[str, HostPair]) -> None:
        staging, stream = self._staging, self._staging.stream
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for name in staging.pieces[self._sent]:
                staging.slots.products[name].low_rank.put(self.slot, staged.get(name))
            if stream is not None:
                event = staging.copied[self._sent % 2] = torch.cuda.Event()
                event.record(stream)
        self._sent, self._staged = self._sent + 1, None
        self._stage()
        if self.done and stream is not None:
            torch.cuda.current_stream(staging.slots.device).wait_stream(stream)


def _pieces(slots: AdapterSlots) -> list[list[str]]:
    """The products of a decoder in pieces of about PIECE_BYTES."""
    found: list[list[str]] = []
    room = 0
    for name in slots.products:
        size = _bytes(slots, name)
        if size > room:
            found.append([])
            room = max(PIECE_BYTES, size)
        found[-1].append(name)
        room -= size
    return found


def _bytes(slots: AdapterSlots, name: str) -> int:
    """Bytes of staging memory that an adapter of the largest rank takes for one product."""
    pairs = slots.products[name].low_rank.pairs
    return sum(_aligned(tensor[0].nbytes) for tensor in (pairs.a_SCK, pairs.b_SNR, pairs.columns_SC))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
