"""Models converted to latent attention by ``kvasir convert mla``. Quirks: the config is the source's, with
``base_model_type``; a rank of null is a layer that stayed as it was.

A converted layer has no norm of its latent. Where the source norms queries and keys, its projections and norms stay and
a writer makes the latent (`LatentWriter`).
"""

from __future__ import annotations

from dataclasses import replace

from kvasir.errors import ConfigError
from kvasir.layers.spec import GQASpec, LatentWriter, MLASpec, RopeSpec
from kvasir.models import fields as hf
from kvasir.models import latent_fields as latent
from kvasir.models.families import find_family
from kvasir.models.spec import LayerSpec, ModelSpec
from kvasir.models.stored import View

ARCHITECTURES = ("KvasirMLAForCausalLM",)
WRITER = {
    "writer.latent.weight": "latent_proj.weight",
    "writer.rope.weight": "rope_proj.weight",
    "writer.q_rope.weight": "q_rope",
    "writer.q_norm.weight": "q_norm.weight",
    "writer.k_norm.weight": "k_norm.weight",
}
# Kinds of RoPE whose frequencies are each a function of the plain one, so that every c-th of them is the list of a
# narrower head.
KINDS = ("default", "linear", "llama3")


def build(fields: hf.Fields) -> ModelSpec:
    base = fields.text("base_model_type")
    source = find_family(base).build(hf.Fields({**fields.raw, "model_type": base}, fields.where))
    ranks = fields.raw.get("kv_lora_rank_per_layer")
    if not isinstance(ranks, list) or len(ranks) != len(source.layers):
        raise fields.fail("kv_lora_rank_per_layer", f"is {ranks!r}, expected a list of {len(source.layers)} ranks")
    rope_dim = fields.integer("qk_rope_head_dim")
    layers = []
    for index, (layer, rank) in enumerate(zip(source.layers, ranks)):
        if rank is not None and (type(rank) is not int or rank < 1):
            raise fields.fail("kv_lora_rank_per_layer", f"has {rank!r}, expected whole numbers and null")
        layers.append(layer if rank is None else converted(layer, rank, rope_dim, index))
    return replace(source, family=fields.text("model_type"), base_family=base, layers=tuple(layers))


def converted(layer: LayerSpec, rank: int, rope_dim: int, index: int = 0) -> LayerSpec:
    """The layer with latent attention of ``rank`` and ``rope_dim`` instead of grouped heads. Raises ConfigError."""
    mixer = layer.mixer
    if (why := why_not(layer)) is not None:
        raise ConfigError(f"layer {index} {why}")
    assert isinstance(mixer, GQASpec)
    writer = None
    if mixer.qk_norm is not None:
        writer = LatentWriter(mixer.num_kv_heads, mixer.head_dim, mixer.qk_norm)
    latent_mixer = MLASpec(
        mixer.num_heads,
        rank,
        rope_dim,
        mixer.head_dim,
        mixer.head_dim,
        mixer.scale,
        biases=(*(("q", "kv_a") if mixer.qkv_bias else ()), *(("o",) if mixer.o_bias else ())),
        writer=writer,
        softcap=mixer.softcap,
    )
    return replace(layer, mixer=latent_mixer, rope=None if layer.rope is None else narrowed(layer.rope, rope_dim))


def why_not(layer: LayerSpec) -> str | None:
    """Say why a layer cannot have latent attention, as the end of a sentence; None: it can."""
    mixer, rope = layer.mixer, layer.rope
    if isinstance(mixer, MLASpec):
        return "has latent attention already"
    if not isinstance(mixer, GQASpec):
        return f"has a mixer of kind '{mixer.kind}'; only grouped heads are converted"
    quirks = {
        "one norm over all heads": mixer.flat_norm,
        "a norm of values": mixer.value_norm is not None,
        "values that are keys": mixer.keys_are_values,
        "a gate": mixer.gated,
        "attention sinks": mixer.sinks,
        "queries scaled by position": mixer.query_scale is not None,
        "norms of heads and biases": mixer.qk_norm is not None and (mixer.qkv_bias or mixer.o_bias),
        "another layer's cache": layer.cache_of is not None,
        "no RoPE": rope is None,
    }
    for quirk, has in quirks.items():
        if has:
            return f"has {quirk}, which latent attention has no place for; --kv-codec int8 halves its cache"
    if rope.head_dim != mixer.head_dim or rope.kind not in KINDS:
        return f"has RoPE of kind '{rope.kind}' over {rope.head_dim} of {mixer.head_dim}; served are {', '.join(KINDS)}"
    return None


def narrowed(rope: RopeSpec, rope_dim: int) -> RopeSpec:
    """Every c-th frequency of ``rope``, for c = head_dim / rope_dim; above head_dim, each frequency several times."""
    if rope_dim <= rope.head_dim:
        return replace(rope, head_dim=rope_dim)
    if rope.kind != "default":
        raise ConfigError(f"rope_dim={rope_dim} is more than a head ({rope.head_dim}), which only plain RoPE allows")
    times = rope_dim // rope.head_dim
    plain = [rope.theta ** (-2 * i / rope_dim) for i in range(rope_dim // 2)]
    wanted = [rope.theta ** (-2 * (i // times) / rope.head_dim) for i in range(rope_dim // 2)]
    factors = tuple(p / w for p, w in zip(plain, wanted))
    return RopeSpec(rope.theta, rope_dim, "longrope", short_factors=factors, long_factors=factors)


def stored(slot: str, spec: ModelSpec) -> str | View:
    head, attends, rest = slot.partition(".mixer.")
    if attends and isinstance(spec.layers[int(head.split(".")[1])].mixer, MLASpec):
        if rest in WRITER:
            return f"model.{head}.self_attn.{WRITER[rest]}"
        if rest.split(".")[0] in ("q", "kv_a", "kv_b") and rest.count(".") > 1:
            return latent.stored(slot, spec)
    return find_family(spec.base_family).stored(slot, spec)


def left_out(spec: ModelSpec) -> tuple[str, ...]:
    """Prefixes that the source's family does not read."""
    family = find_family(spec.base_family)
    found = tuple(getattr(family, "LEFT_OUT", ()))
    return found + (family.left_out(spec) if hasattr(family, "left_out") else ())
