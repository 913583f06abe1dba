"""Gemma 3 with vision, as 4B, 12B and 27B are published: the text model is that of ``gemma3_text``, its config one part
of several."""

from __future__ import annotations

from kvasir.models import fields as hf
from kvasir.models.families import gemma3_text
from kvasir.models.spec import ModelSpec

ARCHITECTURES = ("Gemma3ForConditionalGeneration",)
EOS_ID = gemma3_text.EOS_ID
TEXT_OF_PARTS = True
RENAMED = hf.TEXT_RENAMED
LEFT_OUT = ("vision_tower.", "model.vision_tower.", "multi_modal_projector.", "model.multi_modal_projector.")
stored = gemma3_text.stored


def build(fields: hf.Fields) -> ModelSpec:
    # transformers ignores it here and applies it in gemma3_text; published checkpoints have none.
    fields.refuse("final_logit_softcapping", "logits of gemma3 are not capped", (None,))
    return gemma3_text.build(fields)
