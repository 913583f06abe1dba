"""Tasks and prompt forms by name: ``chain``, ``chain:max_steps=8``, or ``judge_pair/chain`` for a form on a task."""

from __future__ import annotations

from kvasir.technique import is_file, load
from kvasir_lab.forms import FORMS, FormTask
from kvasir_lab.task import Task


def load_task(spec: str) -> Task:
    """Build a task from ``name``, ``name:key=value,key=value``, ``form/name:...`` or a file's path.

    Raises ConfigError for an unknown part.
    """
    form, slash, inner = spec.partition("/")
    if slash:
        form = form.strip()
        if form == "solve" or form in FORMS or not is_file(spec):  # otherwise the slash belongs to a file's path
            return load_task(inner) if form == "solve" else FormTask(form, load_task(inner))
    return load("kvasir_lab.tasks", spec, Task)
