"""Reading of HF configs: checked fields, and the parts that most families share.

Both forms of RoPE are read: v4 (``rope_theta`` and ``rope_scaling``) and v5 (``rope_parameters``, flat or by layer
type).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvasir.errors import ConfigError
from kvasir.layers.spec import Activation, DenseSpec, GQASpec, NormSpec, RopeSpec
from kvasir.models.spec import LayerSpec, ModelSpec

# Default that makes a field required.
REQUIRED: Any = object()
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
# Whole numbers in a config must be smaller.
LARGEST = 1 << 31
# Counts that loops run over must be at most this: published models have up to 128 layers and 512 experts.
MOST = {
    "num_hidden_layers": 1 << 12,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_attention_heads"), 1 << 16),
}
# Our slots, and the usual HF names of the tensors that fill them.
OUTER = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
# Prefixes of the text model's tensors in multimodal checkpoints, of transformers 4 and 5.
TEXT_RENAMED = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
PARTS = {
    "mixer_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "mixer.q": "self_attn.q_proj",
    "mixer.k": "self_attn.k_proj",
    "mixer.v": "self_attn.v_proj",
    "mixer.o": "self_attn.o_proj",
    "mixer.q_norm": "self_attn.q_norm",
    "mixer.k_norm": "self_attn.k_norm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}


class Fields:
    """The fields of a config, checked when they are read.
    A missing or mistyped one raises ConfigError with its name."""

    def __init__(self, raw: Mapping[str, Any], where: str = "") -> None:
        self.raw = raw
        self.where = where

    def has(self, name: str) -> bool:
        """Whether the config gives the field a value."""
        return self.raw.get(name) is not None

    def fail(self, name: str, problem: str) -> ConfigError:
        """The error that names the field and its problem."""
        return ConfigError(f"config.json: {self.where}{name} {problem}")

    def _get(self, name: str, default: Any) -> Any:
        value = self.raw.get(name)
        if value is None:
            if default is REQUIRED:
                raise self.fail(name, "is missing")
            return default
        return value

    def integer(self, name: str, default: Any = REQUIRED, least: int = 1) -> Any:
        """A whole number of at least ``least``."""
        value = self._get(name, default)
        if value is not default and (
            not isinstance(value, int) or isinstance(value, bool) or not least <= value < LARGEST
        ):
            raise self.fail(name, f"is {value!r}, expected a whole number of at least {least}")
        if name in MOST and value is not default and value > MOST[name]:
            raise self.fail(name, f"is {value}, more than {MOST[name]}, the most that is served")
        return value

    def number(self, name: str, default: Any = REQUIRED, positive: bool = True) -> Any:
        """A finite number as float."""
        value = self._get(name, default)
        if value is default:
            return value
        if (
            not isinstance(value, (int, float))
            or isinstance(value, bool)
            or not abs(value) <= sys.float_info.max
            or (positive and value <= 0)
        ):
            raise self.fail(name, f"is {value!r}, expected a {'positive ' if positive else ''}number")
        return float(value)

    def flag(self, name: str, default: Any = REQUIRED) -> bool:
        """A boolean."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.fail(name, f"is {value!r}, expected true or false")
        return value

    def text(self, name: str, default: Any = REQUIRED) -> str:
        """A string."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.fail(name, f"is {value!r}, expected a string")
        return value

    def names(self, name: str, default: Any = REQUIRED, length: int | None = None) -> tuple[str, ...]:
        """A list of strings, of the given length if there is one."""
        return self._list(name, default, str, length)

    def numbers(self, name: str, default: Any = REQUIRED) -> tuple[Any, ...]:
        """A list of whole numbers."""
        return self._list(name, default, int, None)

    def _list(self, name: str, default: Any, kind: type, length: int | None) -> tuple[Any, ...]:
        value = self._get(name, default)
        if not isinstance(value, (list, tuple)) or not all(
            isinstance(v, kind) and not isinstance(v, bool) for v in value
        ):
            raise self.fail(name, f"is {value!r}, expected a list of {'strings' if kind is str else 'whole numbers'}")
        if length is not None and len(value) != length:
            raise self.fail(name, f"has {len(value)} entries, expected {length} (one per layer)")
        return tuple(value)

    def section(self, name: str) -> Fields | None:
        """A dict-valued field, or None when it is absent or empty."""
        value = self.raw.get(name)
        if not value:
            return None
        if not isinstance(value, dict):
            raise self.fail(name, f"is {value!r}, expected an object")
        return Fields(value, f"{self.where}{name}.")

    def refuse(self, name: str, why: str, unless: tuple[Any, ...] = (None, False)) -> None:
        """Refuse a field whose value would change the maths in a way that is not served."""
        value = self.raw.get(name)
        if not any(value is u or value == u for u in unless):
            raise self.fail(name, f"is {value!r}: {why}")


# ------------------------------------------------------------------------------------------------------------- parts


def norm(fields: Fields, offset: float = 0.0, eps: float = 1e-6) -> NormSpec:
    """The RMS norm of a config; ``offset`` is added to its weights, ``eps`` is the family's default."""
    return NormSpec(fields.number("rms_norm_eps", eps), offset)


