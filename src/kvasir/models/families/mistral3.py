"""Mistral Small 3.1 and 3.2 and Ministral 3, with vision as they are published: the text model is that of ``mistral``
or ``ministral3``, its config one part of several."""

from __future__ import annotations

from kvasir.models import fields as hf
from kvasir.models.families import ministral3, mistral
from kvasir.models.spec import ModelSpec

ARCHITECTURES = ("Mistral3ForConditionalGeneration",)
EOS_ID = 2
TEXT_OF_PARTS = True
RENAMED = hf.TEXT_RENAMED
LEFT_OUT = ("vision_tower.", "model.vision_tower.", "multi_modal_projector.", "model.multi_modal_projector.")
TEXTS = {"mistral": mistral, "ministral3": ministral3}
stored = hf.stored


def build(fields: hf.Fields) -> ModelSpec:
    # A head is not tied where nothing says so: Mistral Small 3.1 is published so. transformers finds out
    # from the weights.
    text = fields.text("text_model_type", "mistral")
    if text not in TEXTS:
        raise fields.fail("text_config.model_type", f"is '{text}'; served with mistral3 are {', '.join(TEXTS)}")
    return TEXTS[text].build(fields)
