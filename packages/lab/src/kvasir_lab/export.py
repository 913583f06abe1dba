"""Write a trained lab model as a Hugging Face folder, and read it back: Qwen3ForCausalLM, Qwen3MoeForCausalLM where it
has experts, Qwen3_5ForCausalLM where layers are recurrent; in bf16 safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save

from kvasir.errors import ConfigError
from kvasir.models.loader import INDEX, SINGLE, read_tensors
from kvasir.plain_files import refuse_special
from kvasir_lab import tokenizer as lab_tokenizer
from kvasir_lab.model import Model, Shape

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
# The same for the fields of a hybrid's recurrent layers.
HYBRID_NAMES = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "state_dim": "linear_key_head_dim",
    "taps": "linear_conv_kernel_dim",
}
LINEAR, FULL = "linear_attention", "full_attention"


def hybrid_config(shape: Shape) -> dict:
    """The fields of config.json in which a hybrid differs."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        **{name: getattr(shape, field) for field, name in HYBRID_NAMES.items()},
        "linear_value_head_dim": shape.state_dim,
        "layer_types": [LINEAR if i in shape.recurrent else FULL for i in range(shape.layers)],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": shape.rope_theta,
            "partial_rotary_factor": shape.rotary_dim / shape.head_dim,
        },
    }


def expert_config(shape: Shape) -> dict:
    """The fields of config.json in which a model with experts differs."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **{name: getattr(shape, field) for field, name in EXPERT_NAMES.items()},
        "moe_intermediate_size": shape.ffn,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def hf_config(shape: Shape, dtype: torch.dtype) -> dict:
    """The contents of config.json, in the spelling that transformers 4 wrote and 5 still reads."""
    ids = {
        name: lab_tokenizer.SPECIAL.index(token)
        for name, token in (("bos", "<bos>"), ("eos", "<eos>"), ("pad", "<pad>"))
    }
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "torch_dtype": str(dtype).removeprefix("torch."),
        **{name: getattr(shape, field) for field, name in HF_NAMES.items()},
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
    return config | (hybrid_config(shape) if shape.recurrent else expert_config(shape) if shape.experts else {})


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
    refuse_special(folder)
    try:
        config = json.loads((folder / "config.json").read_text())
        weights = dict(read_tensors(folder)) if weights is None else weights
    except (OSError, json.JSONDecodeError, ConfigError) as e:
        raise ConfigError(f"{folder} is not a readable checkpoint: {e}") from e
    kind = config.get("model_type")
    hybrid = kind == "qwen3_5_text"
    if kind not in ("qwen3", "qwen3_moe", "qwen3_5_text") or not config.get("tie_word_embeddings"):
        raise ConfigError(
            f"{folder}: the lab reads its own Qwen3-shaped checkpoints with tied embeddings, "
            f"not '{config.get('model_type')}'"
        )
    names = HF_NAMES | (HYBRID_NAMES if hybrid else EXPERT_NAMES if kind == "qwen3_moe" else {})
    missing = [name for name in (*names.values(), *(["layer_types"] if hybrid else [])) if name not in config]
    if missing:
        raise ConfigError(f"{folder}/config.json lacks {', '.join(missing)}")
    recurrent = tuple(i for i, kind in enumerate(config["layer_types"]) if kind == LINEAR) if hybrid else ()
    shape = Shape(**{field: config[name] for field, name in names.items()}, recurrent=recurrent)
    if hybrid and (differs := [k for k, value in hybrid_config(shape).items() if config.get(k) != value]):
        raise ConfigError(f"{folder}: the lab reads hybrids of its own only; {', '.join(differs)} differ from those")
    model = Model(shape)
    try:
        model.load_state_dict({name: w.float() for name, w in weights.items()})
    except RuntimeError as e:
        raise ConfigError(f"{folder}: the weights do not fit config.json: {e}") from e
    return model.to(device).eval()
