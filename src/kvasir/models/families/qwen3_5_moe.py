"""Qwen 3.5 to 3.8 with experts and vision, as they are published: the text model is that of ``qwen3_5_moe_text``, its
config one part of several."""

from __future__ import annotations

from kvasir.models.families import qwen3_5_moe_text as text

ARCHITECTURES = ("Qwen3_5MoeForConditionalGeneration",)
TEXT_OF_PARTS = True
RENAMED = text.RENAMED
LEFT_OUT = (*text.LEFT_OUT, "model.visual.", "visual.")
MTP, stored, stored_otherwise, build = text.MTP, text.stored, text.stored_otherwise, text.build
