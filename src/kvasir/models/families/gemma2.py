"""Gemma 2. Quirks: those of Gemma 3 (norms of 1 + w before and after mixer and ffn, scaled embeddings and queries), but
every second layer slides, all share one RoPE, there is no QK norm, and scores and logits are capped."""

from __future__ import annotations

from kvasir.layers.spec import DenseSpec
from kvasir.models import fields as hf
from kvasir.models.families import gemma3_text
from kvasir.models.spec import LayerSpec, ModelSpec

ARCHITECTURES = ("Gemma2ForCausalLM",)
EOS_ID = 1
stored = gemma3_text.stored


def build(fields: hf.Fields) -> ModelSpec:
    fields.refuse("use_bidirectional_attention", "bidirectional attention (embedding models) is not served")
    bias, norm = fields.flag("attention_bias", False), hf.norm(fields, offset=1.0)
    ffn = DenseSpec(
        fields.integer("intermediate_size"), hf.activation(fields, "hidden_activation", "gelu_pytorch_tanh")
    )
    scale = fields.number("query_pre_attn_scalar", 256.0) ** -0.5
    count, layers = fields.integer("num_hidden_layers"), []
    for kind in hf.layer_types(fields, ["full_attention" if i % 2 else "sliding_attention" for i in range(count)]):
        window = hf.window(fields) if kind == "sliding_attention" else None
        if kind == "sliding_attention" and window is None:
            raise fields.fail(
                "sliding_window", "is null, but layers slide: give the window, or layer_types of full_attention only"
            )
        mixer = hf.attention(
            fields,
            kv_heads=4,
            head_dim=256,
            scale=scale,
            window=window,
            softcap=_cap(fields, "attn_logit_softcapping", 50.0),
            qkv_bias=bias,
            o_bias=bias,
        )
        layers.append(LayerSpec(mixer, ffn, hf.rope(fields, mixer.head_dim), norm, "sandwich"))
    return hf.model(
        fields,
        layers,
        offset=1.0,
        tied=True,
        embed_scale=fields.integer("hidden_size") ** 0.5,
        logit_softcap=_cap(fields, "final_logit_softcapping", 30.0),
    )


def _cap(fields: hf.Fields, name: str, default: float) -> float | None:
    """A cap; null means none."""
    return fields.number(name, default) if fields.raw.get(name, default) is not None else None
