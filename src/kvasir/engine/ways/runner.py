"""Runs plans on the device. The runner knows nothing of a request but its seat.

``launch`` does not wait for the device; the handle's ``read`` does, and only for its own step. The next plan may be
launched between the two: a decode whose token is still being drawn takes it from its seat on the device. Where what may
be drawn depends on such a token, too, the plan is launched ``late``: its forward runs while the host reads the step
before, and ``draw`` follows.
"""

from __future__ import annotations

from typing import TypeVar

import torch

from kvasir.engine.ways.capture import Capture, CudaCapture
from kvasir.engine.ways.chain_graphs import ChainGraphs
from kvasir.engine.ways.graphs import DecodeGraphs
from kvasir.engine.ways.native_decodes import NativeDecodes
from kvasir.engine.ways.step_way import CapturingWay, StepParts, StepWay
from kvasir.engine.ways.tape import Arena, record
from kvasir.engine.ways.taps import Listener, Taps
from kvasir.types import Handle, Plan, Sequence

W = TypeVar("W", bound=StepWay)


class Runner:
    """Gives each step to the first of ``ways`` that takes it. They go from the cheapest launch to the most general
    (``build.ways_to_run``); the last one must take every step."""

    def __init__(self, parts: StepParts, ways: list[StepWay]) -> None:
        self.parts = parts
        self.model, self.pool, self.backend = parts.model, parts.pool, parts.backend
        self.sampler, self.seats, self.device = parts.sampler, parts.seats, parts.device
        self.use(ways)

    def use(self, ways: list[StepWay]) -> None:
        """Run steps in these ways from now on. Nothing may be running."""
        self.ways = ways
        self._capturing = [way for way in ways if isinstance(way, CapturingWay)]
        # The model of step times asks these once a step which steps are alike.
        self.graphs = self.way(DecodeGraphs)
        self.chains: DecodeGraphs | None = self.way(ChainGraphs) or self.graphs  # runs steps with forced chains
        self.native = self.way(NativeDecodes)
        if self.parts.taps is not None:
            self._use_taps(self.parts.taps)

    def way(self, kind: type[W]) -> W | None:
        """The way of this class; None: steps are not run so here."""
        return next((way for way in self.ways if isinstance(way, kind)), None)

    def launch(self, plan: Plan, late: bool = False) -> Handle:
        """Run a plan whose page copies were made already, in the first way that takes it. Does not wait for the device.

        ``late``: a draw that the host has to prepare is left to ``draw``, before the next launch."""
        spans, self.parts.late = plan.spans, late
        for way in self.ways:
            if way.takes(spans):
                return way.run(spans)
        raise AssertionError("the last way takes every step")

    def draw(self) -> None:
        """Launch the draw that the last launch left. All steps before it were read."""
        self.parts.draw_late()

    def weights_changed(self) -> None:
        """Renew what holds copies of weights. Nothing may be running."""
        self.model.forget_copies()
        for way in self.ways:
            way.weights_changed()

    @property
    def captures(self) -> int:
        """CUDA graphs captured since the start."""
        return sum(way.captures for way in self._capturing)

    def capture_next(self) -> bool:
        """Capture one more step while nothing is in flight. False: none is left."""
        in_turns = sorted(self._capturing, key=lambda way: way.captures)  # each way begins with what matters most
        return any(way.capture_next() for way in in_turns)

    def listen(self, layers: tuple[int, ...]) -> Listener:
        """Hand out the outputs of these layers, too, with every span's result. Called before any step is captured or
        recorded."""
        listener, taps = Listener(layers), self.parts.taps
        self._use_taps(Taps([*([] if taps is None else taps.listeners), listener], self.model))
        return listener

    def _use_taps(self, taps: Taps) -> None:
        self.parts.taps = taps
        for way in self.ways:
            way.use_taps(taps)

    def capture(self) -> Capture | None:
        """The way to make a replay of work on static buffers: CUDA graphs where decode steps are captured, tapes on a
        CPU in normal mode."""
        if self.graphs is not None:
            return CudaCapture(self.device)
        if self.device.type != "cpu" or self.model.place.exact:
            return None
        arena = Arena()
        return lambda work: record(work, arena).replay

    def open(self, seq: Sequence) -> None:
        """Set up seat ``seq.seat`` for a sequence that starts or starts again."""
        self.parts.open(seq)

    def close(self, seat: int) -> None:
        """Free a seat for another sequence."""
        self.parts.close(seat)

    def forget(self) -> None:
        """Recover from a failed launch or step: wait until nothing of it runs, and trust nothing that it left on the
        device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seats.forget()
        self.parts.forget_late()
