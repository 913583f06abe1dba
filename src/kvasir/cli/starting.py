"""Lines that a command prints while a model loads, so that no start is silent."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from kvasir.models import checkpoint


def packaged(model: str, command: str) -> str:
    """Return the line that says that a packaged model answers and how to use a larger one; "" for other models."""
    if model not in ("", "embedded") and model not in checkpoint.shipped():
        return ""
    name = checkpoint.resolve(model).name
    return (
        f"the small packaged model '{name}' answers: it knows modular sums and little stories. For a real model: "
        f"{command} PATH (a folder, a GGUF file or a hub id)"
    )


@contextlib.contextmanager
def loading(model: str) -> Iterator[None]:
    """Say on stderr that the model loads: a spinner with the time on a terminal, else two plain lines."""
    name, began = model or "the packaged model", time.monotonic()
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            bar.add_task(f"loading {name}", total=None)
            yield
    else:
        print(f"loading {name}", file=sys.stderr, flush=True)
        yield
        print(f"loaded after {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
