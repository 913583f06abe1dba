"""Mixtral. Quirks: every layer has experts, whose gate, down and up are named w1, w2 and w3."""

from __future__ import annotations

from kvasir.layers.spec import MoESpec
from kvasir.models import fields as hf
from kvasir.models.spec import LayerSpec, ModelSpec

ARCHITECTURES = ("MixtralForCausalLM",)
EOS_ID = 2
PARTS = {**hf.PARTS, "ffn.router": "block_sparse_moe.gate"}
NUMBERS = {"gate": "w1", "down": "w2", "up": "w3"}


def stored(slot: str, spec: ModelSpec) -> str:
    head, expert, rest = slot.partition(".ffn.experts.")
    if not expert:
        return hf.stored_name(slot, PARTS)
    number, part, leaf = rest.split(".")
    return f"model.{head}.block_sparse_moe.experts.{number}.{NUMBERS[part]}.{leaf}"


def build(fields: hf.Fields) -> ModelSpec:
    num_experts = fields.integer("num_local_experts", fields.integer("num_experts", 8))
    top_k = fields.integer("num_experts_per_tok", 2)
    if top_k > num_experts:
        raise fields.fail("num_experts_per_tok", f"is {top_k}, more than the {num_experts} experts")
    ffn = MoESpec(num_experts, top_k, fields.integer("intermediate_size"), True, hf.activation(fields))
    mixer = hf.attention(fields, kv_heads=8, window=fields.integer("sliding_window", None))
    given = fields.section("rope_scaling") or fields.section("rope_parameters")
    theta, original = fields.number("rope_theta", 1e6), fields.integer("original_max_position_embeddings", None)
    rope = hf.rope_from(fields, given, mixer.head_dim, theta, original)
    layer = LayerSpec(mixer, ffn, rope, hf.norm(fields, eps=1e-5))
    return hf.model(fields, [layer] * fields.integer("num_hidden_layers"), eps=1e-5)
