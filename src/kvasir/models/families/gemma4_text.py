"""Gemma 4, text. Quirks: norms stand before and after mixer and ffn; full layers have wider heads than sliding ones,
other key heads and one projection for keys and values; values are normalised; the last layers read an earlier layer's
cache; every layer may have embeddings of its own, experts beside its dense block, and a factor after it."""

from __future__ import annotations

from typing import Any

from kvasir.layers.spec import DenseAndExpertsSpec, DenseSpec, GQASpec, LayerEmbeddingSpec, MoESpec, RopeSpec
from kvasir.models import fields as hf
from kvasir.models.spec import LayerSpec, ModelSpec
from kvasir.models.stored import View

ARCHITECTURES = ("Gemma4ForCausalLM",)
EOS_ID = 1
OUTER = {
    "layer_embeddings.weight": "model.embed_tokens_per_layer.weight",
    "layer_embeddings.projection.weight": "model.per_layer_model_projection.weight",
    "layer_embeddings.norm.weight": "model.per_layer_projection_norm.weight",
}
PARTS = {
    **hf.PARTS,
    "mixer_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
    "ffn.router": "router.proj",
    "ffn.dense_post_norm": "post_feedforward_layernorm_1",
    "ffn.experts_norm": "pre_feedforward_layernorm_2",
    "ffn.experts_post_norm": "post_feedforward_layernorm_2",
    "embedding.gate": "per_layer_input_gate",
    "embedding.projection": "per_layer_projection",
    "embedding.norm": "post_per_layer_input_norm",
}
# Tensors that are no weight of a layer of their own.
OTHERS = {
    ".scale": ".layer_scalar",
    ".ffn.expert_scale": ".router.per_expert_scale",
    ".ffn.router_norm.weight": ".router.scale",
}
ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


def stored(slot: str, spec: ModelSpec) -> str | View:
    if slot in OUTER:
        return OUTER[slot]
    for ending, other in OTHERS.items():
        if slot.endswith(ending):
            return f"model.{slot.removesuffix(ending)}{other}"
    head, expert, rest = slot.partition(".ffn.experts.")
    if not expert:
        return hf.stored_name(slot, PARTS)
    number, part, _ = rest.split(".")
    if part == "down":
        return View(f"model.{head}.experts.down_proj", (int(number),))
    width = spec.layers[int(slot.split(".")[1])].ffn.experts.intermediate_size
    rows = slice(0, width) if part == "gate" else slice(width, 2 * width)
    return View(f"model.{head}.experts.gate_up_proj", (int(number), rows))


def left_out(spec: ModelSpec) -> tuple[str, ...]:
    """Keys and values of layers that read another layer's cache."""
    layers = [i for i, layer in enumerate(spec.layers) if layer.cache_of is not None]
    return tuple(f"model.layers.{i}.self_attn.{name}" for i in layers for name in ("k_proj.", "v_proj.", "k_norm."))


def build(fields: hf.Fields) -> ModelSpec:
    # "vision" changes how images see each other, and these are not served.
    fields.refuse("use_bidirectional_attention", "bidirectional attention is not served", (None, "vision"))
    norm, kinds = hf.norm(fields), _kinds(fields)
    shared, embedding = _shared(fields, kinds), _embedding(fields)
    wide = 2 if fields.flag("use_double_wide_mlp", False) else 1
    layers = []
    for i, (kind, cache_of) in enumerate(zip(kinds, shared)):
        mixer = _mixer(fields, i, kind)
        ffn = _ffn(fields, 1 if cache_of is None else wide)
        rope = _rope(fields, kind, mixer.head_dim)
        layers.append(LayerSpec(mixer, ffn, rope, norm, "sandwich", cache_of, embedding=embedding, scaled=True))
    return hf.model(
        fields,
        layers,
        tied=True,
        lengthens=False,
        embed_scale=fields.integer("hidden_size") ** 0.5,
        logit_softcap=fields.number("final_logit_softcapping", None),
    )


def _kinds(fields: hf.Fields) -> tuple[str, ...]:
    """The kinds of layers: every sixth is global unless the config says otherwise, and always the last one."""
    count = fields.integer("num_hidden_layers")
    every = ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(count)]
    return (*hf.layer_types(fields, every)[:-1], "full_attention")


