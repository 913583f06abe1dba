"""gpt-oss, from MXFP4 as published or from 16-bit weights. Quirks: every second layer slides; a learned sink for every
head; all projections have biases; experts lie in one tensor, in 16 bits transposed, with gate and up interleaved; a
clamped activation."""

from __future__ import annotations

from kvasir.layers.spec import MoESpec
from kvasir.models import fields as hf
from kvasir.models.spec import LayerSpec, ModelSpec
from kvasir.models.stored import View

ARCHITECTURES = ("GptOssForCausalLM",)
PARTS = {**hf.PARTS, "mixer": "self_attn", "ffn.router": "mlp.router"}
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def stored(slot: str, spec: ModelSpec) -> str | View:
    head, expert, rest = slot.partition(".ffn.experts.")
    if not expert:
        return hf.stored_name(slot, PARTS)
    number, part, leaf = rest.split(".")
    name = f"model.{head}.mlp.experts.{'down' if part == 'down' else 'gate_up'}_proj{'_bias' if leaf == 'bias' else ''}"
    columns = [] if part == "down" else [slice(int(part == "up"), None, 2)]
    rows = [] if leaf == "bias" or not columns else [slice(None)]
    return View(name, (int(number), *rows, *columns), transposed=leaf == "weight")


def build(fields: hf.Fields) -> ModelSpec:
    fields.refuse("swiglu_alpha", "the kernels have 1.702", (None, 1.702))
    fields.refuse("swiglu_limit", "the kernels have 7", (None, 7))
    num_experts = fields.integer("num_local_experts", fields.integer("num_experts", 128))
    top_k = fields.integer("num_experts_per_tok", 4)
    if top_k > num_experts:
        raise fields.fail("num_experts_per_tok", f"is {top_k}, more than the {num_experts} experts")
    ffn = MoESpec(
        num_experts,
        top_k,
        fields.integer("intermediate_size"),
        renormalize=True,
        activation="clamped_swiglu",
        router_bias=True,
        bias=True,
    )
    bias, norm, layers = fields.flag("attention_bias", True), hf.norm(fields, eps=1e-5), []
    for kind in _kinds(fields):
        window = hf.window(fields, 128) if kind == "sliding_attention" else None
        mixer = hf.attention(fields, kv_heads=8, head_dim=64, window=window, sinks=True, qkv_bias=bias, o_bias=bias)
        layers.append(LayerSpec(mixer, ffn, _rope(fields, mixer.head_dim), norm))
    return hf.model(fields, layers, eps=1e-5)


def _kinds(fields: hf.Fields) -> tuple[str, ...]:
    count = fields.integer("num_hidden_layers")
    return hf.layer_types(fields, ["full_attention" if i % 2 else "sliding_attention" for i in range(count)])


def _rope(fields: hf.Fields, head_dim: int) -> hf.RopeSpec:
    given = fields.section("rope_scaling") or fields.section("rope_parameters") or hf.Fields(YARN)
    theta, original = fields.number("rope_theta", 150_000.0), fields.integer("original_max_position_embeddings", None)
    return hf.rope_from(fields, given, head_dim, theta, original)
