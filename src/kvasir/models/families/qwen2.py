"""Qwen 2 and 2.5. Quirks: biases on q, k and v but not on o; upper layers may slide."""

from __future__ import annotations

from kvasir.models import fields as hf
from kvasir.models.spec import LayerSpec, ModelSpec

ARCHITECTURES = ("Qwen2ForCausalLM",)
stored = hf.stored


def build(fields: hf.Fields) -> ModelSpec:
    layers = []
    for kind in hf.qwen_layer_types(fields):
        window = hf.window(fields) if kind == "sliding_attention" else None
        mixer = hf.attention(fields, kv_heads=32, window=window, qkv_bias=True)
        layers.append(LayerSpec(mixer, hf.dense(fields), hf.rope(fields, mixer.head_dim), hf.norm(fields)))
    return hf.model(fields, layers)