def _shared(fields: hf.Fields, kinds: tuple[str, ...]) -> list[int | None]:
    """The layer whose cache each layer reads: of the last ``num_kv_shared_layers``, the last one of its kind before
    them."""
    first = len(kinds) - fields.integer("num_kv_shared_layers", 0, least=0)
    own = kinds[: max(first, 0)]
    if not set(kinds) <= set(own):
        raise fields.fail("num_kv_shared_layers", f"is {len(kinds) - first}: some layers have no layer to share with")
    last = {kind: max(i for i, k in enumerate(own) if k == kind) for kind in set(own)}
    return [None if i < first else last[kind] for i, kind in enumerate(kinds)]


def _mixer(fields: hf.Fields, index: int, kind: str) -> GQASpec:
    """Attention of a layer. Full layers have ``global_head_dim``; transformers 5 writes such differences in
    ``per_layer_config``."""
    same = fields.flag("attention_k_eq_v", False) and kind == "full_attention"
    if "per_layer_config" in fields.raw:
        changes = _of_layer(fields, index)
    elif kind == "full_attention":
        changes = {"head_dim": fields.integer("global_head_dim", 512)}
        if same and fields.has("num_global_key_value_heads"):
            changes["num_key_value_heads"] = fields.raw["num_global_key_value_heads"]
    else:
        changes = {}
    window = hf.window(fields, 512) if kind == "sliding_attention" else None
    if kind == "sliding_attention" and window is None:
        raise fields.fail("sliding_window", "is null, but layers slide: give the window")
    bias, norm = fields.flag("attention_bias", False), hf.norm(fields)
    return hf.attention(
        hf.Fields({**fields.raw, **changes}, fields.where),
        kv_heads=4,
        head_dim=256,
        scale=1.0,
        window=window,
        qk_norm=norm,
        value_norm=norm,
        keys_are_values=same,
        qkv_bias=bias,
        o_bias=bias,
    )


def _of_layer(fields: hf.Fields, index: int) -> dict[str, Any]:
    """Fields that ``per_layer_config`` changes for one layer. Its keys are numbers, perhaps with zeros before them."""
    given = fields.section("per_layer_config") or hf.Fields({})
    for key in given.raw:
        if not key.isdecimal():
            raise given.fail(key, "is no number of a layer")
        if int(key) == index:
            own = given.section(key) or hf.Fields({})
            for name in own.raw:
                if name not in ("head_dim", "num_key_value_heads"):
                    raise own.fail(name, "is not served as a field of one layer")
            return dict(own.raw)
    return {}


def _rope(fields: hf.Fields, kind: str, head_dim: int) -> RopeSpec:
    """RoPE of one kind of layer."""
    given = fields.section("rope_parameters") or hf.Fields(ROPE, "rope_parameters.")
    own = given.section(kind)
    if own is None:
        raise given.fail(kind, "is missing")
    return hf.rope_from(fields, own, head_dim, ROPE[kind]["rope_theta"])


def _embedding(fields: hf.Fields) -> LayerEmbeddingSpec | None:
    size = fields.integer("hidden_size_per_layer_input", 256, least=0)
    if not size:
        return None
    vocab = fields.integer("vocab_size")
    if fields.integer("vocab_size_per_layer_input", 262_144) != vocab:
        raise fields.fail("vocab_size_per_layer_input", f"differs from vocab_size ({vocab}), which is not served")
    return LayerEmbeddingSpec(size, _activation(fields), hf.norm(fields))


def _ffn(fields: hf.Fields, wide: int) -> DenseSpec | DenseAndExpertsSpec:
    dense = DenseSpec(fields.integer("intermediate_size") * wide, _activation(fields))
    if not fields.flag("enable_moe_block", False):
        return dense
    count, top_k = fields.integer("num_experts"), fields.integer("top_k_experts")
    if top_k > count:
        raise fields.fail("top_k_experts", f"is {top_k}, more than the {count} experts")
    width = fields.integer("moe_intermediate_size")
    experts = MoESpec(count, top_k, width, renormalize=True, activation=dense.activation, expert_scale=True)
    return DenseAndExpertsSpec(dense, experts, hf.norm(fields))


def _activation(fields: hf.Fields) -> hf.Activation:
    return hf.activation(fields, "hidden_activation", "gelu_pytorch_tanh")
