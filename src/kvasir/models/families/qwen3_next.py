"""Qwen3-Next. Quirks: most layers are Gated DeltaNet, which keeps a state instead of keys; attention is gated, and a
quarter of a head rotates; norms are stored around zero; experts, and one behind a gate that every row uses."""

from __future__ import annotations

from kvasir.models import fields as hf
from kvasir.models import recurrent_fields as recurrent
from kvasir.models.mtp_fields import QWEN
from kvasir.models.spec import ModelSpec
from kvasir.models.stored import View

ARCHITECTURES = ("Qwen3NextForCausalLM",)
LEFT_OUT = ("mtp.",)
MTP = QWEN
stored_otherwise = recurrent.fused_expert


def stored(slot: str, spec: ModelSpec) -> str | View:
    return recurrent.expert(slot) or recurrent.stored(slot, spec, fused=True)


def build(fields: hf.Fields) -> ModelSpec:
    step, dense_layers = fields.integer("decoder_sparse_step", 1), fields.numbers("mlp_only_layers", ())
    moe = recurrent.experts(fields, 512, 10, fields.flag("norm_topk_prob", True))

    def ffn_of(layer: int):
        sparse = layer not in dense_layers and (layer + 1) % step == 0
        return moe if sparse else hf.dense(fields)

    return recurrent.build(fields, ffn_of, kv_heads=2)
