"""Kimi Linear. Quirks: most layers are Kimi Delta Attention, which keeps a state with a decay for each channel; the
others have latent attention without RoPE; experts are chosen by sigmoids with a stored correction."""

from __future__ import annotations

from kvasir.layers.recurrent_spec import KDASpec
from kvasir.models import fields as hf
from kvasir.models import latent_fields as latent
from kvasir.models.spec import LayerSpec, ModelSpec
from kvasir.models.stored import View

ARCHITECTURES = ("KimiLinearForCausalLM",)
EOS_ID = 163586
# Names of this family's fields, and those that other families have for them.
ALIASES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
PARTS = {
    **latent.PARTS,
    **{f"mixer.{name}": f"self_attn.{name}_proj" for name in ("f_a", "f_b", "g_a", "g_b", "b")},
    **{f"mixer.{name}_conv": f"self_attn.{name}_conv1d" for name in "qkv"},
    "mixer.norm": "self_attn.o_norm",
    "ffn.router": "block_sparse_moe.gate",
    **{f"ffn.shared.{name}": f"block_sparse_moe.shared_experts.{name}_proj" for name in ("gate", "up", "down")},
}
NUMBERS = {"gate": "w1", "down": "w2", "up": "w3"}
ALONE = {"log_decay": "A_log", "decay_bias": "dt_bias"}


def stored(slot: str, spec: ModelSpec) -> str | View:
    head, expert, rest = slot.partition(".ffn.experts.")
    if expert:
        number, part, leaf = rest.split(".")
        return f"model.{head}.block_sparse_moe.experts.{number}.{NUMBERS[part]}.{leaf}"
    if slot.endswith(".ffn.correction"):
        return f"model.{slot.removesuffix('.ffn.correction')}.block_sparse_moe.gate.e_score_correction_bias"
    head, mixes, rest = slot.partition(".mixer.")
    if mixes and rest in ALONE:
        return f"model.{head}.self_attn.{ALONE[rest]}"
    if mixes and spec.layers[int(head.split(".")[1])].mixer.kind == "kda":
        return hf.stored_name(slot, PARTS)
    return latent.stored(slot, spec, PARTS)


def stored_otherwise(slot: str, spec: ModelSpec) -> View | None:
    """transformers names the dense blocks as it names those with experts."""
    name = stored(slot, spec)
    if not isinstance(name, str) or ".mlp." not in name:
        return None
    return View(name.replace(".mlp.", ".block_sparse_moe."))


def build(fields: hf.Fields) -> ModelSpec:
    given = {alias: fields.raw[name] for name, alias in ALIASES.items() if name in fields.raw}
    fields = hf.Fields({**fields.raw, **given})
    fields.refuse("moe_router_activation_func", "experts are scored by sigmoids", (None, "sigmoid"))
    fields.refuse("mla_use_nope", "attention of Kimi Linear has no RoPE", (None, True))
    attention = latent.attention(fields, None, q_rank=None)
    count = fields.integer("num_hidden_layers")
    own = fields.section("linear_attn_config") or hf.Fields({})
    recurrent = KDASpec(
        own.integer("num_heads", fields.integer("linear_num_heads", 32)),
        own.integer("head_dim", fields.integer("linear_head_dim", 128)),
        hf.norm(fields, eps=1e-5),
        own.integer("short_conv_kernel_size", fields.integer("linear_conv_kernel_dim", 4, least=2), least=2),
    )
    if hf.activation(fields) != "silu":
        raise fields.fail("hidden_act", "is not silu, which the convolution of recurrent layers has")
    first = fields.integer("first_k_dense_replace", 1, least=0)  # of checkpoints without the list
    dense = [
        kind == "dense"
        for kind in _kinds(
            fields, "mlp_layer_types", ["dense" if i < first else "sparse" for i in range(count)], ("dense", "sparse")
        )
    ]
    moe = None
    if not all(dense):
        moe = latent.experts(
            fields, 8, 1, 1, 256, 1024,
            renormalize=fields.flag("norm_topk_prob", True),
            scoring="sigmoid",
            weight_scale=fields.number("routed_scaling_factor", 2.446),
            correction=True,
        )  # fmt: skip
    plain, norm = hf.dense(fields) if any(dense) else None, hf.norm(fields, eps=1e-5)
    layers = [
        LayerSpec(attention if kind == "full_attention" else recurrent, plain if is_dense else moe, None, norm)
        for kind, is_dense in zip(_layer_types(fields, own, count), dense)
    ]
    return hf.model(fields, layers, eps=1e-5)


def _layer_types(fields: hf.Fields, own: hf.Fields, count: int) -> tuple[str, ...]:
    """The kind of every layer. Published configs number the layers of each kind from 1."""
    usual = ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(count)]
    full, recurrent = own.numbers("full_attn_layers", ()), own.numbers("kda_layers", ())
    if full or recurrent:
        if sorted((*full, *recurrent)) != list(range(1, count + 1)):
            raise own.fail("full_attn_layers", f"and kda_layers do not hold every layer from 1 to {count} once")
        usual = ["full_attention" if i + 1 in full else "linear_attention" for i in range(count)]
    return _kinds(fields, "layer_types", usual, ("full_attention", "linear_attention"))


def _kinds(fields: hf.Fields, name: str, usual: list[str], served: tuple[str, str]) -> tuple[str, ...]:
    kinds = fields.names(name, usual, length=len(usual))
    if other := sorted({*kinds} - {*served}):
        raise fields.fail(name, f"has '{other[0]}'; served are {' and '.join(served)}")
    return kinds
