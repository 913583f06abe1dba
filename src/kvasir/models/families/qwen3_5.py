"""Qwen 3.5 to 3.8 with vision, as they are published: the text model is that of ``qwen3_5_text``, its config one part
of several."""

from __future__ import annotations

from kvasir.models.families import qwen3_5_text as text

ARCHITECTURES = ("Qwen3_5ForConditionalGeneration",)
TEXT_OF_PARTS = True
RENAMED = text.RENAMED
LEFT_OUT = (*text.LEFT_OUT, "model.visual.", "visual.")
MTP, stored, build = text.MTP, text.stored, text.build
