"""Parts that the configs of published heads have in common: the shape of their decoder layer, the names of its tensors,
and how they count the served model's layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvasir.models.fields import Fields, rope
from kvasir.speculation.drafter import ServedModel
from kvasir.speculation.published.folder import Folder

# Tokens of a chain where a config does not say: the depth of EAGLE's own trees.
DEPTH = 5
# Stored tensors that are no weights, or copies of the served model's.
NOT_OURS = ("verifier_", "rotary_emb.")
PARTS = {
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o_proj": ("self_attn.o_proj",),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "ffn_norm": ("post_attention_layernorm",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
}
# Which stored bias shows that a product has one.
BIASES = {"qkv": "self_attn.q_proj.bias", "o": "self_attn.o_proj.bias", "mlp": "mlp.gate_proj.bias"}


def layer_shape(folder: Folder, fields: Fields, prefix: str) -> dict[str, Any]:
    """Arguments of `PublishedShape` for a head of one Llama or Qwen3 layer. ``prefix``: that of the layer's tensors.
    Raises ConfigError for other heads."""
    count = fields.integer("num_hidden_layers", 1)
    if count != 1:
        raise folder.fail(f"it has {count} layers, and heads of one layer are served")
    sliding = (fields.raw.get("layer_types") or [""])[0] == "sliding_attention"
    return layer_fields(folder, fields, prefix) | dict(
        head_norm=f"{prefix}self_attn.q_norm.weight" in folder.shapes,
        window=fields.integer("sliding_window") if sliding else 0,
    )


def layer_fields(folder: Folder, fields: Fields, prefix: str) -> dict[str, Any]:
    """The shape of a Llama or Qwen3 layer, by field of `PublishedShape`. ``prefix``: that of the tensors of a layer.
    Raises ConfigError for a layer of another kind."""
    if (act := fields.text("hidden_act", "silu")) not in ("silu", "swish"):
        raise folder.fail(f"hidden_act is '{act}', and silu is served")
    dim, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", dim // heads)
    return dict(
        dim=dim,
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        ffn=fields.integer("intermediate_size"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope(fields, head_dim),
        biases=frozenset(name for name, stored in BIASES.items() if prefix + stored in folder.shapes),
    )


def layer_sources(prefix: str) -> dict[str, tuple[str, ...]]:
    """The stored tensors that fill each weight of the layer."""
    return {
        f"{ours}.{leaf}": tuple(f"{prefix}{part}.{leaf}" for part in theirs)
        for ours, theirs in PARTS.items()
        for leaf in ("weight", "bias")
    }


def outputs_of(folder: Folder, counted: Sequence[int], model: ServedModel) -> tuple[int, ...]:
    """Indices of the layers whose outputs are meant, where number n is what layer n reads: 0 is the embedding, n the
    output of layer n - 1. Raises ConfigError for the embedding, and for layers that the model does not have."""
    num_layers = len(model.spec.layers)
    for n in counted:
        if not 0 < n <= num_layers:
            what = "the embedding" if n == 0 else f"layer {n}"
            raise folder.fail(
                f"it reads the hidden states before {what}, and those of the served model are served before layers 1 "
                f"to {num_layers}"
            )
    return tuple(n - 1 for n in counted)


def usual_layers(model: ServedModel) -> tuple[int, int, int]:
    """The hidden states that EAGLE-3 reads where a config does not say: those before layers 2, L/2 and L - 3."""
    num_layers = len(model.spec.layers)
    return 2, num_layers // 2, num_layers - 3


def check_size(folder: Folder, size: int, model: ServedModel) -> int:
    """``size``, the hidden size that a head was trained for. Raises ConfigError where the served model has another."""
    if size != model.spec.hidden_size:
        raise folder.fail(
            f"it is for a model with hidden_size {size}, and the served one has {model.spec.hidden_size}: serve the "
            "model that the head was trained for"
        )
    return size
