"""Published heads: a plain reference of each layout, written from its tensors and config, and folders made of it.

Nothing of the package is used, so a head that reads wrong rows, layers or ids differs from it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional as F

CONFIG = dict(
    architectures=["LlamaForCausalLMEagle3"],
    model_type="llama",
    num_hidden_layers=1,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    hidden_act="silu",
    rms_norm_eps=1e-5,
    rope_theta=1000.0,
    max_position_embeddings=512,
    vocab_size=97,
    draft_vocab_size=40,
)
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)


def layer_of(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that describes the decoder layer."""
    return config.get("transformer_layer_config", config)


def is_eagle1(config: dict[str, Any]) -> bool:
    return config.get("speculators_model_type") == "eagle" or "draft_vocab_size" not in config


def prefix_of(config: dict[str, Any]) -> str:
    if config.get("speculators_model_type") == "eagle":
        return "transformer."
    return "midlayer." if "LlamaForCausalLMEagle3" in config["architectures"] else "layers.0."


def draw(
    config: dict[str, Any], seed: int = 0, layers: int = 3, served: int = 0, **extra: Any
) -> dict[str, torch.Tensor]:
    """Random tensors of a folder with this config. ``served``: hidden size of the served model, if it is another;
    ``extra``: shapes of further tensors."""
    layer, p = layer_of(config), prefix_of(config)
    dim, ffn, served = layer["hidden_size"], layer["intermediate_size"], served or layer["hidden_size"]
    heads, kv_heads, size = layer["num_attention_heads"], layer["num_key_value_heads"], layer["head_dim"]
    wide = dim if is_eagle1(config) else 2 * dim
    shapes = {
        f"{p}self_attn.q_proj.weight": (heads * size, wide),
        f"{p}self_attn.k_proj.weight": (kv_heads * size, wide),
        f"{p}self_attn.v_proj.weight": (kv_heads * size, wide),
        f"{p}self_attn.o_proj.weight": (dim, heads * size),
        f"{p}post_attention_layernorm.weight": (dim,),
        f"{p}mlp.gate_proj.weight": (ffn, dim),
        f"{p}mlp.up_proj.weight": (ffn, dim),
        f"{p}mlp.down_proj.weight": (dim, ffn),
    }
    if is_eagle1(config):
        shapes["fusion_fc.weight" if p == "transformer." else "fc.weight"] = (dim, 2 * dim)
    else:
        shapes |= {
            "fc.weight": (dim, layers * served),
            f"{p}hidden_norm.weight": (dim,),
            f"{p}input_layernorm.weight": (dim,),
            "norm.weight": (dim,),
            "lm_head.weight": (config["draft_vocab_size"], dim),
        }
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in (shapes | extra).items():
        noise = torch.randn(shape, generator=generator)
        found[name] = 1 + 0.3 * noise if len(shape) == 1 and "bias" not in name else noise * 1.5 * shape[-1] ** -0.5
    return found


