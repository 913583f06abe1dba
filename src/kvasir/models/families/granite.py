"""Granite 3 and 4 (dense). Quirks: factors of embeddings, attention scores, logits, and what each sublayer adds."""

from __future__ import annotations

from kvasir.models import fields as hf
from kvasir.models.spec import LayerSpec, ModelSpec

ARCHITECTURES = ("GraniteForCausalLM",)
EOS_ID = 2
stored = hf.stored


def build(fields: hf.Fields) -> ModelSpec:
    bias = fields.flag("attention_bias", False)
    mixer = hf.attention(fields, scale=fields.number("attention_multiplier", 1.0), qkv_bias=bias, o_bias=bias)
    layer = LayerSpec(
        mixer,
        hf.dense(fields, fields.flag("mlp_bias", False)),
        hf.rope(fields, mixer.head_dim),
        hf.norm(fields),
        residual_scale=fields.number("residual_multiplier", 1.0),
    )
    return hf.model(
        fields,
        [layer] * fields.integer("num_hidden_layers"),
        embed_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=1 / fields.number("logits_scaling", 1.0),
    )
