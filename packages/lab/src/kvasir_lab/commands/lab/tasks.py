"""``kvasir lab tasks``."""

from __future__ import annotations

from kvasir.cli.command import command


@command(30)
def tasks() -> None:
    """List the tasks, their dials and the prompt forms."""
    import dataclasses
    import importlib

    from rich.console import Console
    from rich.table import Table

    from kvasir.technique import find, of_all
    from kvasir_lab.forms import FORMS
    from kvasir_lab.task import Task

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("task", "what", "dials"):
        table.add_column(column)
    for cls, config in of_all("kvasir_lab.tasks", lambda name: find("kvasir_lab.tasks", name, Task)):
        what = (importlib.import_module(cls.__module__).__doc__ or "").split("\n")[0].rstrip(".")
        dials = " ".join(f"{f.name}={f.default}" for f in dataclasses.fields(config)) if config else ""
        table.add_row(cls.name + ("" if cls.candidates else " *"), what, dials)
    console = Console(highlight=False)
    console.print(table)
    console.print(f"\nPrompt forms, written FORM/TASK: {', '.join(FORMS)} (tasks marked * can only be solved).")
    console.print("Set dials like this: chain:max_steps=8,modulus=11", markup=False)
