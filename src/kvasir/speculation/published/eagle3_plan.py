"""The plan of an EAGLE-3 head, from fields that its layouts have in common."""

from __future__ import annotations

from typing import Any

from kvasir.models.fields import Fields
from kvasir.speculation.drafter import ServedModel
from kvasir.speculation.published.folder import Folder, Plan
from kvasir.speculation.published.head import Eagle3Head, PublishedShape
from kvasir.speculation.published.layer import (
    NOT_OURS,
    check_size,
    layer_shape,
    layer_sources,
    outputs_of,
    usual_layers,
)


def eagle3_plan(
    folder: Folder, model: ServedModel, layer: Fields, own: Fields, counted: tuple[int, ...] | None, **given: Any
) -> Plan:
    """The plan of a head. ``layer``: the fields of its decoder layer; ``own``: its other fields; ``counted``: the
    hidden states it reads, by the layer that reads them (None: the usual three); ``given``: further arguments of
    `PublishedShape` and ``verifier``. Raises ConfigError."""
    prefix = "midlayer." if any(name.startswith("midlayer.") for name in folder.shapes) else "layers.0."
    shape = layer_shape(folder, layer, prefix)
    served = check_size(folder, own.integer("target_hidden_size", shape["dim"]), model)
    vocab = layer.integer("vocab_size")
    rows = own.integer("draft_vocab_size", own.integer("truncated_vocab_size", vocab))
    table = folder.shapes.get("embed_tokens.weight", ())
    if not table and shape["dim"] != served:
        raise folder.fail(
            f"its hidden_size {shape['dim']} is not the served model's {served}, and it brings no embed_tokens"
        )
    norms = {"tap_norm": "all"} if "input_norm.weight" in folder.shapes else {}
    if "fc_norm.0.weight" in folder.shapes:
        norms = {"tap_norm": "each"}
    layers = outputs_of(folder, counted or usual_layers(model), model)
    verifier = given.pop("verifier", "")
    shape["biases"] |= {"fc"} if "fc.bias" in folder.shapes else set()
    sources = layer_sources(prefix) | {
        "fuse_proj.weight": ("fc.weight",),
        "fuse_proj.bias": ("fc.bias",),
        "token_norm.weight": (f"{prefix}input_layernorm.weight",),
        "state_norm.weight": (f"{prefix}hidden_norm.weight",),
        "norm.weight": ("norm.weight",),
        "tap_norm.weight": ("input_norm.weight",),
        "head.weight": ("lm_head.weight",),
        "own_table": ("embed_tokens.weight",),
    }
    sources |= {f"tap_norms.{i}.weight": (f"fc_norm.{i}.weight",) for i in range(len(layers))}
    made = PublishedShape(
        **shape,
        **norms,
        **given,
        served_dim=served,
        layers=layers,
        own_rows=rows if "lm_head.weight" in folder.shapes or rows != vocab else 0,
        own_embedding=table[0] if table else 0,
    )
    return Plan(Eagle3Head, made, sources, (*NOT_OURS, f"{prefix}self_attn.rotary_emb."), verifier)
