"""The trainer's process: ``python -m kvasir.learn.online --folder FOLDER``, started and ended by an engine.

It takes traces from the ring in the folder, learns from them, and sends what passed the first gate. It holds no more of
the served model than embeddings, norm and output matrix.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from kvasir import logs
from kvasir.client.ipc import ClosedError
from kvasir.errors import ConfigError
from kvasir.learn import messages
from kvasir.learn.base import Base
from kvasir.learn.learner import Learner, Recipe, head_to_learn
from kvasir.learn.link import Engine
from kvasir.learn.messages import CARD, WEIGHTS, Order
from kvasir.learn.pace import LEAST_ROWS, Pace
from kvasir.learn.ring import TraceRing
from kvasir.learn.trace import Trace
from kvasir.logs import log

INTAKE = 8  # traces taken between two slices
WAIT = 0.02  # seconds between two looks when there is nothing to do
REPORT_SECONDS = 1.0
SAME = "same"


class Online:
    """One trainer. ``sleep`` and ``clock`` are those of the system."""

    def __init__(
        self,
        folder: Path,
        engine: Engine,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._engine, self._sleep, self._clock = folder, engine, sleep, clock
        order = self._order = Order.read(folder)
        self._device = torch.device("cuda:0" if order.device == SAME else order.device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # Triton launches kernels there, wherever their tensors are
        self._dtype = getattr(torch, order.dtype)
        self._pace = Pace(order.share if order.device == SAME else 1.0, clock)
        base = Base.read(Path(order.model), self._device, self._dtype)
        recipe = msgspec.convert(order.options | {"every": order.every, "lam": order.lam}, Recipe)
        head = head_to_learn(order.kind, base, order.drafter)
        scratch = order.drafter in ("", "new")
        self.learner = Learner(head, base, recipe, scratch=scratch, layers=tuple(order.layers))
        if self._pace.share < 1:
            self.learner.slice_rows = min(LEAST_ROWS, recipe.rows)
        self._slices = self.learner.slices()
        self._ring = TraceRing.open(folder)
        self._version, self._sent = order.version, -1  # of the next candidate, and of the one that is judged now
        self._base_version, self._target = order.base_version, order.target
        self._resting, self._reported = False, 0.0
        self._slice = 0, 0.0  # rows and seconds of the last one that learned

    def run(self) -> None:
        """Learn until the engine says Stop or is gone. Raises ConfigError when learning cannot go on."""
        while True:
            worked = self.turn()
            for message in self._engine.poll(0.0 if worked else WAIT):
                self.hear(message)

    def turn(self) -> bool:
        """Take traces and do one slice. Returns whether there was anything to do."""
        self._intake()
        now = self._clock()
        if now - self._reported >= REPORT_SECONDS:
            self._reported = now
            self._report()
        if self._resting:
            return False
        begun = self._clock()
        if (rows := next(self._slices)) is None:
            return False
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds = self._clock() - begun
        if rows:
            self._slice = rows, seconds
            self.learner.slice_rows = self._pace.rows(rows, self.learner.slice_rows, self.learner.recipe.rows, seconds)
        if self.learner.candidate is not None and self._sent < 0:
            self._send_candidate()
        if rest := self._pace.rest(seconds):
            self._sleep(rest)
        return True

    def hear(self, message: messages.FromEngine) -> None:
        """React to a message. Verdicts on other versions than the one that is judged are ignored."""
        match message:
            case messages.Accepted(version=version) if version == self._sent:
                self.learner.accepted()
                self._sent = -1
            case messages.RolledBack(version=version) if version == self._sent:
                self.learner.rolled_back()
                self._sent = -1
            case messages.Rest(on=on):
                self._resting = on
            case messages.Renewed():
                self._base_version, self._target = message.base_version, message.target
                self.learner.forget(Base.read(Path(message.model), self._device, self._dtype))
                self._slices = self.learner.slices()  # a step or a gate that had begun saw the old model

    def _intake(self) -> None:
        for _ in range(INTAKE):
            data = self._ring.take()
            if data is None:
                return
            try:
                trace = Trace.decode(data)
            except ValueError as error:
                log.warning("a trace is left out: %s", error)
                continue
            if trace.base_version == self._base_version:
                self.learner.add(trace)

    def _report(self) -> None:
        learner = self.learner
        self._engine.send(
            messages.Report(
                kl_by_depth=list(learner.by_level),
                traced=learner.traced,
                busy_share=self._pace.busy_share,
                slice_rows=self._slice[0],
                slice_ms=round(1000 * self._slice[1], 2),
                steps=learner.steps,
                gaining=not learner.settled,
            )
        )

    def _send_candidate(self) -> None:
        """Write the candidate, whole under a name of its own, and tell the engine."""
        assert self.learner.candidate is not None
        weights, before, after = self.learner.candidate
        folder = self._folder / f"candidate-{self._version}"
        shutil.rmtree(folder, ignore_errors=True)  # of a trainer that died before it could tell
        card = messages.Card(
            version=self._version,
            kind=self._order.kind,
            layers=list(self.learner.head.shape.layers),
            target=self._target,
        )
        try:
            folder.mkdir()
            save_file({name: p.cpu().contiguous() for name, p in weights.items()}, folder / WEIGHTS)
            (folder / CARD).write_bytes(msgspec.json.encode(card))
        except (OSError, SafetensorError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise ConfigError(f"new weights cannot be written to {folder}: {error}") from error
        log.info("candidate %d: %.3f tokens a forward, %.3f before", self._version, after, before)
        self._sent, self._version = self._version, self._version + 1
        self._engine.send(messages.Candidate(version=self._sent, folder=str(folder)))


def main(arguments: list[str] | None = None) -> int:
    """Run the process. Returns its exit code: 0 where learning ended in order."""
    parser = argparse.ArgumentParser(prog="kvasir.learn.online", description="Train a drafter on an engine's traces.")
    parser.add_argument("--folder", type=Path, required=True, help="the engine's private folder")
    folder = parser.parse_args(arguments).folder
    engine, order = Engine(folder), Order.read(folder)
    logs.setup(order.log_level)
    if order.device == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // 4))
    try:
        Online(folder, engine).run()
    except ConfigError as error:
        engine.send(messages.Ended(reason=str(error)))
    except ClosedError:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
