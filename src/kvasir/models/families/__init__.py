"""Model families: each turns a checkpoint's config into a layer list. One file, one family.

A file is named as its ``model_type``. A family defines ``ARCHITECTURES`` (the class names that it serves),
``build(fields) -> ModelSpec`` and ``stored(slot, spec) -> str | View``: the stored tensor that fills one of our weight
slots, whole or a part of it (`kvasir.models.stored`). Every element of a tensor must be read once. A field that the
config leaves out means what it means to transformers. Optional are

- ``EOS_ID``: ends a reply when the checkpoint names no end token;
- ``LEFT_OUT``: prefixes of tensors that are not read, such as those of a vision tower;
- ``left_out(spec)``: the same, where they depend on the config;
- ``stored_otherwise(slot, spec) -> View | None``: where some checkpoints have what ``stored`` names;
- ``RENAMED``: other prefixes of tensors' names in some checkpoints, and what they stand for;
- ``MTP``: the names of the layer that predicts a further token (`kvasir.models.mtp_fields`), where there is one;
- ``TEXT_OF_PARTS = True``: the config is made of parts, and its ``text_config`` is what is served;
- ``RERANKER``: how a checkpoint of the family judges a document for a query (`kvasir.models.reranker`).

An installed package may add a family by an entry point of this group. A file may not, because a checkpoint must not
decide which code runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from kvasir import technique
from kvasir.errors import ConfigError
from kvasir.models.fields import Fields
from kvasir.models.spec import ModelSpec

FAMILIES = "kvasir.models.families"
# Families that are not served, and why another family of ours would be wrong for them.
SPARSE = "its rows attend to positions that an index picks, and dense attention would be another model"
UNSERVED = {"deepseek_v32": SPARSE, "glm_moe_dsa": SPARSE}
# Fields that a config made of parts gives for all of them.
OF_THE_WHOLE = (
    "architectures",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "dtype",
    "torch_dtype",
    "quantization_config",
)
# Ends of the class names of the same layers without a head, and with one for classes (`kvasir.models.pooling`).
POOLING_ENDS = ("Model", "TextModel", "ForSequenceClassification", "TextForSequenceClassification")

# Fields whose names end as those of parts do.
NO_PARTS = ("per_layer_config", "quantization_config", "compression_config", "linear_attn_config")


def find_family(model_type: str) -> ModuleType:
    """Find the family's module. Raises ConfigError that lists the families."""
    found = technique.module(FAMILIES, model_type)
    if found is None:
        choices = technique.names(FAMILIES)
        if model_type in UNSERVED:
            raise ConfigError(f"config.json: model_type '{model_type}' is not served: {UNSERVED[model_type]}.")
        raise ConfigError(
            f"config.json: model_type '{model_type}' is not served; served are {', '.join(choices)}."
            f"{_meant(model_type, choices)}"
        )
    lacking = [name for name in ("ARCHITECTURES", "build", "stored") if not hasattr(found, name)]
    if lacking:
        raise ConfigError(
            f"{found.__file__} is no model family: it lacks {', '.join(lacking)} ({__name__} explains them)"
        )
    return found


def _meant(model_type: str, choices: Iterable[str]) -> str:
    """Suggest another spelling of the same name, never another architecture: mixtral is no mistral."""
    plain = [re.sub(r"\W|_", "", name).lower() for name in (model_type, *choices)]
    return "".join(f" Did you mean '{choice}'?" for choice, name in zip(choices, plain[1:]) if name == plain[0])


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the text model that is served: of a config made of parts its ``text_config``, with what the whole
    says about ties, token ids, types and quantisation. ``model_type`` and ``architectures`` stay those of the whole,
    and ``text_model_type`` is that of the part. Raises ConfigError where parts other than the text are needed.
    """
    parts = sorted(
        k for k, v in config.items() if k.endswith("_config") and k not in NO_PARTS and isinstance(v, dict) and v
    )
    if not parts:
        return config
    model_type = config.get("model_type")
    family = find_family(model_type) if isinstance(model_type, str) and model_type else None
    if "text_config" not in parts or not getattr(family, "TEXT_OF_PARTS", False):
        raise ConfigError(
            f"config.json: model_type '{model_type}' is made of parts ({', '.join(parts)}), which this family is not "
            "served with. Use a text-only checkpoint."
        )
    text = config["text_config"]
    whole = {name: config[name] for name in OF_THE_WHOLE if config.get(name) is not None}
    return {**text, **whole, "model_type": model_type, "text_model_type": text.get("model_type")}


def build_spec(config: dict[str, Any]) -> ModelSpec:
    """Layer list of an HF config, which may be made of parts. Raises ConfigError naming the field."""
    fields = Fields(text_of(config))
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
