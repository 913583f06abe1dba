"""Progress of a training run: a bar on a terminal that has rich, otherwise a line every few seconds."""

from __future__ import annotations

import sys
import time


class Progress:
    """Shows the progress of a run: ``with Progress("nano") as p: p.show(step, total, "loss 1.23")``.

    ``every``: seconds between two lines where there is no bar.
    """

    def __init__(self, title: str, every: float = 10.0) -> None:
        self.title, self.every = title, every
        self._last = float("-inf")
        self._bar = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            try:
                from rich import progress as rich
            except ImportError:
                return self
            self._bar = rich.Progress(
                rich.TextColumn("{task.description}"),
                rich.BarColumn(),
                rich.MofNCompleteColumn(),
                rich.TimeRemainingColumn(),
                rich.TextColumn("{task.fields[note]}"),
            )
            self._task = self._bar.add_task(self.title, total=None, note="")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, step: int, total: int, note: str) -> None:
        """Update the bar, or print a line when the last one is old enough."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, total=total, note=note)
        elif time.monotonic() - self._last >= self.every or step == total:
            self._last = time.monotonic()
            print(f"{self.title} {step}/{total} {note}", flush=True)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False)
        else:
            print(text, flush=True)
