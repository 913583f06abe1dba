"""The folder of an I-DLM drafter: an adapter for mask rows, and the mask's embedding (`docs/methods/idlm.md`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvasir.errors import ConfigError
from kvasir.models.checkpoint import read_json
from kvasir.models.peft import PREFIX, WEIGHTS, LowRankUpdate

KIND, MASK = "idlm", "mask_embedding"
TRAIN = "Train one with `kvasir train drafter idlm --target MODEL --out FOLDER`."


@dataclass(frozen=True, slots=True)
class MaskFolder:
    """What config.json says. ``target``: the model it was trained for, as `kvasir.speculation.heads.write` has it."""

    path: Path
    target: dict[str, Any]
    stride: int
    rank: int
    alpha: float

    def read(self) -> tuple[torch.Tensor, list[LowRankUpdate]]:
        """The mask's embedding [E] and the adapter. Raises ConfigError for what is missing, not finite, or no matrix of
        an adapter."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            tensors = {name.removeprefix(PREFIX): t for name, t in load_file(self.path / WEIGHTS).items()}
        except (OSError, SafetensorError) as e:
            raise ConfigError(f"{self.path / WEIGHTS} cannot be read ({e}). {TRAIN}") from e
        broken = next((name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()), None)
        if broken is not None:
            raise ConfigError(f"{self.path / WEIGHTS}: '{broken}' holds NaN or infinity. {TRAIN}")
        mask = tensors.pop(MASK, None)
        if mask is None:
            raise ConfigError(
                f"{self.path / WEIGHTS} has no '{MASK}', which mask rows read. Export it with the adapter. {TRAIN}"
            )
        return mask, list(self._updates(tensors))

    def _updates(self, tensors: dict[str, torch.Tensor]) -> Iterator[LowRankUpdate]:
        for name, a in tensors.items():
            module, _, part = name.partition(".lora_")
            if part == "B.weight" and f"{module}.lora_A.weight" in tensors:
                continue
            b = tensors.get(f"{module}.lora_B.weight") if part == "A.weight" else None
            if b is None or a.dim() != 2 or b.dim() != 2 or len(a) != b.shape[1] or len(a) != self.rank:
                raise ConfigError(
                    f"{self.path / WEIGHTS}: '{name}' of shape {tuple(a.shape)} is no half of a pair of rank "
                    f"{self.rank}. {TRAIN}"
                )
            yield LowRankUpdate(module, a, b, self.alpha / self.rank)


def read_folder(path: Path) -> MaskFolder:
    """What a folder says of itself. Raises ConfigError for one that is no drafter of this kind."""
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} holds no I-DLM drafter: it has no config.json. {TRAIN}")
    config = read_json(path / "config.json")
    if config.get("kind") != KIND:
        raise ConfigError(f"{path} holds no I-DLM drafter: config.json says kind {config.get('kind')!r}. {TRAIN}")
    stride, rank, alpha = config.get("stride"), config.get("rank"), config.get("alpha")
    for name, value, least in (("stride", stride, 2), ("rank", rank, 1)):
        if type(value) is not int or value < least:
            raise ConfigError(f"{path}: {name} is {value!r} in config.json, expected a number from {least} on. {TRAIN}")
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or alpha <= 0:
        raise ConfigError(f"{path}: alpha is {alpha!r} in config.json, expected a positive number. {TRAIN}")
    target = config.get("target")
    if not isinstance(target, dict):
        raise ConfigError(f"{path}: config.json does not say for which model ('target'). {TRAIN}")
    return MaskFolder(path, target, stride, rank, float(alpha))
