"""Variants of `tests.checkpoints` whose layers keep states."""

from __future__ import annotations

from typing import Any

# Gated DeltaNet: no two of the widths are equal.
DELTA = dict(
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
)
MOE = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24)
# Kimi Linear: latent attention without rotation, of which a part of the key is still shared by all heads.
KIMI = dict(
    kv_lora_rank=24,
    qk_rope_head_dim=8,
    qk_nope_head_dim=12,
    v_head_dim=10,
    num_key_value_heads=4,
    num_local_experts=6,
    num_experts_per_tok=2,
)

# name: (config class, model class, what differs from SHAPE)
HYBRIDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        dict(
            **DELTA,
            **MOE,
            num_hidden_layers=5,
            full_attention_interval=2,
            decoder_sparse_step=2,
            mlp_only_layers=[3],
            shared_expert_intermediate_size=20,
        ),
    ),
    "qwen3_next_plain": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        dict(
            {**DELTA, **MOE},
            linear_num_value_heads=2,
            norm_topk_prob=False,
            attention_bias=True,
            layer_types=["full_attention", "linear_attention", "linear_attention"],
            shared_expert_intermediate_size=20,
        ),
    ),
    "qwen3_5_text": (
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        dict(**DELTA, num_hidden_layers=4, tie_word_embeddings=True),
    ),
    "qwen3_5_text_plain": (
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        dict(
            **DELTA,
            linear_conv_kernel_dim=3,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            attention_bias=True,
            rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        ),
    ),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        dict(**DELTA, **MOE, num_hidden_layers=4, shared_expert_intermediate_size=20),
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        dict(
            KIMI,
            linear_num_heads=3,
            linear_head_dim=8,
            num_hidden_layers=4,
            layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
            moe_intermediate_size=24,
            n_shared_experts=2,
        ),
    ),
    "kimi_linear_plain": (
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        dict(
            KIMI,
            q_lora_rank=20,
            linear_num_heads=2,
            linear_head_dim=12,
            linear_conv_kernel_dim=3,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            mlp_layer_types=["dense", "dense", "sparse"],
            moe_intermediate_size=16,
            n_group=2,
            topk_group=1,
            norm_topk_prob=False,
        ),
    ),
}
