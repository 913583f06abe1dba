"""The state of an unfinished run on disk: one safetensors file, written whole or not at all, read back with clear refusals."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from kvasir.errors import ConfigError
from kvasir.lab.recipe import Recipe

NAME = "state.safetensors"
FIELDS = ("recipe", "fingerprint", "step", "total", "tokens", "seconds", "history")


def save_state(folder: Path, run: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Write the numbers of a run (JSON) and its tensors, through a temporary file, so that a crash leaves the previous one."""
    temporary = folder / (NAME + ".tmp")
    temporary.write_bytes(save({k: t.detach().cpu().contiguous() for k, t in tensors.items()}, metadata={"run": json.dumps(run)}))
    os.replace(temporary, folder / NAME)


def load_state(folder: Path, recipe: Recipe) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Read both back. Raises ConfigError when the file is missing, broken, or of another recipe."""
    file = folder / NAME
    if not file.is_file():
        raise ConfigError(f"nothing to resume: {file} does not exist")
    try:
        with safe_open(file, "pt") as f:
            run = json.loads((f.metadata() or {}).get("run", "{}"))
            tensors = {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError, ValueError) as e:
        raise ConfigError(f"{file} is broken ({e}): delete it and start anew") from e
    missing = [name for name in FIELDS if name not in run]
    if missing:
        raise ConfigError(f"{file} is no training state: it lacks {', '.join(missing)}")
    if run["fingerprint"] != recipe.fingerprint():
        raise ConfigError(f"{file} belongs to recipe '{run['recipe']}' with other settings than '{recipe.name}' has now (or another seed): "
                          "resume with the same ones, or delete it")
    return run, tensors
