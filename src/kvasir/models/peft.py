"""Folders of LoRA adapters as PEFT writes them: adapter_config.json and adapter_model.safetensors.

An adapter of the products of attention and of dense feed-forward blocks is served as it is. Whatever else PEFT can
train (DoRA, whole modules, biases, embeddings, the head, experts) is refused by name, with the command that merges it
into its base model. Nothing is unpickled.

Legend: K inputs, N outputs, R rank.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvasir.errors import ConfigError
from kvasir.models.checkpoint import read_json
from kvasir.models.patterns import Patterns
from kvasir.plain_files import refuse_special

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# Ways to begin that change the base weights: such an adapter belongs to its own residual base until it is converted.
OWN_BASE = ("pissa", "corda", "olora", "loftq")
# Most entries of alpha_pattern: there is one for each module at most.
MAX_PATTERNS = 4096
# Most names listed in a message, and most characters of a value that is quoted.
SHOWN, QUOTED = 4, 80
# Bytes of an adapter's file beyond its matrices: its header has one entry for each.
HEADER_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class LowRankUpdate:
    """An addition to one stored matrix: ``scale`` * B A. ``a_RK``, ``b_NR``: as stored."""

    module: str  # the stored matrix's name without ".weight"
    a_RK: torch.Tensor
    b_NR: torch.Tensor
    scale: float


class PeftFolder:
    """An adapter's folder, with its config read. Raises ConfigError when it is not one, or not of PEFT's LoRA."""

    def __init__(self, path: Path) -> None:
        self.path = path
        refuse_special(path)
        if not (path / CONFIG).is_file():
            raise ConfigError(f"{path} has no {CONFIG}: name a folder that PEFT's save_pretrained wrote")
        if not (path / WEIGHTS).is_file():
            found = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".safetensors"))
            held = f"; it holds {', '.join(found[:SHOWN])}, which is not read" if found else ""
            raise ConfigError(f"{path} has no {WEIGHTS}{held}. Save the adapter with safe_serialization=True.")
        self.config = read_json(path / CONFIG)
        kind = self.config.get("peft_type")
        if kind != "LORA":
            raise ConfigError(
                f"{path}: peft_type is {_shown(kind)}; LORA is served. `kvasir convert to_lora` writes it."
            )
        self.rank = self._number("r")
        self.alpha = self._number("lora_alpha")
        patterns = self.config.get("alpha_pattern") or {}
        if not isinstance(patterns, dict) or len(patterns) > MAX_PATTERNS:
            raise ConfigError(f"{path / CONFIG}: alpha_pattern is no object of at most {MAX_PATTERNS} patterns")
        self.alphas = patterns
        self._patterns = Patterns(patterns, f"{path / CONFIG}: alpha_pattern")
        for pattern, alpha in patterns.items():
            if not _finite(alpha):
                where = f"{path / CONFIG}: alpha_pattern of {_shown(pattern)}"
                raise ConfigError(f"{where} is {_shown(alpha)}, expected a number")

    def _number(self, name: str) -> float:
        value = self.config.get(name)
        if not _finite(value) or value <= 0:
            raise ConfigError(f"{self.path / CONFIG}: {name} is {_shown(value)}, expected a positive number")
        return value

    @property
    def base(self) -> str:
        """The base model, as the config names it."""
        return str(self.config.get("base_model_name_or_path") or "")

    def key(self) -> str:
        """Hex digest of what the adapter computes: its weights and the fields that scale them."""
        digest = hashlib.blake2b(digest_size=16)
        fields = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
        digest.update(repr([self.config.get(name) for name in fields]).encode())
        with open(self.path / WEIGHTS, "rb") as file:
            while piece := file.read(1 << 22):
                digest.update(piece)
        return digest.hexdigest()

    def scale_of(self, module: str, rank: int) -> float:
        """alpha / r of a module, or alpha / sqrt(r) with ``use_rslora``; patterns are matched as PEFT does."""
        pattern = self._patterns.first(module, parts=True)
        alpha = self.alpha if pattern is None else self.alphas[pattern]
        return alpha / (rank**0.5 if self.config.get("use_rslora") else rank)

    def names(self) -> list[str]:
        """The names of all stored tensors without PEFT's prefix, of which only the file's header is read. Raises
        ConfigError for a damaged file."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path / WEIGHTS, "pt") as file:
                return [name.removeprefix(PREFIX) for name in file.keys()]  # noqa: SIM118 - the file is no mapping
        except (SafetensorError, OSError) as e:
            raise ConfigError(f"cannot read {self.path / WEIGHTS}: {e}") from e

    def tensors(self, most_bytes: int | None = None) -> dict[str, torch.Tensor]:
        """Every stored tensor by its name without PEFT's prefix. Raises ConfigError for a damaged file, one whose
        matrices take more than ``most_bytes``, a tensor that holds NaN or infinity, and one that is stored twice."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        file = self.path / WEIGHTS
        if most_bytes is not None and file.stat().st_size > most_bytes + HEADER_BYTES:
            raise ConfigError(
                f"{file} has {file.stat().st_size} bytes, and the largest adapter of this model has {most_bytes}. It "
                f"is for another base model ({self.base or 'it does not say which'})."
            )
        try:
            stored = load_file(file)
        except (SafetensorError, OSError) as e:
            raise ConfigError(f"cannot read {file}: {e}") from e
        found: dict[str, torch.Tensor] = {}
        for stored_name, tensor in stored.items():
            name = stored_name.removeprefix(PREFIX)
            if name in found:
                raise ConfigError(f"{file} holds '{name}' twice, with the prefix '{PREFIX}' and without it")
            if not tensor.is_floating_point():
                raise ConfigError(f"{file}: '{name}' is stored as {tensor.dtype}, expected floating point")
            if not bool(tensor.float().isfinite().all()):
                raise ConfigError(f"{file}: '{name}' holds NaN or infinity. Save or fetch the adapter again.")
            found[name] = tensor
        return found

    def updates(self, tensors: dict[str, torch.Tensor]) -> Iterator[LowRankUpdate]:
        """The low-rank updates among ``tensors``. Raises ConfigError for a pair that is not whole or has bad shapes."""
        for name, a in tensors.items():
            if name.endswith(".lora_B.weight") and name.replace(".lora_B.", ".lora_A.") not in tensors:
                raise ConfigError(f"{self.path}: '{name.removesuffix('.lora_B.weight')}' has lora_B, and no lora_A")
            if not name.endswith(".lora_A.weight"):
                continue
            module = name.removesuffix(".lora_A.weight")
            b = tensors.get(f"{module}.lora_B.weight")
            if b is None or a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or not len(a):
                found = "missing" if b is None else f"{tuple(b.shape)}"
                raise ConfigError(f"{self.path}: '{module}' has lora_A {tuple(a.shape)}, and its lora_B is {found}")
            yield LowRankUpdate(module, a, b, self.scale_of(module, a.shape[0]))

    def refuse_unserved(self, names: Iterable[str], merge: str) -> None:
        """Raise ConfigError for what is no plain LoRA of served products. ``merge``: the command that merges it."""
        config = self.config

        def refuse(what: str) -> None:
            raise ConfigError(f"{self.path}: {what}. Merge the adapter into its base model: {merge}")

        begins = str(config.get("init_lora_weights", "")).lower()
        if begins.startswith(OWN_BASE):
            raise ConfigError(
                f"{self.path}: init_lora_weights is '{begins}', which trains against a changed base. Save the adapter "
                "with PEFT's path_initial_model_for_weight_conversion, or export it with `kvasir convert to_lora`."
            )
        for field, what in (
            ("use_dora", "DoRA (use_dora) scales whole rows of the weights and is not served"),
            (
                "modules_to_save",
                f"whole modules (modules_to_save: {_shown(config.get('modules_to_save'))}) are not served",
            ),
            ("trainable_token_indices", "new tokens (trainable_token_indices) are not served"),
            ("target_parameters", "parameters of experts (target_parameters) are not served"),
            ("lora_bias", "biases (lora_bias) are not served"),
            ("layer_replication", "layer_replication makes another model and is not served"),
            ("fan_in_fan_out", "transposed weights (fan_in_fan_out) are not served"),
        ):
            if config.get(field):
                refuse(what)
        if config.get("bias", "none") != "none":
            refuse(f"biases (bias: {_shown(config['bias'])}) are not served")
        for name in names:
            if ".lora_A." in name or ".lora_B." in name:
                continue
            if "lora_embedding" in name or "embed_tokens" in name:
                refuse(f"'{name}' changes the embedding, which is not served")
            if "lora_magnitude" in name:
                refuse("DoRA (lora_magnitude_vector) scales whole rows of the weights and is not served")
            refuse(f"'{name}' is no low-rank matrix")


def _finite(value: Any) -> bool:
    """Whether a value of a config is a number that a float holds. JSON as Python reads it has NaN, infinity and
    integers of any length."""
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:
        return False


def _shown(value: Any) -> str:
    """A value of a config for a message."""
    text = repr(value)
    return text if len(text) <= QUOTED else f"{text[:QUOTED]}..."


def one_hot_columns(a_RK: torch.Tensor) -> torch.Tensor | None:
    """The column [R] int32 that each row of A picks, if every row is one-hot (PaCA); else None."""
    if not bool(((a_RK != 0).sum(1) == 1).all()):
        return None
    columns = a_RK.argmax(1)
    return columns.int() if bool((a_RK.gather(1, columns[:, None]) == 1).all()) else None


def unknown(module: str, known: Callable[[], list[str]]) -> str:
    """The reason for refusing a module that the model does not have, or that no adapter may change."""
    last = module.rsplit(".", 1)[-1]
    if ".experts." in module or last in ("router", "gate"):
        return f"'{module}' belongs to experts, whose adapters are not served"
    if last in ("lm_head", "embed_tokens"):
        return f"'{module}' changes the {'head' if last == 'lm_head' else 'embedding'}, which is not served"
    return f"the base model has no '{module}' that an adapter may change; it has {', '.join(known())}"
