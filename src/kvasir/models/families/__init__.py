"""Model families, one module each, named after its ``model_type`` and found by name.

A family gives ``ARCHITECTURES`` (the class names it serves), ``build(fields) -> ModelSpec`` and ``stored_name(slot) ->
str`` (the checkpoint's name of each of our weight slots; a tensor fills one slot, so a converter must split fused ones
first). An optional ``EOS_ID`` ends answers if the checkpoint names no end token. Fields that a config lacks have
transformers' defaults. An installed package may bring a family, by an entry point of this group. A file may not,
because a checkpoint must not choose which code runs.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from kvasir import technique
from kvasir.errors import ConfigError, nearest
from kvasir.models.fields import Fields
from kvasir.models.spec import ModelSpec

FAMILIES = "kvasir.models.families"


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
    """The model that an HF config describes (as ``checkpoint.read_config`` returns it).
    Raises ConfigError that names the field."""
    fields = Fields(config)
    family = find_family(fields.text("model_type"))
    names = fields.names("architectures", ())
    if names and not set(names) & set(family.ARCHITECTURES):
        raise ConfigError(
            f"config.json: architectures {', '.join(names)} is not served; for model_type '{config['model_type']}' it "
            f"must be {', '.join(family.ARCHITECTURES)} (text generation)"
        )
    return family.build(fields)
