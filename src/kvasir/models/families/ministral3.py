"""Ministral 3, text. Quirks: yarn, and queries that are scaled by their position; all layers slide when
``sliding_window`` is set."""

from __future__ import annotations

from kvasir.layers.spec import QueryScale
from kvasir.models import fields as hf
from kvasir.models.spec import LayerSpec, ModelSpec

ARCHITECTURES = ("Ministral3ForCausalLM",)
EOS_ID = 2
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
stored = hf.stored


def build(fields: hf.Fields) -> ModelSpec:
    fields.refuse("layer_types", "per-layer attention belongs to other model types than ministral3", (None,))
    given = fields.section("rope_scaling") or fields.section("rope_parameters") or hf.Fields(ROPE)
    beta, scale = given.number("llama_4_scaling_beta", None, positive=False), None
    if beta:
        scale = QueryScale(beta, given.integer("original_max_position_embeddings"))
    window = fields.integer("sliding_window", None)
    mixer = hf.attention(fields, kv_heads=8, head_dim=128, window=window, query_scale=scale)
    rope = hf.rope_from(fields, given, mixer.head_dim, fields.number("rope_theta", 10000.0))
    layer = LayerSpec(mixer, hf.dense(fields), rope, hf.norm(fields, eps=1e-5))
    return hf.model(fields, [layer] * fields.integer("num_hidden_layers"), eps=1e-5)
