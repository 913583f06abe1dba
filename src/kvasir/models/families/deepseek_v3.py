"""DeepSeek V3 and R1. Quirks: latent attention; experts chosen by sigmoids with a stored correction, from the groups
whose two best ones sum to most."""

from __future__ import annotations

from kvasir.models import fields as hf
from kvasir.models import latent_fields as latent
from kvasir.models.mtp_fields import DEEPSEEK
from kvasir.models.spec import ModelSpec

ARCHITECTURES = ("DeepseekV3ForCausalLM",)
EOS_ID = 1
MTP = DEEPSEEK
stored, left_out = latent.stored, latent.left_out


def build(fields: hf.Fields) -> ModelSpec:
    fields.refuse("scoring_func", "experts of V3 are scored by sigmoids", (None, "sigmoid"))
    fields.refuse("topk_method", "experts of V3 are chosen with a correction", (None, "noaux_tc"))
    interleaved = fields.flag("rope_interleave", True)
    mixer = latent.attention(fields, latent.parameters_of(fields), heads=128, interleaved=interleaved)
    dense = latent.first_dense(fields, 3)
    moe = None
    if not all(dense):
        moe = latent.experts(
            fields,
            8,
            8,
            4,
            256,
            2048,
            renormalize=fields.flag("norm_topk_prob", True),
            scoring="sigmoid",
            weight_scale=fields.number("routed_scaling_factor", 2.5),
            correction=True,
        )
    rope = hf.rope(fields, mixer.rope_dim)
    return hf.model(fields, latent.layers(fields, mixer, rope, dense, moe, 1e-6))
