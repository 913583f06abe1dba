"""Our own hybrids of M2RNN and attention, for research. Quirks: a recurrence through a tanh, whose prompts take one
step a token."""

from __future__ import annotations

from kvasir.layers.recurrent_spec import M2RNNSpec
from kvasir.models import fields as hf
from kvasir.models import hybrid_fields as hybrid
from kvasir.models.spec import ModelSpec
from kvasir.models.stored import View

ARCHITECTURES = ("KvasirM2RNNForCausalLM",)


def stored(slot: str, spec: ModelSpec) -> str | View:
    mixer = next(layer.mixer for layer in spec.layers if layer.mixer.kind == "m2rnn")
    side = mixer.key_heads * mixer.key_dim
    parts = {"q": side, "k": side, "v": mixer.values, "f": mixer.num_heads, "g": mixer.values}
    return hybrid.stored(slot, spec, parts, "in_proj")


def build(fields: hf.Fields) -> ModelSpec:
    heads, key_heads = fields.integer("rnn_num_heads"), fields.integer("rnn_num_key_heads", 1)
    if heads % key_heads:
        raise fields.fail("rnn_num_heads", f"is {heads}, not a multiple of rnn_num_key_heads ({key_heads})")
    mixer = M2RNNSpec(
        heads,
        key_heads,
        fields.integer("rnn_key_dim", 64),
        fields.integer("rnn_value_dim", 16),
        hf.norm(fields),
        fields.integer("rnn_conv_kernel_dim", 4, least=2),
    )
    return hybrid.build(fields, mixer)
