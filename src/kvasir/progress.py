"""Progress that a command shows while it works: that a model loads, and how far long work is.

On a terminal both are drawn on stderr with rich. Elsewhere they are plain lines, or nothing.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

# Seconds between two lines that a library is still being imported. The largest takes ten on a busy machine.
IMPORT_SECONDS = 2.0


@contextlib.contextmanager
def imports_told(module: str, name: str) -> Iterator[None]:
    """Say on stderr every ``IMPORT_SECONDS`` that a ``module``, called ``name``, is still being imported, for as long
    as that takes inside the block."""
    done = threading.Event()

    def watch() -> None:
        said = 0.0
        while not done.wait(IMPORT_SECONDS):
            found = sys.modules.get(module)
            if found is None:
                continue
            if not getattr(found.__spec__, "_initializing", False):
                return
            said += IMPORT_SECONDS
            print(f"loading {name}: {said:.0f} s so far", file=sys.stderr, flush=True)

    threading.Thread(target=watch, name="imports", daemon=True).start()
    try:
        yield
    finally:
        done.set()


@contextlib.contextmanager
def loading(model: str) -> Iterator[None]:
    """Say on stderr that the model loads: a spinner with the time on a terminal, else two plain lines."""
    name, began = model or "the packaged model", time.monotonic()
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress as Bar
        from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
            bar.add_task(f"loading {name}", total=None)
            yield
    else:
        print(f"loading {name}", file=sys.stderr, flush=True)
        yield
        print(f"loaded after {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)


class Progress:
    """Shows how far some work is: ``with Progress("nano") as p: p.show(step, total, "loss 1.23")``.

    On a terminal a bar on stderr. Elsewhere lines on stdout: the first and last step, and one every ``every`` seconds
    between. ``brief``: the bar goes when the work ends, and elsewhere there are lines on stderr only while it takes
    longer than that (``every`` None: none at all). ``still``: the bar is drawn only when it changes, so that it takes
    no time from work that is measured.
    """

    def __init__(self, title: str, every: float | None = 10.0, *, brief: bool = False, still: bool = False) -> None:
        self.title, self.every, self.brief, self.still = title, every, brief, still
        self.done = self.total = 0
        self._last = time.monotonic() if brief else float("-inf")
        self._bar = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich import progress as rich
            from rich.console import Console

            self._bar = rich.Progress(
                rich.TextColumn("{task.description}"),
                rich.BarColumn(),
                rich.MofNCompleteColumn(),
                rich.TimeRemainingColumn(),
                rich.TextColumn("{task.fields[note]}"),
                console=Console(stderr=True),
                transient=self.brief,
                auto_refresh=not self.still,
            )
            self._task = self._bar.add_task(self.title, total=None, note="")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, step: int, total: int, note: str = "") -> None:
        """Update the bar, or print a line when the last one is old enough."""
        self.done, self.total = step, total
        if self._bar is not None:
            self._bar.update(
                self._task, description=self.title, completed=step, total=total, note=note, refresh=self.still
            )
            return
        late = self.every is not None and time.monotonic() - self._last >= self.every
        if late or (step == total and not self.brief):
            self._last = time.monotonic()
            print(f"{self.title} {step}/{total} {note}".rstrip(), file=self._lines(), flush=True)

    def step(self, note: str = "") -> None:
        """One step further, of the total that `show` gave."""
        self.show(self.done + 1, self.total, note)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False)
        else:
            print(text, file=self._lines(), flush=True)

    def _lines(self):
        return sys.stderr if self.brief else sys.stdout
