"""Qwen 3.5 to 3.8 with experts, text alone. Quirks: the layers of ``qwen3_5_text``, with experts and one behind a gate
that every row uses."""

from __future__ import annotations

from kvasir.models import fields as hf
from kvasir.models import recurrent_fields as recurrent
from kvasir.models.mtp_fields import QWEN
from kvasir.models.spec import ModelSpec
from kvasir.models.stored import View

ARCHITECTURES = ("Qwen3_5MoeForCausalLM",)
RENAMED = hf.TEXT_RENAMED
LEFT_OUT = ("mtp.",)
MTP = QWEN
stored_otherwise = recurrent.fused_expert


def stored(slot: str, spec: ModelSpec) -> str | View:
    return recurrent.expert(slot) or recurrent.stored(slot, spec, fused=False)


def build(fields: hf.Fields) -> ModelSpec:
    moe = recurrent.experts(fields, 256, 8, renormalize=True)
    return recurrent.build(fields, lambda layer: moe, kv_heads=2)
