"""Pieces of work without a GPU: nothing is captured. A piece runs the work, in a thread of its own, to its next cut."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch

Work = Callable[[], None]


class Stepwise:
    def __init__(self) -> None:
        self.captured = 0

    def pieces(self, work: Callable[[Work], None]) -> list[Work]:
        cuts = []
        work(lambda: cuts.append(None))
        run = _Run(work)
        self.captured += 1
        return [run.next] * (len(cuts) + 1)


class _Run:
    def __init__(self, work: Callable[[Work], None]) -> None:
        self._work = work
        self._go: SimpleQueue = SimpleQueue()
        self._stopped: SimpleQueue = SimpleQueue()  # after a piece: None, or what went wrong
        self._running = False

    def next(self) -> None:
        if not self._running:
            self._running = True
            threading.Thread(target=self._thread, daemon=True).start()
        self._go.put(None)
        error = self._stopped.get()
        if error is not None:
            raise error

    @torch.inference_mode()
    def _thread(self) -> None:
        torch.set_num_threads(1)
        self._go.get()
        error = None
        try:
            self._work(self._cut)
        except Exception as e:
            error = e
        self._running = False
        self._stopped.put(error)

    def _cut(self) -> None:
        self._stopped.put(None)
        self._go.get()
