"""Phi 3, 3.5 and 4 (text). Quirks: q, k and v lie in one tensor, gate and up in another; heads may rotate partly; all
layers slide when ``sliding_window`` is set. With longrope, a context that may grow past the original length has the
long factors from its start; ``--max-model-len`` up to the original length takes the short ones."""

from __future__ import annotations

from kvasir.models import fields as hf
from kvasir.models.spec import LayerSpec, ModelSpec
from kvasir.models.stored import View, rows_of

ARCHITECTURES = ("Phi3ForCausalLM",)
EOS_ID = 32000


def stored(slot: str, spec: ModelSpec) -> str | View:
    head, _, part = slot.removesuffix(".weight").rpartition(".")
    if head.endswith(".mixer") and part in ("q", "k", "v"):
        layer = spec.layers[int(slot.split(".")[1])]
        return rows_of(f"model.{head.removesuffix('mixer')}self_attn.qkv_proj.weight", part, layer.mixer.widths())
    if head.endswith(".ffn") and part in ("gate", "up"):
        width = spec.layers[int(slot.split(".")[1])].ffn.intermediate_size
        return rows_of(f"model.{head.removesuffix('ffn')}mlp.gate_up_proj.weight", part, {"gate": width, "up": width})
    return hf.stored_name(slot)


def build(fields: hf.Fields) -> ModelSpec:
    # The field is 4096 where it is absent in other families; here it means no window.
    window = fields.integer("sliding_window", None)
    mixer = hf.attention(fields, window=window)
    layer = LayerSpec(mixer, hf.dense(fields), _rope(fields, mixer.head_dim), hf.norm(fields, eps=1e-5))
    return hf.model(fields, [layer] * fields.integer("num_hidden_layers"), eps=1e-5)


def _rope(fields: hf.Fields, head_dim: int) -> hf.RopeSpec:
    """RoPE, whose types ``su`` and ``yarn`` are early names of longrope. ``original_max_position_embeddings`` is 4096
    where it is absent."""
    parameters = fields.section("rope_scaling") or fields.section("rope_parameters")
    if parameters is not None and parameters.text("rope_type", parameters.text("type", "default")) in ("su", "yarn"):
        parameters = hf.Fields({**parameters.raw, "rope_type": "longrope"}, parameters.where)
    theta, original = fields.number("rope_theta", 10000.0), fields.integer("original_max_position_embeddings", 4096)
    return hf.rope_from(fields, parameters, head_dim, theta, original, partial=1.0)
