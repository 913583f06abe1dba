"""Capture of work on static buffers for replay: CUDA graphs, whole or in pieces, and the device memory that a capture
needs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Protocol

import torch

Work = Callable[[], None]
Capture = Callable[[Work], Work]  # returns the replay

# Uncaptured runs of a kind of step before it is captured: nobody waits for the capture of a size that only passes by,
# and kernels are compiled and libraries loaded by then.
EAGER_STEPS = 4
# Device memory in bytes that one instantiated graph takes in addition to its tensors, by experience.
GRAPH_BYTES = 3 << 20


class PieceCapture(Protocol):
    def pieces(self, work: Callable[[Work], None]) -> list[Work]:
        """Capture ``work`` in pieces: one ends wherever ``work`` calls its argument."""


def call_through(work: Work) -> Work:
    """No capture: the same buffers and the same padding, run as they are. For devices without graphs."""
    return work


class CudaCapture:
    """Captures into CUDA graphs that share one memory pool: they are replayed one after the other on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        return self.pieces(lambda cut: work())[0]

    def pieces(self, work: Callable[[Work], None]) -> list[Work]:
        """Capture ``work`` in several graphs: wherever it calls its argument, one ends and the next begins."""
        graphs, current = [], torch.cuda.current_stream()

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

        def cut() -> None:
            graphs[-1].capture_end()
            begin()

        self._stream.wait_stream(current)
        collecting = gc.isenabled()
        gc.disable()  # a finaliser that frees device memory would spoil the capture
        try:
            with torch.cuda.stream(self._stream):
                begin()
                try:
                    work(cut)
                finally:
                    graphs[-1].capture_end()
        finally:
            if collecting:
                gc.enable()
        current.wait_stream(self._stream)
        return [graph.replay for graph in graphs]


def check_memory(device: torch.device, step_bytes: int) -> None:
    """Make sure that a capture which needs ``step_bytes`` fits. The allocator's cache may hold that memory, and cannot
    be emptied during a capture, so it is emptied here if need be. Raises OutOfMemoryError."""
    if device.type != "cuda":
        return
    needed = GRAPH_BYTES + step_bytes
    if torch.cuda.mem_get_info(device)[0] < needed:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    if torch.cuda.mem_get_info(device)[0] < needed:
        raise torch.OutOfMemoryError(f"less than {needed >> 20} MiB of device memory are left")


def peak_bytes(device: torch.device, work: Work) -> int:
    """Device memory that ``work`` takes at its peak, in bytes, with a quarter on top for fragments."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) * 5 // 4
