"""Reading of configs with multi-head latent attention, and the names and row order of its stored tensors.

Families in DeepSeek's form share it: one product gives the latent and the rotary key (kv_a_proj_with_mqa), one gives
every head's keys and values of the latent (kv_b_proj), and experts follow after some dense layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvasir.layers.spec import MLASpec, MoESpec, NormSpec, QueryScale, RopeSpec
from kvasir.models import fields as hf
from kvasir.models.spec import LayerSpec, ModelSpec
from kvasir.models.stored import View

PARTS = {
    **hf.PARTS,
    "mixer.q_a": "self_attn.q_a_proj",
    "mixer.q_a_norm": "self_attn.q_a_layernorm",
    "mixer.kv_norm": "self_attn.kv_a_layernorm",
    "ffn.router": "mlp.gate",
    "ffn.shared.gate": "mlp.shared_experts.gate_proj",
    "ffn.shared.up": "mlp.shared_experts.up_proj",
    "ffn.shared.down": "mlp.shared_experts.down_proj",
}
# Norms inside attention have torch's default in transformers, whatever rms_norm_eps says.
INNER = NormSpec(1e-6)


def attention(
    fields: hf.Fields,
    parameters: hf.Fields | None,
    *,
    heads: int = 32,
    rank: int = 512,
    q_rank: int | None = 1536,
    rope_dim: int = 64,
    nope_dim: int = 128,
    value_dim: int = 128,
    query_scale: QueryScale | None = None,
    interleaved: bool = True,
) -> MLASpec:
    """The attention of a config; the keywords are the family's defaults. ``parameters``: of RoPE.

    The scale is that of a whole head, and yarn's ``mscale_all_dim`` multiplies it twice (DeepSeek's code; YaRN has it
    in cos and sin instead).
    """
    fields.refuse("index_topk", "an index picks the positions that a row attends to; dense attention is another model")
    heads = fields.integer("num_attention_heads", heads)
    nope_dim, rope_dim = fields.integer("qk_nope_head_dim", nope_dim), fields.integer("qk_rope_head_dim", rope_dim)
    if rope_dim % 2:
        raise fields.fail("qk_rope_head_dim", f"is {rope_dim}, expected an even number (RoPE pairs dimensions)")
    scale = (nope_dim + rope_dim) ** -0.5
    p = parameters or hf.Fields({})
    kind, all_dim = p.text("rope_type", p.text("type", "default")), p.number("mscale_all_dim", 0.0, positive=False)
    if kind != "default" and all_dim:
        factor = p.number("factor")
        scale *= 1.0 if factor <= 1 else (0.1 * all_dim * math.log(factor) + 1.0) ** 2
    if "q_lora_rank" in fields.raw:
        q_rank = fields.integer("q_lora_rank", None)
    bias = fields.flag("attention_bias", False)
    return MLASpec(
        heads,
        fields.integer("kv_lora_rank", rank),
        rope_dim,
        nope_dim,
        fields.integer("v_head_dim", value_dim),
        scale,
        q_rank,
        INNER,
        biases=(("kv_a", "o") if q_rank is None else ("q_a", "kv_a", "o")) if bias else (),
        query_scale=query_scale,
        interleaved=interleaved,
    )


def parameters_of(fields: hf.Fields) -> hf.Fields | None:
    """The object of the config that describes RoPE; ``rope_scaling`` wins, as in transformers."""
    return fields.section("rope_scaling") or fields.section("rope_parameters")


def experts(
    fields: hf.Fields, top_k: Any, groups: int, top_groups: int, count: int, width: int, **quirks: Any
) -> MoESpec:
    """The experts of a config; the arguments are the family's defaults."""
    fields.refuse("moe_layer_freq", "experts are served in every layer after the first dense ones", (None, 1))
    also = quirks.pop("also", "num_local_experts")  # transformers' other name of the field in this family
    count = fields.integer("n_routed_experts", fields.integer(also, count))
    groups, top_groups = fields.integer("n_group", groups), fields.integer("topk_group", top_groups)
    top_k = fields.integer("num_experts_per_tok", top_k)
    if count % groups or top_groups > groups:
        raise fields.fail("n_group", f"is {groups}: {count} experts, of which {top_groups} groups are kept, do not fit")
    if top_k > count // groups * top_groups:
        raise fields.fail("num_experts_per_tok", f"is {top_k}, more than the {count // groups * top_groups} experts")
    width = fields.integer("moe_intermediate_size", width)
    shared = fields.integer("n_shared_experts", quirks.pop("shared", 1))
    return MoESpec(
        count,
        top_k,
        width,
        activation=hf.activation(fields),
        groups=groups,
        top_groups=top_groups,
        shared_size=width * shared,
        **quirks,
    )


