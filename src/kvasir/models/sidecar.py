"""The sidecar of a checkpoint: kvasir.json beside its config.json, as a converter or a trainer wrote it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvasir.errors import ConfigError
from kvasir.models.checkpoint import SIDECAR, read_json


@dataclass(frozen=True, slots=True)
class Sidecar:
    """``mask_id``: the token that stands for an unknown one in mask rows and is never drawn; None: there is none.
    ``stride``: tokens of a step that the model was trained for; 0: it was not."""

    mask_id: int | None = None
    stride: int = 0


def read_sidecar(path: Path, vocab_size: int) -> Sidecar:
    """The sidecar of a model folder. Raises ConfigError for a mask outside the vocabulary and a stride below 2."""
    if not (path / SIDECAR).is_file():
        return Sidecar()
    found = read_json(path / SIDECAR)
    mask, stride = found.get("mask_token_id"), found.get("stride", 0)
    if mask is not None and not (type(mask) is int and 0 <= mask < vocab_size):
        raise ConfigError(f"{path / SIDECAR}: mask_token_id is {mask!r}, expected an id below {vocab_size}, or null")
    if type(stride) is not int or stride == 1 or stride < 0:
        raise ConfigError(f"{path / SIDECAR}: stride is {stride!r}, expected a number from 2 on")
    return Sidecar(mask, stride)
