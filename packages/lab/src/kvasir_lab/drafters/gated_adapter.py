"""The adapter of I-DLM's mask rows: LoRA of all seven matrices of every layer, and the mask's own embedding.

Only mask rows have it; all other rows are those of the base model, bit for bit. A folder holds ``config.json`` and
``adapter_model.safetensors`` in PEFT's names, with ``mask_embedding`` beside them.

Shape suffixes: E model dim, R rank, K inputs and N outputs of a matrix.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

from kvasir.plain_files import refuse_special
from kvasir_lab.model import Model

PARTS = (
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
)
WEIGHTS = "adapter_model.safetensors"


class GatedAdapter(nn.Module):
    """B A of every matrix, times alpha / rank. B begins at zero, and the mask as some token would."""

    def __init__(self, model: Model, rank: int, alpha: float, seed: int = 0) -> None:
        super().__init__()
        self.rank, self.alpha = rank, alpha
        generator = torch.Generator().manual_seed(seed)
        embed = model.model.embed_tokens.weight.detach().float().cpu()
        self.mask_E = nn.Parameter(embed.mean(0) + embed.std(0) * torch.randn(embed.shape[1], generator=generator))
        matrices = [layer.get_submodule(part) for layer in model.model.layers for part in PARTS]
        self.a = nn.ParameterList(
            torch.randn(rank, m.in_features, generator=generator) * m.in_features**-0.5 for m in matrices
        )
        self.b = nn.ParameterList(torch.zeros(m.out_features, rank) for m in matrices)

    def product(self, layer: int, name: str, linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        """W x + alpha / rank B A x, for rows x [..., K] that have the adapter."""
        i = layer * len(PARTS) + PARTS.index(name)
        return linear(x) + self.alpha / self.rank * F.linear(F.linear(x, self.a[i]), self.b[i])

    def write(self, folder: Path, target: dict[str, Any], stride: int) -> None:
        """Write the folder that ``--drafter idlm:model=FOLDER`` reads, in bf16. ``target``: as in `speculation.heads`;
        ``stride``: the largest one trained."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {"mask_embedding": self.mask_E}
        for i, (a, b) in enumerate(zip(self.a, self.b)):
            name = f"base_model.model.model.layers.{i // len(PARTS)}.{PARTS[i % len(PARTS)]}"
            tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
        config = {
            "kind": "idlm",
            "target": target,
            "stride": stride,
            "mask_token_id": None,
            "rank": self.rank,
            "alpha": self.alpha,
        }
        save_file({k: t.detach().to("cpu", torch.bfloat16).contiguous() for k, t in tensors.items()}, folder / WEIGHTS)
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path, model: Model) -> GatedAdapter:
        """The adapter in a folder that `write` made, in fp32."""
        refuse_special(folder)
        config = json.loads((folder / "config.json").read_text())
        found, tensors = cls(model, config["rank"], config["alpha"]), load_file(folder / WEIGHTS)
        with torch.no_grad():
            found.mask_E.copy_(tensors["mask_embedding"])
            for i, (a, b) in enumerate(zip(found.a, found.b)):
                name = f"base_model.model.model.layers.{i // len(PARTS)}.{PARTS[i % len(PARTS)]}"
                a.copy_(tensors[f"{name}.lora_A.weight"])
                b.copy_(tensors[f"{name}.lora_B.weight"])
        return found
