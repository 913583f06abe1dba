"""The training loop: steps until the planned end, with looks at the device, validations, saves and phases."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch

from kvasir.errors import ConfigError
from kvasir.progress import Progress
from kvasir_lab.training.data import Batch
from kvasir_lab.training.state import NAME
from kvasir_lab.training.trainer import Trainer

LOOK = 20  # Steps between two looks at the device, each of which waits for it.
WARM = 8  # Steps that compile and warm up; their time is not counted as training.
VALIDATIONS = 10  # Validations over the whole run.


def run(trainer: Trainer, out: Path, *, minutes: float | None, stop_after: float | None, save_every: float) -> bool:
    """Train to the planned end. Returns False when ``stop_after`` seconds or Ctrl-C ended the run early (state saved).

    With ``minutes``, every look plans the number of steps again from the measured speed, so that the cosine ends when
    the time does. Raises ConfigError when the loss is no longer a number.
    """
    begin = saved = time.monotonic()
    clock = _Clock(trainer)
    with Progress(trainer.recipe.name) as progress:
        trainer.advance(out, progress.say)
        stream = trainer.mixture.stream(trainer.done, trainer.workers, trainer.phase)
        try:
            while trainer.done < trainer.total:
                batches = clock.wait(stream)
                report = (
                    trainer.first_step(batches, progress.say) if trainer.done == clock.first else trainer.step(batches)
                )
                if clock.warming():
                    float(report[0])  # this waits for the device, so compiling and warming up end here
                    progress.say(f"warm after {clock.start():.1f} s")
                if trainer.done % LOOK and trainer.done != trainer.total:
                    continue
                values = clock.device(report)
                if not all(map(math.isfinite, values)):
                    raise ConfigError(f"the loss is {values[0]} at step {trainer.done}: lower the recipe's lr")
                speed = clock.look()
                if minutes is not None and speed:
                    trainer.total = trainer.done + max(0, int((minutes * 60 - trainer.seconds) * speed))
                million = speed * trainer.tokens / trainer.done / 1e6
                progress.show(
                    trainer.done,
                    trainer.total,
                    f"loss {values[0]:.3f} right {values[2]:.1%} lr {trainer.rate(trainer.done):.1e} "
                    f"{million:.3f}M tok/s, waits: {clock.waited:.0%} for data, "
                    f"{clock.waited_device:.0%} for the device, {trainer.seconds:.0f} s",
                )
                if trainer.done >= len(trainer.history) * trainer.total / VALIDATIONS or trainer.done >= trainer.total:
                    row = trainer.validate(values)
                    progress.say(
                        "  held out: "
                        + ", ".join(f"{k} {v:.4f}" for k, v in row.items() if k.endswith(("loss", "right")))
                    )
                now = time.monotonic()
                if stop_after is not None and now - begin > stop_after and trainer.done < trainer.total:
                    trainer.save(out)
                    return False
                if now - saved > save_every:
                    trainer.save(out)
                    saved = now
                if trainer.done < trainer.total and trainer.advance(out, progress.say):
                    clock.skip()
                    stream.close()
                    stream = trainer.mixture.stream(trainer.done, trainer.workers, trainer.phase)
        except KeyboardInterrupt:
            # Ctrl-C may strike between two updates of one step. The last saved state is whole, so it stays.
            if not (out / NAME).exists():
                raise
            return False
        finally:
            stream.close()
    return True


class _Clock:
    """Training time, from the end of warming up to the last look, without the time between phases."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.begin, self.base = trainer, time.monotonic(), trainer.seconds
        self.first, self.mark, self.mark_step = trainer.done, None, trainer.done
        self.last, self.idle, self.blocked, self.waited, self.waited_device = self.begin, 0.0, 0.0, 0.0, 0.0

    def wait(self, stream: Any) -> list[Batch]:
        """The next batches; counts the time spent waiting for data."""
        before = time.monotonic()
        batches = next(stream)
        self.idle += time.monotonic() - before
        return batches

    def device(self, report: torch.Tensor) -> list[float]:
        """The report's values; counts the time spent waiting for the device.

        A long wait means that the device limits the run; a short one means that Python or the data does.
        """
        before = time.monotonic()
        values = report.tolist()
        self.blocked += time.monotonic() - before
        return values

    def warming(self) -> bool:
        """Whether warming up ends with this step."""
        return self.mark is None and self.trainer.done - self.first >= min(WARM, LOOK)

    def start(self) -> float:
        """Start counting. Returns the seconds of warming up."""
        self.last = self.mark = time.monotonic()
        self.mark_step, self.idle, self.blocked = self.trainer.done, 0.0, 0.0
        return self.mark - self.begin

    def look(self) -> float:
        """Update the trainer's time. Returns steps a second since warming up (0: unknown)."""
        now = time.monotonic()
        if self.mark is None or self.trainer.done == self.mark_step:
            return 0.0
        spent = max(now - self.last, 1e-9)
        self.waited, self.waited_device = self.idle / spent, self.blocked / spent
        self.idle, self.blocked, self.last = 0.0, 0.0, now
        self.trainer.seconds = self.base + now - self.mark
        return (self.trainer.done - self.mark_step) / (now - self.mark)

    def skip(self) -> None:
        """Do not count the time since the last look as training."""
        now = time.monotonic()
        if self.mark is not None:
            self.mark += now - self.last
        self.last = now
