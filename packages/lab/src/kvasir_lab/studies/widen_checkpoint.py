"""Give a small model the cost of a large one: `kvasir_lab/studies/widen_checkpoint.py FOLDER OUT --size 8b`.

Random weights of a large shape take the time of a trained model, and their answers mean nothing; a small model's
answers mean something and take no time. This tool puts the small model into a corner of a large one: OUT is an ordinary
Hugging Face checkpoint (Qwen3) that answers as FOLDER does, up to rounding, and whose step costs what its size does. So
the time that a method gains can be measured on natural text, by any engine. Only the head stays small: the vocabulary
is the small model's.

The residual stream is widened with zeros, which RMSNorm's weights make up for. Columns of the weights that read these
zeros, and rows of the feed-forward block and heads that nobody reads, are noise, so that no zero makes arithmetic
cheap. Weights that would write to the stream beyond the small model's part are zero, and so is everything that further
layers write.

With --spread the small model's layers stand at equal distances, each behind idle ones, so that an exit after a share of
its layers costs that share of the large model's; without it they come first, and all others add nothing.

With --like EARLIER, an OUT of another checkpoint of the same model, size and order, layers that hold nothing of the
small model are links to EARLIER's.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from safetensors.torch import save_file

from kvasir.errors import ConfigError
from kvasir.models.checkpoint import resolve
from kvasir.models.fill import read_tensor
from kvasir.models.loader import read_headers
from kvasir_lab.study import Report, study

INDEX = "model.safetensors.index.json"
SPREAD = 0.02  # standard deviation of the noise


@dataclass(frozen=True)
class Size:
    hidden: int
    layers: int
    ffn: int
    heads: int
    kv_heads: int


SIZES = {
    "1b": Size(2048, 16, 8192, 32, 8),
    "8b": Size(4096, 32, 14336, 32, 8),
    # The layers of Llama 3.2 1B and of Llama 3 8B stand above. This is `base` in matrices whose inputs are multiples of
    # 256, as q4_k and q6_k need them.
    "256": Size(512, 8, 1280, 4, 2),
}


def wider_config(config: dict[str, Any], size: Size) -> dict[str, Any]:
    """The config of a Qwen3 model, made ``size`` large. Raises ConfigError for a model it cannot widen."""
    if config.get("model_type") != "qwen3" or not config.get("tie_word_embeddings") or config.get("use_sliding_window"):
        raise ConfigError("widened are Qwen3 models with tied embeddings and without windows, as those of the lab")
    config = {name: value for name, value in config.items() if name != "layer_types"}
    small = Size(
        *(
            config[name]
            for name in (
                "hidden_size",
                "num_hidden_layers",
                "intermediate_size",
                "num_attention_heads",
                "num_key_value_heads",
            )
        )
    )
    if (
        any(getattr(small, name) > getattr(size, name) for name in ("hidden", "layers", "ffn", "kv_heads"))
        or small.heads // small.kv_heads > size.heads // size.kv_heads
    ):
        raise ConfigError(f"{small} is no part of {size}")
    return config | {
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "intermediate_size": size.ffn,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "max_window_layers": size.layers,
        "rms_norm_eps": config["rms_norm_eps"] * small.hidden / size.hidden,
    }


class Widened:
    """The tensors of a widened model, layer by layer. ``small``: by stored name; ``config``: the small model's."""

    def __init__(
        self,
        small: dict[str, torch.Tensor],
        config: dict[str, Any],
        size: Size,
        device: torch.device,
        seed: int = 0,
        spread: bool = False,
    ) -> None:
        self.small, self.size, self.head_dim = small, size, config["head_dim"]
        self.layers, self.hidden, self.ffn = (
            config["num_hidden_layers"],
            config["hidden_size"],
            config["intermediate_size"],
        )
        # By layer of the large model: the small model's layer that it holds.
        self.held = {((i + 1) * size.layers // self.layers - 1 if spread else i): i for i in range(self.layers)}
        self.dtype, self.device = next(iter(small.values())).dtype, device
        self.noise = torch.Generator(device).manual_seed(seed)
        group, wide = config["num_attention_heads"] // config["num_key_value_heads"], size.heads // size.kv_heads
        heads = [
            head // group * wide + head % group for head in range(config["num_attention_heads"])
        ]  # where a query head of the small one lies
        self.query_rows = torch.cat(
            [torch.arange(head * self.head_dim, (head + 1) * self.head_dim) for head in heads]
        ).to(device)

    def outer(self) -> dict[str, torch.Tensor]:
        embed = torch.zeros(
            len(self.small["model.embed_tokens.weight"]), self.size.hidden, dtype=self.dtype, device=self.device
        )
        embed[:, : self.hidden] = self.small["model.embed_tokens.weight"].to(self.device)
        return {"model.embed_tokens.weight": embed, "model.norm.weight": self._norm("model.norm.weight")}

    def layer(self, i: int) -> dict[str, torch.Tensor]:
        """Return the weights of layer ``i``; a layer that the small model does not have adds nothing."""
        size, part = self.size, i in self.held
        prefix, small = f"model.layers.{i}.", f"model.layers.{self.held.get(i)}."
        found = {
            prefix + name: self._norm(small + name)
            for name in ("input_layernorm.weight", "post_attention_layernorm.weight")
        }
        for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
            head_norm = self.small[small + name] if part else torch.ones(self.head_dim, dtype=self.dtype)
            found[prefix + name] = head_norm.to(self.device)
        reads = {
            "self_attn.q_proj": (size.heads * self.head_dim, self.query_rows),
            "self_attn.k_proj": (size.kv_heads * self.head_dim, None),
            "self_attn.v_proj": (size.kv_heads * self.head_dim, None),
            "mlp.gate_proj": (size.ffn, None),
            "mlp.up_proj": (size.ffn, None),
        }
        for name, (rows, where) in reads.items():
            weight = torch.randn(rows, size.hidden, generator=self.noise, device=self.device, dtype=self.dtype).mul_(
                SPREAD
            )
            if part:
                stored = self.small[f"{small}{name}.weight"].to(self.device)
                weight[torch.arange(len(stored), device=self.device) if where is None else where, : self.hidden] = (
                    stored
                )
            found[f"{prefix}{name}.weight"] = weight
        for name, columns in (("self_attn.o_proj", size.heads * self.head_dim), ("mlp.down_proj", size.ffn)):
            weight = torch.zeros(size.hidden, columns, dtype=self.dtype, device=self.device)
            if part:
                stored = self.small[f"{small}{name}.weight"].to(self.device)
                where = self.query_rows if name == "self_attn.o_proj" else torch.arange(self.ffn, device=self.device)
                weight[: self.hidden, where] = stored
            found[f"{prefix}{name}.weight"] = weight
        return found

    def _norm(self, name: str) -> torch.Tensor:
        """The mean over the wide stream is smaller by the share that is not zero."""
        weight = torch.ones(self.size.hidden, dtype=self.dtype, device=self.device)
        if name in self.small:
            weight[: self.hidden] = (
                self.small[name].to(self.device).float().mul(math.sqrt(self.hidden / self.size.hidden)).to(self.dtype)
            )
        return weight

    def shards(self) -> Iterator[tuple[str, bool, dict[str, torch.Tensor]]]:
        """Each file's name, whether it holds a part of the small model, and its tensors, made when asked for."""
        yield "outer.safetensors", True, self.outer()
        for i in range(self.size.layers):
            yield f"layer-{i:02}.safetensors", i in self.held, self.layer(i)


def widen(
    folder: Path,
    out: Path,
    size: Size,
    *,
    like: Path | None = None,
    device: str = "cpu",
    seed: int = 0,
    spread: bool = False,
) -> None:
    """Write the checkpoint. Raises ConfigError."""
    config = json.loads((folder / "config.json").read_text())
    wider = wider_config(config, size)
    out.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if file.is_file() and not file.name.startswith("model") and file.name != "config.json":
            shutil.copy(file, out)
    (out / "config.json").write_text(json.dumps(wider, indent=1))
    place: dict[str, str] = {}
    model = Widened(
        {stored.name: read_tensor(stored) for stored in read_headers(folder)},
        config,
        size,
        torch.device(device),
        seed,
        spread,
    )
    for name, holds, tensors in model.shards():
        place |= dict.fromkeys(tensors, name)
        (out / name).unlink(missing_ok=True)
        if like is not None and not holds:
            os.symlink((like / name).resolve(), out / name)
        else:
            save_file(
                {key: tensor.contiguous().cpu() for key, tensor in tensors.items()},
                str(out / name),
                metadata={"format": "pt"},
            )
    (out / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": place}, indent=1))


@study()
def main(
    report: Report,
    folder: Annotated[str, "the small model: a folder, or a name such as base"],
    output: Annotated[Path, "folder to write"],
    *,
    size: Annotated[str, SIZES] = "8b",
    like: Annotated[Path | None, "an earlier OUT whose idle layers are linked to"] = None,
    spread: Annotated[bool, "put the small model's layers at equal distances"] = False,
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
) -> None:
    widen(resolve(folder), output, SIZES[size], like=like, device=device, spread=spread)
