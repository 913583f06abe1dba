"""Model families: each turns a checkpoint's config into a layer list. One file, one family.

A file is named as its ``model_type``. A family defines ``ARCHITECTURES`` (the class names that it serves),
``build(fields) -> ModelSpec`` and ``stored_name(slot) -> str`` (the checkpoint's name of each of our weight slots). One
tensor fills one slot, so a converter splits fused tensors first. ``EOS_ID`` is optional: it ends a reply when the
checkpoint names no end token. So is ``RERANKER`` (`kvasir.models.reranker`). A field that the config leaves out means
what it means to transformers. An installed package may add a family by an entry point of this group. A file may not,
because a checkpoint must not decide which code runs.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from kvasir import technique
from kvasir.errors import ConfigError, nearest
from kvasir.models.fields import Fields
from kvasir.models.spec import ModelSpec

FAMILIES = "kvasir.models.families"
# Ends of the class names of the same layers without a head, and with one for classes (`kvasir.models.pooling`).
POOLING_ENDS = ("Model", "TextModel", "ForSequenceClassification", "TextForSequenceClassification")


def find_family(model_type: str) -> ModuleType:
    """Find the family's module. Raises ConfigError that lists the families."""
    found = technique.module(FAMILIES, model_type)
    if found is None:
        choices = technique.names(FAMILIES)
        raise ConfigError(
            f"config.json: model_type '{model_type}' is not served; served are {', '.join(choices)}."
            f"{nearest(model_type, choices)}"
        )
    lacking = [name for name in ("ARCHITECTURES", "build", "stored_name") if not hasattr(found, name)]
    if lacking:
        raise ConfigError(
            f"{found.__file__} is no model family: it lacks {', '.join(lacking)} ({__name__} explains them)"
        )
    return found


def build_spec(config: dict[str, Any]) -> ModelSpec:
    """Layer list of an HF config (as ``checkpoint.read_config`` returns it). Raises ConfigError naming the field."""
    fields = Fields(config)
    family = find_family(fields.text("model_type"))
    names = fields.names("architectures", ())
    stems = [name.removesuffix("ForCausalLM") for name in family.ARCHITECTURES]
    served = {*family.ARCHITECTURES, *(stem + end for stem in stems for end in POOLING_ENDS)}
    if names and not served & set(names):
        raise ConfigError(
            f"config.json: architectures {', '.join(names)} is not served; for model_type '{config['model_type']}' it "
            f"must be {', '.join(family.ARCHITECTURES)} (text generation), or its class that embeds or scores"
        )
    return family.build(fields)