def draft_ids(config: dict[str, Any], ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors d2t and t2d of a head that knows these tokens, in ascending order."""
    marked = torch.zeros(layer_of(config)["vocab_size"], dtype=torch.bool)
    marked[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": marked}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], pickled: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    held = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    if pickled:
        torch.save(held, folder / "pytorch_model.bin")
    else:
        save_file(held, folder / "model.safetensors")
    return folder


def speculators(config: dict[str, Any], kind: str = "eagle3", **own: Any) -> dict[str, Any]:
    """A config in the format of `speculators` for the same layer."""
    layer = {k: v for k, v in config.items() if k not in ("architectures", "draft_vocab_size")}
    layer["rope_parameters"] = {"rope_type": "default", "rope_theta": layer.pop("rope_theta")}
    found = dict(
        architectures=["Eagle3Speculator" if kind == "eagle3" else "EagleSpeculator"],
        speculators_model_type=kind,
        speculators_version="0.5.0",
        transformer_layer_config=layer,
        speculators_config=dict(
            algorithm=kind,
            default_proposal_method="greedy",
            proposal_methods=[dict(proposal_type="greedy", speculative_tokens=4)],
            verifier=dict(name_or_path="someone/a-model", architectures=["LlamaForCausalLM"]),
        ),
    )
    return found | ({"draft_vocab_size": config["draft_vocab_size"]} if kind == "eagle3" else {}) | own


def random_published(folder: Path) -> Path:
    """A head of EAGLE-3's layout for nano that means nothing, with a reduced vocabulary."""
    from kvasir.models.checkpoint import read_config, resolve

    model = read_config(resolve("nano"))
    dim, vocab = model["hidden_size"], model["vocab_size"]
    config = CONFIG | dict(hidden_size=dim, vocab_size=vocab, head_dim=16, draft_vocab_size=300)
    ids = torch.arange(0, vocab, max(1, vocab // 300))[:300]
    return write(folder, config, draw(config, 7) | draft_ids(config, ids))


# ----------------------------------------------------------------------------------------------------------- reference


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotations(layer: dict[str, Any]) -> Any:
    """The cosines and sines of positions, by transformers."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    known = ("hidden_size", "num_attention_heads", "head_dim", "rope_theta", "rope_scaling", "rope_parameters")
    given = {k: v for k, v in layer.items() if k in (*known, "max_position_embeddings")}
    return LlamaRotaryEmbedding(LlamaConfig(**given))


def unroll(
    w: dict[str, torch.Tensor],
    config: dict[str, Any],
    taps_TLF: torch.Tensor,
    tokens: torch.Tensor,
    steps: int,
    embed_VE: torch.Tensor,
    head_VE: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Logits [T, V] of each step, where row p of step j guesses token p + 2 + j of ``tokens`` (T + ``steps`` of them)
    from the text up to token p + 1 + j, starting at the states of row p.

    ``taps``: of EAGLE-3 the states before its layers, of EAGLE-1 the model's last state after its norm; ``head``: the
    model's output matrix, where the head has none."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    layer, p = layer_of(config), prefix_of(config)
    eps, count = layer["rms_norm_eps"], len(taps_TLF)
    heads, kv_heads, size = layer["num_attention_heads"], layer["num_key_value_heads"], layer["head_dim"]
    rotary, place = rotations(layer), torch.arange(count)
    first = is_eagle1(config)
    before = config.get("norm_before_residual", "speculators_model_type" in config)

    def product(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    if first:
        state = taps_TLF[:, 0]
    else:
        joined = taps_TLF.flatten(1)
        if "input_norm.weight" in w:
            joined = rms(joined, w["input_norm.weight"], eps)
        if "fc_norm.0.weight" in w:
            joined = torch.cat([rms(taps_TLF[:, i], w[f"fc_norm.{i}.weight"], eps) for i in range(3)], -1)
        state = product("fc", joined)
    found, kept = [], []
    for j in range(steps):
        embedded = embed_VE[tokens[1 + j : 1 + j + count]]
        if first:
            residual = x = product("fusion_fc" if p == "transformer." else "fc", torch.cat([embedded, state], -1))
        else:
            normed = rms(state, w[f"{p}hidden_norm.weight"], eps)
            residual = normed if before else state
            x = torch.cat([rms(embedded, w[f"{p}input_layernorm.weight"], eps), normed], -1)
        q, k, v = (product(f"{p}self_attn.{n}_proj", x).view(count, -1, size).transpose(0, 1)[None] for n in "qkv")
        if f"{p}self_attn.q_norm.weight" in w:
            q, k = rms(q, w[f"{p}self_attn.q_norm.weight"], eps), rms(k, w[f"{p}self_attn.k_norm.weight"], eps)
        q, k = apply_rotary_pos_emb(q, k, *rotary(x[None], (place + j)[None]))
        kept.append((k.repeat_interleave(heads // kv_heads, 1)[0], v.repeat_interleave(heads // kv_heads, 1)[0]))
        roots = (q[0] @ kept[0][0].mT).masked_fill(place[:, None] < place, -torch.inf)  # the text, and then itself
        own = [(q[0] * k).sum(-1, keepdim=True) for k, _ in kept[1:]]
        weights = (torch.cat([roots, *own], -1) * size**-0.5).softmax(-1)
        out = weights[..., :count] @ kept[0][1]
        for i, (_, v) in enumerate(kept[1:]):
            out = out + weights[..., count + i, None] * v
        h = residual + product(f"{p}self_attn.o_proj", out.transpose(0, 1).flatten(1))
        y = rms(h, w[f"{p}post_attention_layernorm.weight"], eps)
        h = h + product(f"{p}mlp.down_proj", F.silu(product(f"{p}mlp.gate_proj", y)) * product(f"{p}mlp.up_proj", y))
        state = read = h
        if not first:
            read = rms(h, w["norm.weight"], eps)
            state = read if config.get("norm_output") else h
        found.append(F.linear(read, w.get("lm_head.weight", head_VE)))
    return found
