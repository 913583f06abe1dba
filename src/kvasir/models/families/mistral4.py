"""Mistral 4, text. Quirks: latent attention of rank 256; yarn, and queries that are scaled by their position; experts
chosen by softmax, all in one tensor."""

from __future__ import annotations

from kvasir.layers.spec import QueryScale
from kvasir.models import fields as hf
from kvasir.models import latent_fields as latent
from kvasir.models.spec import ModelSpec
from kvasir.models.stored import View

ARCHITECTURES = ("Mistral4ForCausalLM",)
EOS_ID = 2
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
left_out = latent.left_out


def stored(slot: str, spec: ModelSpec) -> str | View:
    head, expert, rest = slot.partition(".ffn.experts.")
    if not expert:
        return latent.stored(slot, spec)
    number, part, _ = rest.split(".")
    if part == "down":
        return View(f"model.{head}.mlp.experts.down_proj", (int(number),))
    width = spec.layers[int(head.split(".")[1])].ffn.intermediate_size
    rows = slice(0, width) if part == "gate" else slice(width, 2 * width)
    return View(f"model.{head}.mlp.experts.gate_up_proj", (int(number), rows))


def build(fields: hf.Fields) -> ModelSpec:
    given = latent.parameters_of(fields) or hf.Fields(ROPE)
    nope, turned = fields.integer("qk_nope_head_dim", 64), fields.integer("qk_rope_head_dim", 64)
    share = given.number("partial_rotary_factor", turned / (nope + turned))
    if int(share * (nope + turned)) != turned:
        raise given.fail("partial_rotary_factor", f"is {share:g}, but {turned} of {nope + turned} elements rotate")
    given = hf.Fields({**given.raw, "partial_rotary_factor": None}, given.where)
    beta, scale = given.number("llama_4_scaling_beta", None, positive=False), None
    if beta:
        scale = QueryScale(beta, given.integer("original_max_position_embeddings"))
    mixer = latent.attention(
        fields,
        given,
        rank=256,
        q_rank=1024,
        nope_dim=64,
        query_scale=scale,
        interleaved=fields.flag("rope_interleave", True),
    )
    dense = latent.first_dense(fields, 0)
    moe = None
    if not all(dense):
        renormalize, weight = fields.flag("norm_topk_prob", True), fields.number("routed_scaling_factor", 1.0)
        moe = latent.experts(fields, 4, 1, 1, 128, 2048, renormalize=renormalize, weight_scale=weight)
    rope = hf.rope_from(fields, given, mixer.rope_dim, fields.number("rope_theta", 10000.0))
    return hf.model(fields, latent.layers(fields, mixer, rope, dense, moe, 1e-6))
