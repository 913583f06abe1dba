"""Write what a PEFT method has trained as a plain LoRA adapter of the base model, which every engine serves. Lossy by
one rounding.

The training form is a folder with ``training.json`` and ``training.safetensors``, as the lab writes it. By method:

- ``lora``: itself.
- ``corda`` (arXiv 2406.05223) trains against W - B0 A0: the adapter is [B, -B0] [A; A0], of twice the rank.
- ``paca`` (ICLR 2025) trains some columns of W in place: B is their change, and A picks them, which is a gather.
- ``hydra`` (arXiv 2309.06922) has a branch on the input and one on the output of W: [B, Bs] [A; As W]. Exact where the
  matrix has no bias.
- ``soka`` (arXiv 2506.15251) is a sum of Kronecker products: its singular vectors, up to ``rank``. Refused where these
  leave more than ``tolerance`` of the change.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvasir.convert.converter import Converter, Source
from kvasir.errors import ConfigError
from kvasir.plain_files import refuse_special

if TYPE_CHECKING:
    import torch

    from kvasir.convert.converter import Tensors

Parts = dict[str, "torch.Tensor"]


@dataclass(frozen=True)
class Config:
    """``trained``: folder of the training form. ``rank``: most singular vectors of ``soka``; ``tolerance``: share of
    its change that may be lost."""

    method: Literal["lora", "corda", "paca", "hydra", "soka"] = "lora"
    trained: str = ""
    rank: int = 64
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= 256:
            raise ConfigError(f"to_lora: rank={self.rank} must be from 1 to 256")


def lora(parts: Parts, w: torch.Tensor, scale: float, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """A [R, K] and B [N, R] of the update, with its scale in B."""
    return parts["A"], scale * parts["B"]


def corda(parts: Parts, w: torch.Tensor, scale: float, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    a = torch.cat([parts["A"], parts["A0"]])
    return a, scale * torch.cat([parts["B"], -parts["B0"]], 1)


def paca(parts: Parts, w: torch.Tensor, scale: float, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    columns = parts["columns"].long()
    a = w.new_zeros(len(columns), w.shape[1])
    a[range(len(columns)), columns] = 1
    return a, parts["values"] - w[:, columns]


def hydra(parts: Parts, w: torch.Tensor, scale: float, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    return torch.cat([parts["A"], parts["As"] @ w]), scale * torch.cat([parts["B"], parts["Bs"]], 1)


def soka(parts: Parts, w: torch.Tensor, scale: float, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    change = sum(s * torch.kron(u, v) for s, u, v in zip(parts["s"], parts["U"], parts["V"]))
    u, s, vt = torch.linalg.svd(scale * change, full_matrices=False)
    rank = min(config.rank, len(s))
    lost = (s[rank:].square().sum() / s.square().sum().clamp(min=1e-30)).sqrt().item()
    if lost > config.tolerance:
        raise ConfigError(
            f"to_lora: {rank} singular vectors lose {lost:.1%} of a change; tolerance is {config.tolerance:.1%}. Raise "
            "rank (up to 256) or tolerance."
        )
    return vt[:rank], u[:, :rank] * s[:rank]


METHODS: dict[str, Callable[[Parts, Any, float, Config], tuple[Any, Any]]] = {
    "lora": lora,
    "corda": corda,
    "paca": paca,
    "hydra": hydra,
    "soka": soka,
}


class ToLora(Converter):
    """A plain LoRA adapter in place of a model."""

    files = ("adapter_model.safetensors", "adapter_config.json")
    exact = False
    result = "a LoRA adapter of the base model"

    def check(self, source: Source) -> None:
        from safetensors.torch import load_file

        folder = Path(self.config.trained)
        refuse_special(folder)
        if not (folder / "training.json").is_file():
            raise ConfigError(f"to_lora needs the folder of a training form: to_lora:trained=FOLDER (not '{folder}')")
        self.about = json.loads((folder / "training.json").read_text())
        if self.about.get("method") != self.config.method:
            raise ConfigError(
                f"{folder} was trained by {self.about.get('method')!r}: to_lora:method={self.about['method']}"
            )
        self.parts: dict[str, Parts] = {}
        for name, tensor in load_file(folder / "training.safetensors").items():
            module, part = name.rsplit(".", 1)
            self.parts.setdefault(module, {})[part] = tensor if part == "columns" else tensor.float()

    def edit_config(self, source: Source) -> dict[str, Any]:
        """adapter_config.json. The scale is in B already, so alpha is the rank, of every module its own."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": source.path.name,
            "r": max(self.ranks.values()),
            "lora_alpha": max(self.ranks.values()),
            "rank_pattern": self.ranks,
            "alpha_pattern": self.ranks,
            "target_modules": sorted({module.rsplit(".", 1)[-1] for module in self.ranks}),
            "bias": "none",
            "init_lora_weights": True,
        }

    def tensors(self, source: Source, tensors: Tensors) -> Tensors:
        self.ranks: dict[str, int] = {}
        left = dict(self.parts)
        for name, w in tensors:
            module = name.removesuffix(".weight")
            if module == name or module not in left:
                continue
            export = METHODS[self.config.method]
            a, b = export(left.pop(module), w.float(), float(self.about.get("scale", 1.0)), self.config)
            self.ranks[module] = len(a)
            yield f"base_model.model.{module}.lora_A.weight", a.contiguous()
            yield f"base_model.model.{module}.lora_B.weight", b.contiguous()
        if left:
            raise ConfigError(f"{self.config.trained} has trained what {source.path} does not have: {', '.join(left)}")
