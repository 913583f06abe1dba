"""Random, non-zero I-DLM adapters for the smallest model: weights that mean nothing, as loud as its own."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from kvasir.models.checkpoint import resolve
from kvasir.speculation import heads
from kvasir_lab import export

PARTS = (
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
)


def tensors_of(model, rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    embed = model.model.embed_tokens.weight.detach().float()
    tensors = {"mask_embedding": embed.mean(0) + embed.std(0) * torch.randn(embed.shape[1], generator=generator)}
    for i, layer in enumerate(model.model.layers):
        for part in PARTS:
            matrix, name = layer.get_submodule(part), f"base_model.model.model.layers.{i}.{part}"
            a = torch.randn(rank, matrix.in_features, generator=generator) * matrix.in_features**-0.5
            b = torch.randn(matrix.out_features, rank, generator=generator) * 0.1
            tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    return tensors


def random_masks(folder: Path, stride: int = 4, rank: int = 4, tensors: dict | None = None, **config) -> Path:
    """Write the folder of a drafter for nano; ``config`` and ``tensors`` replace what is written."""
    model = export.load(resolve("nano")).model
    size, dim = model.embed_tokens.weight.shape
    target = {"name": "nano", "hidden_size": dim, "vocab_size": size, "num_layers": len(model.layers)}
    target["weights"] = heads.fingerprint(model.norm.weight)
    found = {"kind": "idlm", "target": target, "stride": stride, "mask_token_id": None, "rank": rank, "alpha": 2 * rank}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(found | config))
    given = tensors_of(export.load(resolve("nano")), rank) if tensors is None else tensors
    save_file({name: tensor.contiguous() for name, tensor in given.items()}, folder / "adapter_model.safetensors")
    return folder
