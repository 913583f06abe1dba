"""OLMo 2. Quirks: norms stand after mixer and ffn and not before; queries and keys are normalised over all their
heads."""

from __future__ import annotations

from kvasir.models import fields as hf
from kvasir.models.spec import LayerSpec, ModelSpec

ARCHITECTURES = ("Olmo2ForCausalLM",)
EOS_ID = 50279
PARTS = {
    **hf.PARTS,
    "mixer_post_norm": "post_attention_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}


def stored(slot: str, spec: ModelSpec) -> str:
    return hf.stored_name(slot, PARTS)


def build(fields: hf.Fields) -> ModelSpec:
    fields.refuse("clip_qkv", "clipped queries, keys and values are not served", (None,))
    bias, norm = fields.flag("attention_bias", False), hf.norm(fields, eps=1e-5)
    mixer = hf.attention(fields, qk_norm=norm, flat_norm=True, qkv_bias=bias, o_bias=bias)
    layer = LayerSpec(mixer, hf.dense(fields), hf.rope(fields, mixer.head_dim), norm, "post")
    return hf.model(fields, [layer] * fields.integer("num_hidden_layers"), eps=1e-5)
