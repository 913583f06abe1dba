"""GLM 4.5, 4.6 and 4.7. Quirks: half of a head rotates; optional QK norm; after the first layers come experts, chosen
by sigmoids with a stored correction, and one that every row uses."""

from __future__ import annotations

from kvasir.layers.spec import MoESpec
from kvasir.models import fields as hf
from kvasir.models.mtp_fields import DEEPSEEK
from kvasir.models.spec import LayerSpec, ModelSpec

ARCHITECTURES = ("Glm4MoeForCausalLM",)
MTP = DEEPSEEK
PARTS = {
    **hf.PARTS,
    "ffn.router": "mlp.gate",
    "ffn.shared.gate": "mlp.shared_experts.gate_proj",
    "ffn.shared.up": "mlp.shared_experts.up_proj",
    "ffn.shared.down": "mlp.shared_experts.down_proj",
}


def stored(slot: str, spec: ModelSpec) -> str:
    head, expert, rest = slot.partition(".ffn.experts.")
    if expert:
        number, part, leaf = rest.split(".")
        return f"model.{head}.mlp.experts.{number}.{part}_proj.{leaf}"
    if slot.endswith(".ffn.correction"):
        return f"model.{slot.removesuffix('.ffn.correction')}.mlp.gate.e_score_correction_bias"
    return hf.stored_name(slot, PARTS)


def left_out(spec: ModelSpec) -> tuple[str, ...]:
    """The layer after the last one, which predicts further tokens."""
    return (f"model.layers.{len(spec.layers)}.",)


def build(fields: hf.Fields) -> ModelSpec:
    bias, norm = fields.flag("attention_bias", False), hf.norm(fields, eps=1e-5)
    qk_norm = norm if fields.flag("use_qk_norm", False) else None
    mixer = hf.attention(fields, kv_heads=8, qk_norm=qk_norm, qkv_bias=bias)
    rope, moe = hf.rope(fields, mixer.head_dim, partial=0.5), _moe(fields)
    count, first = fields.integer("num_hidden_layers"), fields.integer("first_k_dense_replace", 1, least=0)
    dense = hf.dense(fields) if first else None
    layers = [LayerSpec(mixer, dense if i < first else moe, rope, norm) for i in range(count)]
    return hf.model(fields, layers, eps=1e-5)


def _moe(fields: hf.Fields) -> MoESpec:
    count = fields.integer("n_routed_experts", fields.integer("num_local_experts", 128))
    groups, top_groups = fields.integer("n_group", 1), fields.integer("topk_group", 1)
    top_k = fields.integer("num_experts_per_tok", 8)
    if count % groups or top_groups > groups:
        raise fields.fail("n_group", f"is {groups}: {count} experts, of which {top_groups} groups are kept, do not fit")
    if top_k > count // groups * top_groups:
        raise fields.fail("num_experts_per_tok", f"is {top_k}, more than the {count // groups * top_groups} experts")
    width = fields.integer("moe_intermediate_size", 1408)
    return MoESpec(
        count,
        top_k,
        width,
        fields.flag("norm_topk_prob", True),
        hf.activation(fields),
        scoring="sigmoid",
        weight_scale=fields.number("routed_scaling_factor", 1.0),
        correction=True,
        groups=groups,
        top_groups=top_groups,
        shared_size=width * fields.integer("n_shared_experts", 1),
    )
