"""Our own hybrids of Mamba-3 and attention, for research. Quirks: ``mamba_rate`` names the published code whose decays
the model was trained with."""

from __future__ import annotations

from kvasir.layers.recurrent_spec import Mamba3Spec
from kvasir.models import fields as hf
from kvasir.models import hybrid_fields as hybrid
from kvasir.models.spec import ModelSpec
from kvasir.models.stored import View

ARCHITECTURES = ("KvasirMamba3ForCausalLM",)


def stored(slot: str, spec: ModelSpec) -> str | View:
    mixer = next(layer.mixer for layer in spec.layers if layer.mixer.kind == "mamba3")
    return hybrid.stored(slot, spec, mixer.parts, "in_proj")


def build(fields: hf.Fields) -> ModelSpec:
    dim, expand = fields.integer("mamba_head_dim", 64), fields.integer("mamba_expand", 2)
    inner, state_dim = expand * fields.integer("hidden_size"), fields.integer("mamba_state_dim", 128)
    groups, rotated = fields.integer("mamba_groups", 1), fields.number("mamba_rope_fraction", 0.5)
    rate = fields.text("mamba_rate", "reciprocal")
    if inner % dim or inner // dim % groups:
        raise fields.fail("mamba_head_dim", f"is {dim}: {inner} channels are no heads of {dim} for {groups} groups")
    if rotated > 1 or int(state_dim * rotated) < 2:
        raise fields.fail("mamba_rope_fraction", f"is {rotated}, expected more than 0 and at most 1")
    if rate not in ("reciprocal", "softplus"):
        raise fields.fail("mamba_rate", f"is '{rate}'; served are reciprocal (state-spaces/mamba) and softplus (fla)")
    mixer = Mamba3Spec(
        inner // dim, dim, state_dim, hf.norm(fields), groups, rotated, fields.integer("mamba_rank", 1), rate
    )
    return hybrid.build(fields, mixer)
