"""Write a trained lab model as a Hugging Face folder (Qwen3ForCausalLM, or Qwen3MoeForCausalLM where it has experts;
bf16 safetensors), and read it back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save

from kvasir.errors import ConfigError
from kvasir.lab import tokenizer as lab_tokenizer
from kvasir.lab.model import Model, Shape
from kvasir.models.loader import INDEX, SINGLE, read_tensors

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SHARD = 14_000_000  # Most bytes of weights in one file, so that a version-control host accepts it.
# The name in config.json of each field of Shape.
HF_NAMES = {
    "vocab": "vocab_size",
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "ffn": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "positions": "max_position_embeddings",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
}
EXPERT_NAMES = {"experts": "num_experts", "top_k": "num_experts_per_tok"}


def hf_config(shape: Shape, dtype: torch.dtype) -> dict:
    """The contents of config.json, in the spelling that transformers 4 wrote and 5 still reads."""
    ids = {
        name: lab_tokenizer.SPECIAL.index(token)
        for name, token in (("bos", "<bos>"), ("eos", "<eos>"), ("pad", "<pad>"))
    }
    sizes = dataclasses.asdict(shape)
    family: dict = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    if shape.experts:
        family = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
        family |= {hf: sizes[name] for name, hf in EXPERT_NAMES.items()}
        family |= {"moe_intermediate_size": shape.ffn, "norm_topk_prob": True, "decoder_sparse_step": 1}
        family |= {"mlp_only_layers": []}
    return {
        **family,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **{hf: sizes[name] for name, hf in HF_NAMES.items()},
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": shape.layers,
        "initializer_range": 0.02,
        **{f"{name}_token_id": i for name, i in ids.items()},
    }


def _write(weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Write one file when the weights are small, else shards and an index, under the names that HF tools expect."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in weights.items():
        if shards[-1] and sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > SHARD:
            shards.append({})
        shards[-1][name] = tensor
    for stale in folder.glob("model*.safetensors*"):
        stale.unlink()
    if len(shards) == 1:
        (folder / SINGLE).write_bytes(save(weights, metadata={"format": "pt"}))
        return
    place = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        (folder / file).write_bytes(save(shard, metadata={"format": "pt"}))
        place |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in weights.values())}, "weight_map": place}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")


def export(
    model: Model,
    tokenizer: Tokenizer,
    folder: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    score_E: torch.Tensor | None = None,
) -> None:
    """Write weights, config, generation defaults and tokenizer into ``folder``.

    ``score_E`` [dim]: the head of a model that scores texts, in place of the output matrix.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: p.detach().to("cpu", dtype).contiguous() for name, p in model.named_parameters()}
    config = hf_config(model.shape, dtype)
    if score_E is not None:
        weights["score.weight"] = score_E.detach().to("cpu", dtype)[None].contiguous()
        config |= {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "right"}}
    _write(weights, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    stops = [lab_tokenizer.SPECIAL.index(t) for t in ("<eos>", "<|im_end|>")]
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": stops, "pad_token_id": config["pad_token_id"]}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    lab_tokenizer.write(tokenizer, folder, model.shape.positions)


def load(
    folder: str | Path, device: str | torch.device = "cpu", weights: dict[str, torch.Tensor] | None = None
) -> Model:
    """Load the lab's own model with the weights of ``folder``, in fp32.

    ``weights``: those to take, where the folder has others as well (None: all). Raises ConfigError for a folder that is
    not a lab checkpoint.
    """
    folder = Path(folder)
    try:
        config = json.loads((folder / "config.json").read_text())
        weights = dict(read_tensors(folder)) if weights is None else weights
    except (OSError, json.JSONDecodeError, ConfigError) as e:
        raise ConfigError(f"{folder} is not a readable checkpoint: {e}") from e
    if config.get("model_type") not in ("qwen3", "qwen3_moe") or not config.get("tie_word_embeddings"):
        raise ConfigError(
            f"{folder}: the lab reads its own Qwen3-shaped checkpoints with tied embeddings, "
            f"not '{config.get('model_type')}'"
        )
    names = HF_NAMES | (EXPERT_NAMES if config["model_type"] == "qwen3_moe" else {})
    missing = [name for name in names.values() if name not in config]
    if missing:
        raise ConfigError(f"{folder}/config.json lacks {', '.join(missing)}")
    model = Model(Shape(**{field: config[name] for field, name in names.items()}))
    try:
        model.load_state_dict({name: w.float() for name, w in weights.items()})
    except RuntimeError as e:
        raise ConfigError(f"{folder}: the weights do not fit config.json: {e}") from e
    return model.to(device).eval()
