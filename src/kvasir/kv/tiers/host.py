"""Pages in host memory, which a GPU reaches over its link without the processor. Exact; they end with the process.

On a GPU the memory is pinned, piece by piece and in the background, since pinning takes about a second for 4 GiB. Until
that is done no page is copied. CUDA refuses a copy that reaches from one pinned piece into the next ("invalid
argument"), so a piece is a number of whole slots, and no copy crosses its end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvasir.errors import ConfigError
from kvasir.kv.tier import Found, Move, Place, Tier, runs
from kvasir.logs import log

# Bytes that are pinned by one call, about, so that a closing engine waits for no more.
PIECE = 1 << 30


@dataclass(frozen=True, slots=True)
class Config:
    """``bytes``: size of the tier."""

    bytes: int = 0


class Host(Tier):
    def open(self, place: Place) -> list[Found]:
        self.num_slots = place.slots_in(self.config.bytes)
        if not all(self.num_slots):
            raise ConfigError(
                f"host:bytes={self.config.bytes} does not hold a page of every cache group. Give --kv-host-bytes "
                f"{2 * sum(place.page_bytes)} or more, or 0 for no host tier."
            )
        sizes = zip(self.num_slots, place.page_bytes)
        self._rows = [torch.from_numpy(np.zeros((slots, size), np.uint8)) for slots, size in sizes]
        self._piece = [max(1, PIECE // size) for size in place.page_bytes]  # slots that are pinned by one call
        self._pinned: list[int] = []  # addresses
        self._ready = threading.Event()
        self._ending = False
        self._pinning: threading.Thread | None = None
        if place.device.type == "cuda":
            self._pinning = threading.Thread(target=self._pin, name="kvasir-pinning", daemon=True)
            self._pinning.start()
        else:
            self._ready.set()
        return []

    @property
    def ready(self) -> bool:
        return self._ready.is_set()

    def _pin(self) -> None:
        """Pin all rows. If the system refuses, copies would make steps wait, so the tier stays empty."""
        runtime, done = torch.cuda.cudart(), 0
        for rows, slots in zip(self._rows, self._piece):
            for piece in rows.split(slots):
                if self._ending:
                    return
                if int(runtime.cudaHostRegister(piece.data_ptr(), piece.numel(), 0)):
                    log.warning(
                        "the system pins no more than %.1f GiB of host memory, so the host tier is not used: give "
                        "fewer --kv-host-bytes, or raise the limit of locked memory (ulimit -l)",
                        done / (1 << 30),
                    )
                    return
                self._pinned.append(piece.data_ptr())
                done += piece.numel()
        self._ready.set()

    def _copies(self, group: int, moves: Sequence[Move]) -> Iterator[tuple[int, int, int]]:
        """The moves as (first row, first slot, count), none of which crosses the end of a pinned piece."""
        piece = self._piece[group]
        for row, slot, count in runs(moves):
            end = slot + count
            while slot < end:
                part = min(end, (slot // piece + 1) * piece) - slot
                yield row, slot, part
                row, slot = row + part, slot + part

    def write(self, group: int, rows: torch.Tensor, moves: Sequence[Move]) -> list[bool]:
        own = self._rows[group]
        for row, slot, count in self._copies(group, moves):
            own[slot : slot + count].copy_(rows[row : row + count], non_blocking=True)
        return [True] * len(moves)

    def read(self, group: int, rows: torch.Tensor, moves: Sequence[Move]) -> list[bool]:
        own = self._rows[group]
        for row, slot, count in self._copies(group, moves):
            rows[row : row + count].copy_(own[slot : slot + count], non_blocking=True)
        return [True] * len(moves)

    def rows(self, group: int) -> torch.Tensor:
        return self._rows[group]

    def close(self) -> None:
        self._ending = True
        if self._pinning is not None:
            self._pinning.join()
        for at in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(at)
        self._pinned, self._rows = [], []
