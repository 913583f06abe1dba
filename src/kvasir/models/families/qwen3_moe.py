"""Qwen 3 MoE. Quirks: those of Qwen 3; most layers have experts (``decoder_sparse_step``, ``mlp_only_layers``); with
``use_sliding_window`` every layer slides."""

from __future__ import annotations

from kvasir.layers.spec import DenseSpec, MoESpec
from kvasir.models import fields as hf
from kvasir.models.spec import LayerSpec, ModelSpec

ARCHITECTURES = ("Qwen3MoeForCausalLM",)
PARTS = {**hf.PARTS, "ffn.router": "mlp.gate"}


def stored(slot: str, spec: ModelSpec) -> str:
    head, expert, rest = slot.partition(".ffn.experts.")
    if expert:
        number, part, leaf = rest.split(".")
        return f"model.{head}.mlp.experts.{number}.{part}_proj.{leaf}"
    return hf.stored_name(slot, PARTS)


def build(fields: hf.Fields) -> ModelSpec:
    bias = fields.flag("attention_bias", False)
    window = hf.window(fields) if fields.flag("use_sliding_window", False) else None
    mixer = hf.attention(fields, kv_heads=4, window=window, qk_norm=hf.norm(fields), qkv_bias=bias, o_bias=bias)
    rope, norm = hf.rope(fields, mixer.head_dim), hf.norm(fields)
    layers = [LayerSpec(mixer, ffn, rope, norm) for ffn in _ffns(fields)]
    return hf.model(fields, layers)


def _ffns(fields: hf.Fields) -> list[DenseSpec | MoESpec]:
    num_experts = fields.integer("num_local_experts" if fields.has("num_local_experts") else "num_experts", least=0)
    step, dense_layers = fields.integer("decoder_sparse_step", 1), fields.numbers("mlp_only_layers", ())
    sparse = [
        num_experts > 0 and i not in dense_layers and (i + 1) % step == 0
        for i in range(fields.integer("num_hidden_layers"))
    ]
    dense = None if all(sparse) else hf.dense(fields)
    return [_moe(fields, num_experts) if s else dense for s in sparse]


def _moe(fields: hf.Fields, num_experts: int) -> MoESpec:
    top_k = fields.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise fields.fail("num_experts_per_tok", f"is {top_k}, more than the {num_experts} experts")
    return MoESpec(
        num_experts,
        top_k,
        fields.integer("moe_intermediate_size"),
        fields.flag("norm_topk_prob", False),
        hf.activation(fields),
    )
