"""The state of an unfinished run on disk: safetensors files, written whole or not at all.

The documents made of the model's own replies change once a phase, the weights at every save, so each has its own file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from kvasir.errors import ConfigError
from kvasir_lab.task import Documents
from kvasir_lab.training.recipe import Recipe

NAME = "state.safetensors"
OWN_NAME = "own.safetensors"
FIELDS = ("recipe", "fingerprint", "step", "total", "tokens", "seconds", "history", "phase", "own_seconds")


def save_state(folder: Path, run: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Write the numbers of a run (as JSON) and its tensors. A crash while writing leaves the previous file."""
    _write(folder / NAME, {k: t.detach().cpu().contiguous() for k, t in tensors.items()}, run)


def _write(file: Path, tensors: dict[str, torch.Tensor], run: dict[str, Any]) -> None:
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_bytes(save(tensors, metadata={"run": json.dumps(run)}))
    os.replace(temporary, file)


def _read(file: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    if not file.is_file():
        raise ConfigError(f"nothing to resume: {file} does not exist")
    try:
        with safe_open(file, "pt") as f:
            run = json.loads((f.metadata() or {}).get("run", "{}"))
            return run, {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError, ValueError) as e:
        raise ConfigError(f"{file} is broken ({e}): delete it and start again") from e


def save_own(folder: Path, phase: int, made: dict[str, Documents]) -> None:
    """Write the documents that phase number ``phase`` made."""
    tensors = {
        f"{name}.{field}": torch.from_numpy(np.ascontiguousarray(getattr(documents, field)))
        for name, documents in made.items()
        for field in Documents.__slots__
    }
    _write(folder / OWN_NAME, tensors, {"phase": phase})


def load_own(folder: Path, phase: int) -> dict[str, Documents]:
    """Read the documents of a phase. Raises ConfigError when they are missing, broken, or of another phase."""
    run, tensors = _read(folder / OWN_NAME)
    if run.get("phase") != phase:
        raise ConfigError(
            f"{folder / OWN_NAME} is of phase {run.get('phase')}, {NAME} of phase {phase}: delete both and start again"
        )
    names = dict.fromkeys(key.rsplit(".", 1)[0] for key in tensors)
    try:
        return {
            name: Documents(*(tensors[f"{name}.{field}"].numpy() for field in Documents.__slots__)) for name in names
        }
    except KeyError as e:
        raise ConfigError(f"{folder / OWN_NAME} is broken (it lacks {e}): delete it and start again") from e


def load_state(folder: Path, recipe: Recipe) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Read the numbers and tensors of a run.

    Raises ConfigError when the file is missing, broken, or of another recipe.
    """
    file = folder / NAME
    run, tensors = _read(file)
    missing = [name for name in FIELDS if name not in run]
    if missing:
        raise ConfigError(f"{file} is no training state: it lacks {', '.join(missing)}")
    if run["fingerprint"] != recipe.fingerprint():
        raise ConfigError(
            f"{file} belongs to recipe '{run['recipe']}' with other settings or another seed "
            f"than '{recipe.name}' has now: resume with the same ones, or delete it"
        )
    return run, tensors