def layers(
    fields: hf.Fields, mixer: MLASpec, rope: RopeSpec, dense: Sequence[bool], moe: MoESpec | None, eps: float
) -> list[LayerSpec]:
    """The layers of a config: ``dense`` says which of them have no experts."""
    plain, norm = hf.dense(fields) if any(dense) else None, hf.norm(fields, eps=eps)
    return [LayerSpec(mixer, plain if is_dense else moe, rope if mixer.rope_dim else None, norm) for is_dense in dense]


def first_dense(fields: hf.Fields, default: int) -> list[bool]:
    """Which layers have no experts: the first ``first_k_dense_replace``."""
    first = fields.integer("first_k_dense_replace", default, least=0)
    return [i < first for i in range(fields.integer("num_hidden_layers"))]


def left_out(spec: ModelSpec) -> tuple[str, ...]:
    """The layer after the last one, which predicts further tokens."""
    return (f"model.layers.{len(spec.layers)}.",)


def stored(slot: str, spec: ModelSpec, parts: Mapping[str, str] = PARTS) -> str | View:
    """The tensor of a slot in DeepSeek's form, or the rows of it that fill the slot."""
    head, expert, rest = slot.partition(".ffn.experts.")
    if expert:
        number, part, leaf = rest.split(".")
        return f"model.{head}.mlp.experts.{number}.{part}_proj.{leaf}"
    if slot.endswith(".ffn.correction"):
        return f"model.{slot.removesuffix('.ffn.correction')}.mlp.gate.e_score_correction_bias"
    head, attends, rest = slot.partition(".mixer.")
    names = rest.split(".")
    if not attends or names[0] not in ("q", "kv_a", "kv_b"):
        return hf.stored_name(slot, parts)
    mixer = spec.layers[int(head.split(".")[1])].mixer
    if names[0] == "kv_a":
        name, rows = "kv_a_proj_with_mqa", _rows(0, mixer.rank, mixer, names[1])
    elif names[0] == "q":
        name = "q_proj" if mixer.q_rank is None else "q_b_proj"
        rows = _rows(int(names[1]) * mixer.qk_dim, mixer.nope_dim, mixer, names[2])
    else:
        first = int(names[1]) * (mixer.nope_dim + mixer.value_dim)
        middle, last = first + mixer.nope_dim, first + mixer.nope_dim + mixer.value_dim
        name, rows = "kv_b_proj", slice(first, middle) if names[2] == "key" else slice(middle, last)
    return View(f"model.{head}.self_attn.{name}.{names[-1]}", (rows,))


def _rows(first: int, nope: int, mixer: MLASpec, part: str) -> slice:
    """Rows of a part: the ``nope`` ones without RoPE from ``first`` on, or the first or second elements of the rotary
    pairs that follow."""
    if part == "nope":
        return slice(first, first + nope)
    begin, end, second = first + nope, first + nope + mixer.rope_dim, part == "imag"
    if mixer.interleaved:
        return slice(begin + second, end, 2)
    middle = begin + mixer.rope_dim // 2
    return slice(middle, end) if second else slice(begin, middle)
