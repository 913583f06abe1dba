"""GLM 4.7 Flash. Quirks: latent attention; ``mlp_layer_types`` says which layers have experts, chosen by sigmoids with
a stored correction."""

from __future__ import annotations

from kvasir.models import fields as hf
from kvasir.models import latent_fields as latent
from kvasir.models.mtp_fields import DEEPSEEK
from kvasir.models.spec import ModelSpec

ARCHITECTURES = ("Glm4MoeLiteForCausalLM",)
EOS_ID = 1
MTP = DEEPSEEK
stored, left_out = latent.stored, latent.left_out


def build(fields: hf.Fields) -> ModelSpec:
    mixer = latent.attention(
        fields,
        latent.parameters_of(fields),
        heads=20,
        q_rank=768,
        nope_dim=192,
        value_dim=256,
        interleaved=fields.flag("rope_interleave", True),
    )
    count = fields.integer("num_hidden_layers")
    first = fields.integer("first_k_dense_replace", 1, least=0)  # of checkpoints without the list
    kinds = fields.names("mlp_layer_types", ["dense" if i < first else "sparse" for i in range(count)], length=count)
    if other := sorted({*kinds} - {"dense", "sparse"}):
        raise fields.fail("mlp_layer_types", f"has '{other[0]}'; served are dense and sparse")
    dense = [kind == "dense" for kind in kinds]
    moe = None
    if not all(dense):
        moe = latent.experts(
            fields,
            4,
            1,
            1,
            64,
            1536,
            renormalize=fields.flag("norm_topk_prob", True),
            scoring="sigmoid",
            weight_scale=fields.number("routed_scaling_factor", 1.8),
            correction=True,
        )
    rope = hf.rope(fields, mixer.rope_dim)
    return hf.model(fields, latent.layers(fields, mixer, rope, dense, moe, 1e-5), eps=1e-5)
