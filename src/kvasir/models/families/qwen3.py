"""Qwen 3. Quirks: every query and key head is normalised before RoPE; head_dim is its own (128 where absent)."""

from __future__ import annotations

from kvasir.models import fields as hf
from kvasir.models.spec import LayerSpec, ModelSpec

ARCHITECTURES = ("Qwen3ForCausalLM",)
stored = hf.stored


def build(fields: hf.Fields) -> ModelSpec:
    bias, layers = fields.flag("attention_bias", False), []
    for kind in hf.qwen_layer_types(fields):
        window = hf.window(fields) if kind == "sliding_attention" else None
        mixer = hf.attention(
            fields, kv_heads=32, head_dim=128, window=window, qk_norm=hf.norm(fields), qkv_bias=bias, o_bias=bias
        )
        layers.append(LayerSpec(mixer, hf.dense(fields), hf.rope(fields, mixer.head_dim), hf.norm(fields)))
    return hf.model(fields, layers)