def activation(fields: Fields, name: str = "hidden_act", default: str = "silu") -> Activation:
    """The activation that the field ``name`` gives."""
    value = fields.text(name, default)
    if value not in ACTIVATIONS:
        raise fields.fail(name, f"is '{value}'; served are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[value]


def dense(fields: Fields, bias: bool = False) -> DenseSpec:
    """The dense ffn of a config."""
    return DenseSpec(fields.integer("intermediate_size"), activation(fields), bias)


def attention(
    fields: Fields,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    scale: float | None = None,
    window: int | None = None,
    **quirks: Any,
) -> GQASpec:
    """The attention of a config.

    ``head_dim``: the family's default if the config has none (None: hidden_size / heads). ``kv_heads``: the family's
    default if the config does not have the field; None, and null in the config, mean as many as heads.
    """
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = fields.integer(
        "num_key_value_heads", heads if "num_key_value_heads" in fields.raw else kv_heads or heads
    )
    if heads % kv_heads:
        raise fields.fail("num_attention_heads", f"is {heads}, not a multiple of num_key_value_heads ({kv_heads})")
    dim = fields.integer("head_dim", head_dim)
    if dim is None:
        if hidden % heads:
            raise fields.fail(
                "hidden_size", f"is {hidden}, not a multiple of num_attention_heads ({heads}), and head_dim is missing"
            )
        dim = hidden // heads
    if dim % 2:
        raise fields.fail("head_dim", f"is {dim}, expected an even number (RoPE pairs dimensions)")
    return GQASpec(heads, kv_heads, dim, dim**-0.5 if scale is None else scale, window, **quirks)


def window(fields: Fields, default: int = 4096) -> int | None:
    """Window of the sliding layers: ``default`` if the field is absent, as in transformers; None if it is null."""
    return fields.integer("sliding_window", default) if fields.raw.get("sliding_window", default) is not None else None


def layer_types(fields: Fields, default: list[str]) -> tuple[str, ...]:
    """The kind of every layer: ``full_attention`` or ``sliding_attention``."""
    kinds = fields.names("layer_types", default, length=len(default))
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise fields.fail("layer_types", f"has '{kind}'; served are full_attention and sliding_attention")
    return kinds


def qwen_layer_types(fields: Fields) -> tuple[str, ...]:
    """The kinds of layers in Qwen 2 and 3: with ``use_sliding_window``, layers from ``max_window_layers`` on slide."""
    slides = fields.flag("use_sliding_window", False) and window(fields) is not None
    first = fields.integer("max_window_layers", 28, least=0) if slides else fields.integer("num_hidden_layers")
    kinds = layer_types(
        fields,
        ["sliding_attention" if i >= first else "full_attention" for i in range(fields.integer("num_hidden_layers"))],
    )
    if not slides and "sliding_attention" in kinds:
        raise fields.fail(
            "layer_types", "has sliding_attention, but use_sliding_window is not set or sliding_window is null"
        )
    return kinds


def model(
    fields: Fields,
    layers: list[LayerSpec],
    *,
    offset: float = 0.0,
    eps: float = 1e-6,
    tied: bool = False,
    lengthens: bool = True,
    **quirks: Any,
) -> ModelSpec:
    """The model of a config with these layers.

    ``tied``: the family's default if the config does not say. ``lengthens``: RoPE scaling extends the context beyond
    max_position_embeddings.
    """
    fields.refuse("is_encoder_decoder", "encoder-decoder models are not served")
    fields.refuse("is_causal", "bidirectional attention (embedding models) is not served", (None, True))
    rope = next((layer.rope for layer in layers if layer.rope is not None), None)
    longest = fields.integer("max_position_embeddings")
    if lengthens and rope is not None:
        longest = max_position(fields, rope)
    # A window of the whole context never hides a position.
    layers = [
        replace(layer, mixer=replace(layer.mixer, window=None)) if (layer.mixer.window or 0) >= longest else layer
        for layer in layers
    ]
    return ModelSpec(
        family=fields.text("model_type"),
        hidden_size=fields.integer("hidden_size"),
        vocab_size=fields.integer("vocab_size"),
        max_position=longest,
        layers=tuple(layers),
        final_norm=norm(fields, offset, eps),
        tied=fields.flag("tie_word_embeddings", tied),
        **quirks,
    )


def max_position(fields: Fields, rope: RopeSpec) -> int:
    """The context length with RoPE scaling, as vLLM derives it, because model cards say to add the scaling and leave
    ``max_position_embeddings`` unchanged.

    Linear scaling multiplies the field; yarn multiplies the original length; for llama3 the field holds the scaled
    length already.
    """
    given = fields.integer("max_position_embeddings")
    if rope.kind not in ("linear", "yarn"):
        return given
    longest = rope.factor * (rope.original_max_position if rope.kind == "yarn" else given)
    if not 1 <= longest < LARGEST:
        raise fields.fail(
            "max_position_embeddings",
            f"scaled by RoPE's factor of {rope.factor:g} makes a context of {longest:g} tokens",
        )
    return int(longest)


def stored(slot: str, spec: ModelSpec) -> str:
    """The tensor of a slot in a Llama-like model."""
    return stored_name(slot)


def stored_name(slot: str, parts: Mapping[str, str] = PARTS) -> str:
    """The HF name of a slot (``layers.3.mixer.q.weight``) in a Llama-like model; ``parts``: the family's own names."""
    if slot in OUTER:
        return OUTER[slot]
    _, index, rest = slot.split(".", 2)
    part, _, leaf = rest.rpartition(".")
    return f"model.layers.{index}.{parts[part]}.{leaf}"


# -------------------------------------------------------------------------------------------------------------- RoPE


def rope(fields: Fields, head_dim: int, partial: float | None = None) -> RopeSpec:
    """RoPE of a model whose layers all share it. ``partial``: as for `rope_from`.

    As in transformers, ``rope_scaling`` wins over ``rope_parameters``, and an ``original_max_position_embeddings`` of
    the config itself wins over both (it is not read where RoPE is given by layer type).
    """
    return rope_from(
        fields,
        fields.section("rope_scaling") or fields.section("rope_parameters"),
        head_dim,
        fields.number("rope_theta", 10000.0),
        fields.integer("original_max_position_embeddings", None),
        partial,
    )


def rope_from(
    fields: Fields,
    parameters: Fields | None,
    head_dim: int,
    theta: float,
    original: int | None = None,
    partial: float | None = None,
) -> RopeSpec:
    """RoPE from an object of the config.

    ``parameters``: the object with ``rope_type`` and its options. ``theta``: used if it has no ``rope_theta``.
    ``original``: used instead of its ``original_max_position_embeddings``. ``partial``: the family's default of the
    share of a head that rotates (``partial_rotary_factor``); None: heads of this family rotate whole.
    """
    p = Fields({}) if parameters is None else parameters
    proportional = p.text("rope_type", "default") == "proportional"
    if partial is None and not proportional:
        for part in (fields, p):
            part.refuse("partial_rotary_factor", "a partly rotated head is not served in this family", (None, 1))
    share = p.number("partial_rotary_factor", fields.number("partial_rotary_factor", partial or 1.0))
    if share > 1:
        raise p.fail("partial_rotary_factor", f"is {share}, expected at most 1")
    if proportional:
        return RopeSpec(
            p.number("rope_theta", theta),
            head_dim,
            "proportional",
            factor=p.number("factor", 1.0),
            num_pairs=int(share * head_dim // 2),
        )
    head_dim = int(head_dim * share)
    if head_dim % 2 or not head_dim:
        raise p.fail("partial_rotary_factor", f"is {share}: {head_dim} dimensions of a head cannot be paired")
    if parameters is None:
        return RopeSpec(theta, head_dim)
    if any(isinstance(v, dict) for v in p.raw.values()):
        raise ConfigError(
            f"config.json: {p.where.removesuffix('.')} is given by layer type, which this model_type does not have"
        )
    theta = p.number("rope_theta", theta)
    kind = p.text("rope_type", p.text("type", "default"))
    if kind == "default":
        return RopeSpec(theta, head_dim)
    if kind == "linear":
        return RopeSpec(theta, head_dim, "linear", factor=p.number("factor"))
    original = (
        original or p.integer("original_max_position_embeddings", None) or fields.integer("max_position_embeddings")
    )
    if kind == "llama3":
        low, high = p.number("low_freq_factor"), p.number("high_freq_factor")
        if high <= low:
            raise p.fail("high_freq_factor", f"is {high}, expected more than low_freq_factor ({low})")
        return RopeSpec(theta, head_dim, "llama3", p.number("factor"), original, low, high)
    if kind == "longrope":
        short, long = (_factors(p, name, head_dim // 2) for name in ("short_factor", "long_factor"))
        given = p.number("attention_factor", None)
        stretch = p.number("factor", None) or fields.integer("max_position_embeddings") / original
        if given is None:  # as LongRoPE suggests
            given = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
        return RopeSpec(
            theta,
            head_dim,
            "longrope",
            original_max_position=original,
            attention_factor=given,
            short_factors=short,
            long_factors=long,
        )
    if kind == "yarn":
        if theta == 1:
            raise p.fail("rope_theta", "is 1: all dimensions rotate alike, but yarn scales them by their rotation")
        factor = p.number("factor", None) or fields.integer("max_position_embeddings") / original
        return RopeSpec(
            theta,
            head_dim,
            "yarn",
            factor,
            original,
            beta_fast=p.number("beta_fast", 32.0),
            beta_slow=p.number("beta_slow", 1.0),
            truncate=p.flag("truncate", True),
            attention_factor=_yarn_attention(p, factor),
        )
    served = "default, linear, llama3, yarn, longrope and proportional"
    raise p.fail("rope_type", f"is '{kind}'; served are {served}")


def _factors(p: Fields, name: str, count: int) -> tuple[float, ...]:
    """One positive number for each pair of dimensions."""
    found = p.raw.get(name)
    if not isinstance(found, list) or not all(type(f) in (int, float) and f > 0 for f in found) or len(found) != count:
        raise p.fail(name, f"is not a list of {count} positive numbers (one for each pair of rotated dimensions)")
    return tuple(map(float, found))


def _yarn_attention(p: Fields, factor: float) -> float:
    """Factor for cos and sin (YaRN, section 3.4; ``mscale`` and ``mscale_all_dim`` as in DeepSeek)."""
    given = p.number("attention_factor", None)
    if given is not None:
        return given

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    one, all_dim = p.number("mscale", None, positive=False), p.number("mscale_all_dim", None, positive=False)
    return mscale(one) / mscale(all_dim) if one and all_dim else mscale(1.0)
