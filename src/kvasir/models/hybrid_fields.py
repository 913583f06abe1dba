"""Reading of configs and tensor names of our own hybrids for research: a recurrent mixer in some layers, attention as
in Llama in the others, a dense FFN in all.

``layer_types`` has ``recurrent`` and ``full_attention``; fields of the recurrent mixer are the family's. Tensors of a
recurrent layer are ``model.layers.N.recurrent.NAME``.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvasir.layers.spec import MixerSpec
from kvasir.models import fields as hf
from kvasir.models.spec import LayerSpec, ModelSpec
from kvasir.models.stored import View

RECURRENT, FULL = "recurrent", "full_attention"


def build(fields: hf.Fields, recurrent: MixerSpec) -> ModelSpec:
    """The model of a config whose recurrent layers have the mixer ``recurrent``."""
    count = fields.integer("num_hidden_layers")
    kinds = fields.names("layer_types", [RECURRENT] * count, length=count)
    if other := sorted({*kinds} - {RECURRENT, FULL}):
        raise fields.fail("layer_types", f"has '{other[0]}'; served are {RECURRENT} and {FULL}")
    if FULL not in kinds:
        raise fields.fail("layer_types", f"has no {FULL}: the engine's pages need one layer that attends")
    attention, norm, dense = hf.attention(fields), hf.norm(fields), hf.dense(fields)
    rope = hf.rope(fields, attention.head_dim)
    layers = [
        LayerSpec(recurrent, dense, None, norm) if kind == RECURRENT else LayerSpec(attention, dense, rope, norm)
        for kind in kinds
    ]
    return hf.model(fields, layers)


def stored(slot: str, spec: ModelSpec, parts: Mapping[str, int], fused: str) -> str | View:
    """The tensor of a slot. ``parts``: outputs of the projection ``fused``, in the order in which it holds them."""
    head, mixes, rest = slot.partition(".mixer.")
    if not mixes or spec.layers[int(head.split(".")[1])].mixer.cache_row() is not None:
        return hf.stored_name(slot)
    where, part = f"model.{head}.recurrent.", rest.removesuffix(".weight")
    if part in parts:
        first = sum(width for name, width in parts.items() if list(parts).index(name) < list(parts).index(part))
        return View(f"{where}{fused}.weight", (slice(first, first + parts[part]),))
    return f"{where}out_proj.weight" if part == "o" else where + rest
