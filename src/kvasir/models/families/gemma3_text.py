"""Gemma 3, text. Quirks: norms scale by 1 + w and stand before and after mixer and ffn; embeddings are scaled by
sqrt(hidden); most layers slide and have a RoPE of their own; queries are scaled by ``query_pre_attn_scalar``; optional
softcaps."""

from __future__ import annotations

from kvasir.layers.spec import DenseSpec, RopeSpec
from kvasir.models import fields as hf
from kvasir.models.spec import LayerSpec, ModelSpec

ARCHITECTURES = ("Gemma3ForCausalLM",)
EOS_ID = 1
PARTS = {
    **hf.PARTS,
    "mixer_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0


def stored(slot: str, spec: ModelSpec) -> str:
    return hf.stored_name(slot, PARTS)


def build(fields: hf.Fields) -> ModelSpec:
    fields.refuse("use_bidirectional_attention", "bidirectional attention (embedding models) is not served")
    bias, norm = fields.flag("attention_bias", False), hf.norm(fields, offset=1.0)
    ffn = DenseSpec(
        fields.integer("intermediate_size"), hf.activation(fields, "hidden_activation", "gelu_pytorch_tanh")
    )
    scale = fields.number("query_pre_attn_scalar", 256.0) ** -0.5
    layers = []
    for kind in _kinds(fields):
        window = hf.window(fields) if kind == "sliding_attention" else None
        if kind == "sliding_attention" and window is None:
            # transformers fails, too, because it cannot make this layer's mask.
            raise fields.fail(
                "sliding_window", "is null, but layers slide: give the window, or layer_types of full_attention only"
            )
        mixer = hf.attention(
            fields,
            kv_heads=4,
            head_dim=256,
            scale=scale,
            window=window,
            softcap=fields.number("attn_logit_softcapping", None),
            qk_norm=norm,
            qkv_bias=bias,
            o_bias=bias,
        )
        layers.append(LayerSpec(mixer, ffn, _rope(fields, kind, mixer.head_dim), norm, "sandwich"))
    # Gemma's max_position_embeddings is the length after scaling.
    return hf.model(
        fields,
        layers,
        offset=1.0,
        tied=True,
        lengthens=False,
        embed_scale=fields.integer("hidden_size") ** 0.5,
        logit_softcap=fields.number("final_logit_softcapping", None),
    )


def _kinds(fields: hf.Fields) -> tuple[str, ...]:
    """The kinds of layers: every sixth is global unless the config says otherwise. (``_sliding_window_pattern`` comes
    together with ``layer_types``; transformers does not read it.)"""
    every = fields.integer("sliding_window_pattern", 6)
    return hf.layer_types(
        fields,
        [
            "full_attention" if (i + 1) % every == 0 else "sliding_attention"
            for i in range(fields.integer("num_hidden_layers"))
        ],
    )


def _rope(fields: hf.Fields, kind: str, head_dim: int) -> RopeSpec:
    """RoPE of one kind of layer.

    v5 has ``rope_parameters`` by layer type. v4 has ``rope_theta`` and ``rope_scaling`` for global layers, and
    ``rope_local_base_freq`` for the others. If both are given, ``rope_scaling`` overrides, as in transformers.
    """
    theta = (
        fields.number("rope_theta", GLOBAL_THETA)
        if kind == "full_attention"
        else fields.number("rope_local_base_freq", LOCAL_THETA)
    )
    parameters = fields.section("rope_parameters")
    scaling = fields.section("rope_scaling") if kind == "full_attention" else None
    if parameters is not None:
        if not all(isinstance(v, dict) or v is None for v in parameters.raw.values()):
            raise fields.fail(
                "rope_parameters", "is flat, expected one object for full_attention and one for sliding_attention"
            )
        own = parameters.section(kind)
        scaling = hf.Fields({**own.raw, **scaling.raw}, own.where) if own and scaling else own or scaling
    return hf.rope_from(fields, scaling, head_dim, theta)
