"""Mistral Small 3.1, 3.2 and 4 and Ministral 3, with vision as they are published: the text model is that of
``mistral``, ``ministral3`` or ``mistral4``, its config one part of several."""

from __future__ import annotations

from kvasir.models import fields as hf
from kvasir.models.families import ministral3, mistral, mistral4
from kvasir.models.spec import ModelSpec
from kvasir.models.stored import View

ARCHITECTURES = ("Mistral3ForConditionalGeneration",)
EOS_ID = 2
TEXT_OF_PARTS = True
RENAMED = hf.TEXT_RENAMED
LEFT_OUT = ("vision_tower.", "model.vision_tower.", "multi_modal_projector.", "model.multi_modal_projector.")
TEXTS = {"mistral": mistral, "ministral3": ministral3, "mistral4": mistral4}


def stored(slot: str, spec: ModelSpec) -> str | View:
    latents = spec.layers[0].mixer.kind == "mla"
    return mistral4.stored(slot, spec) if latents else hf.stored(slot, spec)


def build(fields: hf.Fields) -> ModelSpec:
    # A head is not tied where nothing says so: Mistral Small 3.1 is published so. transformers finds out
    # from the weights.
    text = fields.text("text_model_type", "mistral")
    if text not in TEXTS:
        raise fields.fail("text_config.model_type", f"is '{text}'; served with mistral3 are {', '.join(TEXTS)}")
    return TEXTS[text].build(fields)
