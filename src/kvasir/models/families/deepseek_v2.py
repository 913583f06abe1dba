"""DeepSeek V2 and V2 Lite. Quirks: latent attention; experts chosen by softmax, greedily or from the groups with the
best expert, whose weights are not made to sum to one."""

from __future__ import annotations

from kvasir.models import fields as hf
from kvasir.models import latent_fields as latent
from kvasir.models.spec import ModelSpec

ARCHITECTURES = ("DeepseekV2ForCausalLM",)
EOS_ID = 2
stored = latent.stored


def build(fields: hf.Fields) -> ModelSpec:
    fields.refuse("norm_topk_prob", "implementations of V2 differ in what it does, and no published model sets it")
    fields.refuse("scoring_func", "experts of V2 are scored by softmax", (None, "softmax"))
    fields.refuse("mlp_bias", "blocks with biases are not served in this family")
    mixer = latent.attention(fields, latent.parameters_of(fields))
    dense = latent.first_dense(fields, 0)
    moe = None if all(dense) else _experts(fields)
    rope = hf.rope(fields, mixer.rope_dim)
    return hf.model(fields, latent.layers(fields, mixer, rope, dense, moe, 1e-6))


def _experts(fields: hf.Fields):
    method = fields.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.fail("topk_method", f"is '{method}'; served are greedy and group_limited_greedy")
    if method == "greedy":  # groups are not read
        fields = hf.Fields({**fields.raw, "n_group": 1, "topk_group": 1}, fields.where)
    scale = fields.number("routed_scaling_factor", 1.0)
    return latent.experts(
        fields,
        hf.REQUIRED,
        1,
        1,
        64,
        1407,
        shared=2,
        also="num_experts",
        renormalize=False,
        weight_scale=scale,
        group_best=1,
    )
