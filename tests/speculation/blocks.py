"""Drafters of DFlash's layout: a plain reference written from z-lab's tensors and config, and folders made of it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn import functional as F

from tests.speculation.published import rms, rotations, write

DIM, VOCAB = 32, 97
CONFIG = dict(
    architectures=["DFlashDraftModel"],
    model_type="qwen3",
    num_hidden_layers=3,
    hidden_size=DIM,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    hidden_act="silu",
    rms_norm_eps=1e-5,
    rope_theta=1000.0,
    max_position_embeddings=512,
    vocab_size=VOCAB,
    block_size=6,
    attention_bias=False,
    layer_types=["full_attention"] * 3,
    dflash_config=dict(mask_token_id=96, target_layer_ids=[1, 3, 5]),
)


def draw(config: dict, seed: int = 0) -> dict[str, torch.Tensor]:
    dim, ffn, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes = {"fc.weight": (dim, len(config["dflash_config"]["target_layer_ids"]) * dim)}
    shapes |= {"hidden_norm.weight": (dim,), "norm.weight": (dim,)}
    for i in range(config["num_hidden_layers"]):
        p = f"layers.{i}."
        shapes |= {f"{p}input_layernorm.weight": (dim,), f"{p}post_attention_layernorm.weight": (dim,)}
        shapes |= {f"{p}self_attn.{n}_norm.weight": (size,) for n in "qk"}
        shapes |= {
            f"{p}self_attn.{n}_proj.weight": (n_out, dim) for n, n_out in zip("qkv", (heads, kv_heads, kv_heads))
        }
        shapes |= {f"{p}self_attn.o_proj.weight": (dim, heads), f"{p}mlp.down_proj.weight": (dim, ffn)}
        shapes |= {f"{p}mlp.{n}_proj.weight": (ffn, dim) for n in ("gate", "up")}
    generator = torch.Generator().manual_seed(seed)
    found = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: 1 + 0.3 * x if x.dim() == 1 else x * x.shape[-1] ** -0.5 for name, x in found.items()}


def fill(w, config, taps_TLE, anchors: torch.Tensor, places: torch.Tensor, embed_VE, head_VE) -> torch.Tensor:
    """The plain reference: logits [A, block - 1, V] of the masks behind each anchor token at position ``places``, which
    sees the states [T, L, E] of the positions before it and its own block, in both directions."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    eps, size, own = config["rms_norm_eps"], config["head_dim"], config["dflash_config"]
    groups = config["num_attention_heads"] // config["num_key_value_heads"]
    rotary, count, block = rotations(config), len(taps_TLE), config["block_size"]
    context = rms(F.linear(taps_TLE.flatten(1), w["fc.weight"]), w["hidden_norm.weight"], eps)
    found = []
    for anchor, place in zip(anchors, places):
        ids = torch.tensor([int(anchor), *[own["mask_token_id"]] * (block - 1)])
        h, text = embed_VE[ids], context[:place]
        at = torch.arange(int(place) + block)
        for i in range(config["num_hidden_layers"]):
            p = f"layers.{i}."
            x = rms(h, w[f"{p}input_layernorm.weight"], eps)
            both = torch.cat([text, x])
            q = rms(
                F.linear(x, w[f"{p}self_attn.q_proj.weight"]).view(block, -1, size),
                w[f"{p}self_attn.q_norm.weight"],
                eps,
            )
            k = F.linear(both, w[f"{p}self_attn.k_proj.weight"]).view(len(both), -1, size)
            k, v = rms(k, w[f"{p}self_attn.k_norm.weight"], eps), F.linear(both, w[f"{p}self_attn.v_proj.weight"])
            q, k, v = (y.transpose(0, 1)[None] for y in (q, k, v.view(len(both), -1, size)))
            cos, sin = rotary(x[None], at[None])
            k = apply_rotary_pos_emb(k, k, cos, sin)[0].repeat_interleave(groups, 1)
            q = apply_rotary_pos_emb(q, q, cos[:, -block:], sin[:, -block:])[0]
            out = (q @ k.mT * size**-0.5).softmax(-1) @ v.repeat_interleave(groups, 1)
            h = h + F.linear(out[0].transpose(0, 1).flatten(1), w[f"{p}self_attn.o_proj.weight"])
            y = rms(h, w[f"{p}post_attention_layernorm.weight"], eps)
            gated = F.silu(F.linear(y, w[f"{p}mlp.gate_proj.weight"])) * F.linear(y, w[f"{p}mlp.up_proj.weight"])
            h = h + F.linear(gated, w[f"{p}mlp.down_proj.weight"])
        found.append(F.linear(rms(h, w["norm.weight"], eps)[1:], head_VE))
    assert count >= int(max(places))
    return torch.stack(found)


def random_block(folder: Path, dim: int, vocab: int, num_served: int) -> Path:
    """A drafter with random weights for a model of this shape."""
    own = dict(mask_token_id=5, target_layer_ids=[0, num_served - 1])
    changed = dict(hidden_size=dim, vocab_size=vocab, num_hidden_layers=2, block_size=5, dflash_config=own)
    config = CONFIG | changed | {"layer_types": None}
    return write(folder, config, draw(config, 3))
