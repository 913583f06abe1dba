"""Llama 2 and 3, and the many models with the same config. Quirk: optional biases."""

from __future__ import annotations

from kvasir.models import fields as hf
from kvasir.models.spec import LayerSpec, ModelSpec

ARCHITECTURES = ("LlamaForCausalLM",)
EOS_ID = 2
stored = hf.stored


def build(fields: hf.Fields) -> ModelSpec:
    bias = fields.flag("attention_bias", False)
    mixer = hf.attention(fields, qkv_bias=bias, o_bias=bias)
    layer = LayerSpec(
        mixer, hf.dense(fields, fields.flag("mlp_bias", False)), hf.rope(fields, mixer.head_dim), hf.norm(fields)
    )
    return hf.model(fields, [layer] * fields.integer("num_hidden_layers"))
