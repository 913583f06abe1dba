"""Mistral 7B and similar models. Quirk: all layers slide when ``sliding_window`` is set (null: none; absent: 4096)."""

from __future__ import annotations

from kvasir.models import fields as hf
from kvasir.models.spec import LayerSpec, ModelSpec

ARCHITECTURES = ("MistralForCausalLM",)
EOS_ID = 2
stored = hf.stored


def build(fields: hf.Fields) -> ModelSpec:
    fields.refuse("layer_types", "per-layer attention belongs to other model types than mistral", (None,))
    mixer = hf.attention(fields, kv_heads=8, window=hf.window(fields))
    layer = LayerSpec(mixer, hf.dense(fields), hf.rope(fields, mixer.head_dim), hf.norm(fields))
    return hf.model(fields, [layer] * fields.integer("num_hidden_layers"))
