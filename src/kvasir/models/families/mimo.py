"""MiMo 7B. Quirks: the layers of ``qwen2``; its MTP layer joins the hidden state before the embedding."""

from __future__ import annotations

from kvasir.models.families import qwen2
from kvasir.models.mtp_fields import MTPNames

ARCHITECTURES = ("MiMoForCausalLM",)
LEFT_OUT = ("model.mtp_layers.",)
FIRST = "model.mtp_layers.0."
MTP = MTPNames(
    layer=FIRST,
    embed_norm=FIRST + "token_layernorm",
    hidden_norm=FIRST + "hidden_layernorm",
    proj=FIRST + "input_proj",
    norm=FIRST + "final_layernorm",
    hidden_first=True,
)
stored, build = qwen2.stored, qwen2.build
