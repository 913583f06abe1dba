"""Reading of configs and tensor names that the hybrids of the Qwen family share: Gated DeltaNet in most layers, gated
attention in the others."""

from __future__ import annotations

from collections.abc import Callable

from kvasir.layers.spec import FFNSpec, GatedDeltaSpec, MoESpec
from kvasir.models import fields as hf
from kvasir.models.spec import LayerSpec, ModelSpec
from kvasir.models.stored import View

# Share of an attention head that rotates by default.
PARTIAL = 0.25
PARTS = {
    **hf.PARTS,
    "mixer.o": "self_attn.o_proj",
    "ffn.router": "mlp.gate",
    "ffn.shared.gate": "mlp.shared_expert.gate_proj",
    "ffn.shared.up": "mlp.shared_expert.up_proj",
    "ffn.shared.down": "mlp.shared_expert.down_proj",
    "ffn.shared_gate": "mlp.shared_expert_gate",
}
# Slots of a recurrent layer that a whole tensor fills.
WHOLE = {
    "o.weight": "out_proj.weight",
    "conv.weight": "conv1d.weight",
    "log_decay": "A_log",
    "decay_bias": "dt_bias",
    "norm.weight": "norm.weight",
}


def build(fields: hf.Fields, ffn_of: Callable[[int], FFNSpec], kv_heads: int) -> ModelSpec:
    """The model of a config whose layer ``i`` has the feed-forward block ``ffn_of(i)``. ``kv_heads``: the family's
    default."""
    norm = hf.norm(fields, offset=1.0)
    bias = fields.flag("attention_bias", False)
    attention = hf.attention(
        fields, kv_heads=kv_heads, head_dim=256, qk_norm=norm, qkv_bias=bias, o_bias=bias, gated=True
    )  # the gate is the second half of a query head
    rope, recurrent = hf.rope(fields, attention.head_dim, PARTIAL), delta(fields)
    layers = [
        LayerSpec(attention, ffn_of(i), rope, norm)
        if kind == "full_attention"
        else LayerSpec(recurrent, ffn_of(i), None, norm)
        for i, kind in enumerate(layer_types(fields))
    ]
    return hf.model(fields, layers, offset=1.0)


def delta(fields: hf.Fields) -> GatedDeltaSpec:
    """The recurrent mixer of a config."""
    keys, values = fields.integer("linear_num_key_heads", 16), fields.integer("linear_num_value_heads", 32)
    if values % keys:
        raise fields.fail("linear_num_value_heads", f"is {values}, not a multiple of linear_num_key_heads ({keys})")
    if hf.activation(fields) != "silu":
        raise fields.fail("hidden_act", "is not silu, which the convolution of recurrent layers has")
    taps = fields.integer("linear_conv_kernel_dim", 4, least=2)
    return GatedDeltaSpec(
        keys,
        values,
        fields.integer("linear_key_head_dim", 128),
        fields.integer("linear_value_head_dim", 128),
        hf.norm(fields),
        taps,
    )


def layer_types(fields: hf.Fields) -> tuple[str, ...]:
    """The kind of every layer: ``full_attention`` or ``linear_attention``, which is recurrent."""
    count, interval = fields.integer("num_hidden_layers"), fields.integer("full_attention_interval", 4)
    usual = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(count)]
    kinds = fields.names("layer_types", usual, length=count)
    for kind in kinds:
        if kind not in ("full_attention", "linear_attention"):
            raise fields.fail("layer_types", f"has '{kind}'; served are full_attention and linear_attention")
    return kinds


def stored(slot: str, spec: ModelSpec, fused: bool) -> str | View:
    """The tensor of a slot. ``fused``: projections are two tensors, ordered by head of keys (Qwen3-Next); otherwise
    queries, keys and values are one, and the others are apart."""
    head, mixer, rest = slot.partition(".mixer.")
    if not mixer or spec.layers[int(head.split(".")[1])].mixer.kind != "gated_delta":
        return hf.stored_name(slot, PARTS)
    where, mine = f"model.{head}.linear_attn.", spec.layers[int(head.split(".")[1])].mixer
    if rest in WHOLE:
        return where + WHOLE[rest]
    part, number, leaf = rest.split(".", 2)
    count = mine.num_key_heads
    each = {"q": mine.key_dim, "k": mine.key_dim, **dict.fromkeys("vz", mine.values // count)}
    each |= dict.fromkeys("ba", mine.num_value_heads // count)
    together = ("qkvz", "ba") if fused else ("qkv", "z", "b", "a")
    tensor = next(parts for parts in together if part in parts)
    if fused:  # a head of keys has its rows of every part together
        first = int(number) * sum(each[p] for p in tensor) + sum(each[p] for p in tensor[: tensor.index(part)])
    else:
        first = count * sum(each[p] for p in tensor[: tensor.index(part)]) + int(number) * each[part]
    return View(f"{where}in_proj_{tensor}.{leaf}", (slice(first, first + each[part]),))


def experts(fields: hf.Fields, count: int, top_k: int, renormalize: bool) -> MoESpec:
    """The experts of a config, and the one that every row uses. ``count``, ``top_k``: the family's defaults."""
    count, top_k = fields.integer("num_experts", count), fields.integer("num_experts_per_tok", top_k)
    if top_k > count:
        raise fields.fail("num_experts_per_tok", f"is {top_k}, more than the {count} experts")
    return MoESpec(
        count,
        top_k,
        fields.integer("moe_intermediate_size", 512),
        renormalize,
        hf.activation(fields),
        shared_size=fields.integer("shared_expert_intermediate_size", 512),
        shared_gate=True,
    )


def expert(slot: str) -> str | None:
    """The tensor of one expert's slot, stored expert by expert; None: the slot is no expert's."""
    head, found, rest = slot.partition(".ffn.experts.")
    number, part, leaf = rest.split(".") if found else ("", "", "")
    return f"model.{head}.mlp.experts.{number}.{part}_proj.{leaf}" if found else None


def fused_expert(slot: str, spec: ModelSpec) -> View | None:
    """The part of one tensor of all experts that fills an expert's slot; None: the slot is no expert's."""
    head, found, rest = slot.partition(".ffn.experts.")
    if not found:
        return None
    number, part, _ = rest.split(".")
    where, width = f"model.{head}.mlp.experts.", spec.layers[int(head.split(".")[1])].ffn.intermediate_size
    if part == "down":
        return View(f"{where}down_proj", (int(number),))
    first = width if part == "up" else 0
    return View(f"{where}gate_up_proj", (int(number), slice(first, first + width)))
