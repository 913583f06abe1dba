"""Folders of random latents for the codec `lowrank`, for models that nobody calibrated."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from kvasir.kv.latents import DESCRIPTION, WEIGHTS


def write_latents(folder: Path, layers: list[tuple[int, int] | None], heads: int, dim: int, seed: int = 0) -> Path:
    """Random orthonormal latents: ranks of keys and values by layer (None: the layer is cached as it is)."""
    folder.mkdir(parents=True)
    drawn, tensors, size = torch.Generator().manual_seed(seed), {}, heads * dim
    for index, ranks in enumerate(layers):
        for side, rank in zip("kv", ranks or ()):
            basis = torch.linalg.qr(torch.randn(size, size, generator=drawn)).Q[:, :rank].contiguous()
            tensors |= {f"layers.{index}.{side}_down": basis.T.contiguous(), f"layers.{index}.{side}_up": basis}
    save_file(tensors, folder / WEIGHTS)
    found = {"ranks": layers, "heads": [[heads, dim]] * len(layers), "digest": f"{seed} {layers}"}
    (folder / DESCRIPTION).write_text(json.dumps(found))
    return folder
