"""Qwen 3.5 to 3.8, dense, text alone. Quirks: most layers are Gated DeltaNet, which keeps a state instead of keys;
attention is gated, and a quarter of a head rotates; norms are stored around zero."""

from __future__ import annotations

from kvasir.models import fields as hf
from kvasir.models import recurrent_fields as recurrent
from kvasir.models.mtp_fields import QWEN
from kvasir.models.spec import ModelSpec
from kvasir.models.stored import View

ARCHITECTURES = ("Qwen3_5ForCausalLM",)
RENAMED = hf.TEXT_RENAMED
LEFT_OUT = ("mtp.",)
MTP = QWEN


def stored(slot: str, spec: ModelSpec) -> str | View:
    return recurrent.stored(slot, spec, fused=False)


def build(fields: hf.Fields) -> ModelSpec:
    dense = hf.dense(fields)
    return recurrent.build(fields, lambda layer: dense, kv_heads=4)
