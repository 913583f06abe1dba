"""SmolLM 3. Quirks: every fourth layer has no RoPE (``no_rope_layers`` holds a 1 for layers that have it); with
``use_sliding_window`` the layers without it slide."""

from __future__ import annotations

from kvasir.models import fields as hf
from kvasir.models.spec import LayerSpec, ModelSpec

ARCHITECTURES = ("SmolLM3ForCausalLM",)
EOS_ID = 128001
stored = hf.stored


def build(fields: hf.Fields) -> ModelSpec:
    bias, norm = fields.flag("attention_bias", False), hf.norm(fields)
    ffn = hf.dense(fields, fields.flag("mlp_bias", False))
    rotates = _rotates(fields)
    window = fields.integer("sliding_window", None) if fields.flag("use_sliding_window", False) else None
    slides = ["full_attention" if window is None or rotated else "sliding_attention" for rotated in rotates]
    layers = []
    for kind, rotated in zip(hf.layer_types(fields, slides), rotates):
        if kind == "sliding_attention" and window is None:
            raise fields.fail(
                "layer_types", "has sliding_attention, but use_sliding_window is not set or sliding_window is null"
            )
        mixer = hf.attention(
            fields, kv_heads=4, window=window if kind == "sliding_attention" else None, qkv_bias=bias, o_bias=bias
        )
        layers.append(LayerSpec(mixer, ffn, _rope(fields, mixer.head_dim) if rotated else None, norm))
    return hf.model(fields, layers, tied=True)


def _rotates(fields: hf.Fields) -> list[bool]:
    """Whether each layer has RoPE."""
    count, every = fields.integer("num_hidden_layers"), fields.integer("no_rope_layer_interval", 4)
    given = fields.numbers("no_rope_layers", [int((i + 1) % every != 0) for i in range(count)])
    if len(given) < count:
        raise fields.fail("no_rope_layers", f"has {len(given)} entries, expected at least {count} (one per layer)")
    return [bool(rotated) for rotated in given[:count]]


def _rope(fields: hf.Fields, head_dim: int) -> hf.RopeSpec:
    given = fields.section("rope_scaling") or fields.section("rope_parameters")
    theta, original = fields.number("rope_theta", 2e6), fields.integer("original_max_position_embeddings", None)
    return hf.rope_from(fields, given, head_dim, theta, original)
