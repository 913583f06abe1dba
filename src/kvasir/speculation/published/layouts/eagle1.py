"""EAGLE-1 and EAGLE-2 as their authors publish them: ``fc`` over the embedding and the state, one layer without a
first norm, and the served model's own embedding and output matrix (arXiv 2401.15077, 2406.16858)."""

from __future__ import annotations

from kvasir.models.fields import Fields
from kvasir.speculation.drafter import ServedModel
from kvasir.speculation.published.folder import Folder, Layout, Plan
from kvasir.speculation.published.head import Eagle1Head, PublishedShape
from kvasir.speculation.published.layer import DEPTH, NOT_OURS, check_size, layer_shape, layer_sources

LAYER = "layers.0."


class Eagle1(Layout):
    order = 3

    def takes(self, folder: Folder) -> bool:
        return "fc.weight" in folder.shapes and not any(name.endswith("hidden_norm.weight") for name in folder.shapes)

    def plan(self, folder: Folder, model: ServedModel) -> Plan:
        fields = Fields(folder.config)
        shape = layer_shape(folder, fields, LAYER)
        shape["biases"] |= {"fc"} if "fc.bias" in folder.shapes else set()
        made = PublishedShape(
            **shape,
            served_dim=check_size(folder, shape["dim"], model),
            layers=(len(model.spec.layers) - 1,),
            depth=DEPTH,
        )
        sources = layer_sources(LAYER) | {"fuse_proj.weight": ("fc.weight",), "fuse_proj.bias": ("fc.bias",)}
        ignored = (*NOT_OURS, "embed_tokens.", "lm_head.", f"{LAYER}self_attn.rotary_emb.")
        return Plan(Eagle1Head, made, sources, ignored)
