"""Gemma 4 with vision and sound, as it is published: the text model is that of ``gemma4_text``, its config one part of
several."""

from __future__ import annotations

from kvasir.models import fields as hf
from kvasir.models.families import gemma4_text

ARCHITECTURES = ("Gemma4ForConditionalGeneration",)
EOS_ID = gemma4_text.EOS_ID
TEXT_OF_PARTS = True
RENAMED = hf.TEXT_RENAMED
LEFT_OUT = tuple(
    f"{prefix}{part}."
    for prefix in ("", "model.")
    for part in ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
)
stored, left_out, build = gemma4_text.stored, gemma4_text.left_out, gemma4_text.build
