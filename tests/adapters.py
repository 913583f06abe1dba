"""Adapters for tests: PEFT folders with random matrices, and the base model with one merged in."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from kvasir.models import checkpoint
from kvasir.models.loader import read_tensors

NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def matrices(model: str = "nano") -> dict[str, tuple[int, int]]:
    """Outputs and inputs of every matrix that an adapter may change, by stored module name."""
    tensors = read_tensors(checkpoint.resolve(model))
    return {
        name.removesuffix(".weight"): tuple(tensor.shape)
        for name, tensor in tensors
        if name.removesuffix(".weight").endswith(NAMES)
    }


def write_adapter(
    folder: Path,
    *,
    rank: int = 8,
    alpha: float = 16,
    seed: int = 0,
    targets: tuple[str, ...] = NAMES,
    strength: float = 1.0,
    model: str = "nano",
    one_hot: bool = False,
    **config,
) -> Path:
    """Write an adapter whose A and B are random. With B = 0 every test of adapters would pass, whatever they do."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (outputs, inputs) in matrices(model).items():
        if not module.endswith(targets):
            continue
        a = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
        if one_hot:
            a = torch.zeros(rank, inputs)
            a[range(rank), torch.randperm(inputs, generator=generator)[:rank]] = 1
        b = torch.randn(outputs, rank, generator=generator) * strength * (rank * inputs) ** -0.5
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", "target_modules": list(targets)}
    settings |= {"base_model_name_or_path": model, "task_type": "CAUSAL_LM", "init_lora_weights": True}
    (folder / "adapter_config.json").write_text(json.dumps(settings | config))
    return folder


def merge(folder: Path, target: Path, model: str = "nano") -> Path:
    """Write the base model with W + alpha / r B A for every matrix, in fp32: the oracle, which shares no code with what
    is tested."""
    source = checkpoint.resolve(model)
    config = json.loads((folder / "adapter_config.json").read_text())
    root = config["r"] ** 0.5 if config.get("use_rslora") else config["r"]
    tensors = {name: tensor.float() for name, tensor in read_tensors(source)}
    adapter = load_file(folder / "adapter_model.safetensors")
    for name, a in adapter.items():
        if ".lora_A." in name:
            b = adapter[name.replace(".lora_A.", ".lora_B.")]
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            tensors[f"{module}.weight"] += config["lora_alpha"] / root * (b @ a)
    target.mkdir(parents=True)
    save_file(tensors, target / "model.safetensors")
    for file in source.iterdir():
        if file.is_file() and "safetensors" not in file.name:
            (target / file.name).write_bytes(file.read_bytes())
    return target
