"""Merge a LoRA adapter into its base model: W + alpha / r B A. Also takes what is not served as an adapter.

DoRA, whole modules (``modules_to_save``, also with a larger vocabulary), biases, embeddings, the head and experts are
merged. Lossy by one rounding: the sums are made in fp32 and rounded to the base's type. It costs nothing at run time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvasir.convert.converter import Converter, Source
from kvasir.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from kvasir.convert.converter import Tensors
    from kvasir.models.peft import PeftFolder

EMBED, HEAD = "embed.weight", "head.weight"


@dataclass(frozen=True)
class Config:
    """``adapter``: the adapter's folder."""

    adapter: str = ""


class MergeLora(Converter):
    """The base model with an adapter in its weights."""

    exact = False
    result = "the base model with the adapter merged in"

    def check(self, source: Source) -> None:
        from kvasir.models.peft import OWN_BASE, PeftFolder

        if not self.config.adapter:
            raise ConfigError("merge_lora needs the adapter's folder: merge_lora:adapter=FOLDER")
        self.folder = folder = PeftFolder(Path(self.config.adapter))
        for field in ("layer_replication", "trainable_token_indices", "target_parameters", "fan_in_fan_out"):
            if folder.config.get(field):
                raise ConfigError(f"{folder.path}: {field} is not merged here; use PEFT's merge_and_unload")
        begins = str(folder.config.get("init_lora_weights", "")).lower()
        if begins.startswith(OWN_BASE):
            raise ConfigError(
                f"{folder.path}: init_lora_weights is '{begins}', which trains against a changed base. Save the "
                "adapter with PEFT's path_initial_model_for_weight_conversion first."
            )
        self.changes = folder.tensors()
        self.embed, self.head = source.stored(EMBED), source.stored(HEAD)
        # An update of one of two tied matrices leaves the other as it is. A new embedding is the new head, too.
        apart = f"{self._module(self.head)}.", f"{self._module(self.embed)}.lora_embedding"
        self.untied = source.spec.tied and any(name.startswith(apart) for name in self.changes)

    def edit_config(self, source: Source) -> dict[str, Any]:
        config = dict(source.config)
        if self.untied:
            config["tie_word_embeddings"] = False
        saved = self.changes.get(self.embed)
        return config if saved is None else config | {"vocab_size": saved.shape[0]}

    def tensors(self, source: Source, tensors: Tensors) -> Tensors:
        left = dict(self.changes)
        for name, tensor in tensors:
            if self.untied and name == self.head:
                continue  # a tied checkpoint may hold the head twice
            if self.untied and name == self.embed:
                yield self.head, self._merged(self.head, tensor.clone(), left)
            yield name, self._merged(name, tensor, left)
        if left:
            some = ", ".join(sorted(left)[:4])
            raise ConfigError(f"{self.config.adapter} changes what {source.path} does not have: {some}")

    def _merged(self, name: str, tensor: torch.Tensor, left: dict[str, torch.Tensor]) -> torch.Tensor:
        """The tensor with all that the adapter says about it, which is taken out of ``left``."""
        folder: PeftFolder = self.folder
        module, kind = self._module(name), name.rsplit(".", 1)[-1]
        w = left.pop(f"{module}.base_layer.{kind}", tensor)  # PEFT saves the embedding itself beside its update
        w = left.pop(name, w).float()
        if kind == "bias":
            extra = left.pop(f"{module}.lora_B.bias", None)
            rank = self.changes[f"{module}.lora_A.weight"].shape[0] if extra is not None else 1
            return (w if extra is None else w + folder.scale_of(module, rank) * extra.float()).to(tensor.dtype)
        a, b = left.pop(f"{module}.lora_A.weight", None), left.pop(f"{module}.lora_B.weight", None)
        if a is not None and b is not None:
            self._check_shape(module, (b.shape[0], a.shape[1]), w)
            w = w + folder.scale_of(module, len(a)) * (b.float() @ a.float())
        a, b = left.pop(f"{module}.lora_embedding_A", None), left.pop(f"{module}.lora_embedding_B", None)
        if a is not None and b is not None:
            self._check_shape(module, (a.shape[1], b.shape[0]), w)
            w = w + folder.scale_of(module, len(a)) * (b.float() @ a.float()).t()
        for stored in (f"{module}.lora_magnitude_vector", f"{module}.lora_magnitude_vector.weight"):
            if (magnitude := left.pop(stored, None)) is not None:
                w = w * (magnitude.float().flatten() / w.norm(dim=1))[:, None]
        return w.to(tensor.dtype)

    def _check_shape(self, module: str, shape: tuple[int, int], w: torch.Tensor) -> None:
        if shape != tuple(w.shape):
            raise ConfigError(
                f"{self.config.adapter}: '{module}' changes a matrix of {shape[0]} x {shape[1]}; the base model has "
                f"{w.shape[0]} x {w.shape[1]}. The adapter is for another base model."
            )

    @staticmethod
    def _module(name: str) -> str:
        return name.rsplit(".", 1)[0]
