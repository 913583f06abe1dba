"""Tiny random HF checkpoints of every family, written by transformers, with every quirk turned on somewhere.

``write(folder, "gemma3_text")`` makes one; ``VARIANTS`` are the names. Weights are far larger than an initialiser's, so
that a wrong bias, norm or window shows in the logits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.hybrid_checkpoints import DELTA, HYBRIDS, MOE

VOCAB = 97
SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=56,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=0,
)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1000.0}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.2, 1.5, 2.0],
    "long_factor": [1.5, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 16,
}
MINISTRAL_ROPE = {**YARN, "factor": 16.0, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.7}
GEMMA4 = dict(
    head_dim=8,
    global_head_dim=16,
    sliding_window=8,
    hidden_size_per_layer_input=12,
    vocab_size_per_layer_input=VOCAB,
)
# Latent attention: no two of the widths are equal.
MLA = dict(
    kv_lora_rank=24,
    q_lora_rank=20,
    qk_rope_head_dim=8,
    qk_nope_head_dim=12,
    v_head_dim=10,
    num_key_value_heads=4,
    first_k_dense_replace=1,
    n_routed_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
)
MLA_YARN = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}

# name: (config class, model class, what differs from SHAPE)
VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "llama_llama3": ("LlamaConfig", "LlamaForCausalLM", dict(rope_parameters=LLAMA3, tie_word_embeddings=True)),
    "llama_linear": ("LlamaConfig", "LlamaForCausalLM", dict(rope_parameters=LINEAR, hidden_act="gelu")),
    "llama_yarn": ("LlamaConfig", "LlamaForCausalLM", dict(rope_parameters=YARN)),
    "llama_bias": (
        "LlamaConfig",
        "LlamaForCausalLM",
        dict(attention_bias=True, mlp_bias=True, head_dim=12, num_key_value_heads=1),
    ),
    "mistral": ("MistralConfig", "MistralForCausalLM", dict(sliding_window=9)),
    "mistral_full": ("MistralConfig", "MistralForCausalLM", dict(sliding_window=None, head_dim=16)),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", dict(tie_word_embeddings=True)),
    "qwen2_window": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        dict(use_sliding_window=True, sliding_window=11, max_window_layers=1),
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", dict(head_dim=16)),
    "qwen3_window": (
        "Qwen3Config",
        "Qwen3ForCausalLM",
        dict(head_dim=16, use_sliding_window=True, sliding_window=10, max_window_layers=2, attention_bias=True),
    ),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", dict(head_dim=16, norm_topk_prob=True, **MOE)),
    "qwen3_moe_mixed": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        dict(
            head_dim=12,
            decoder_sparse_step=2,
            num_hidden_layers=4,
            mlp_only_layers=[3],
            use_sliding_window=True,
            sliding_window=13,
            attention_bias=True,
            **MOE,
        ),
    ),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", dict(num_key_value_heads=None)),
    "phi3_partial": (
        "Phi3Config",
        "Phi3ForCausalLM",
        dict(
            hidden_size=64,
            sliding_window=9,
            rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.75},
        ),
    ),
    "phi3_longrope": (
        "Phi3Config",
        "Phi3ForCausalLM",
        dict(original_max_position_embeddings=16, rope_parameters=LONGROPE, hidden_size=64),
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        dict(num_local_experts=5, num_experts_per_tok=2, head_dim=16, sliding_window=9, intermediate_size=24),
    ),
    "gpt_oss_plain": (
        "GptOssConfig",
        "GptOssForCausalLM",
        dict(
            num_local_experts=4,
            num_experts_per_tok=3,
            head_dim=8,
            layer_types=["full_attention", "full_attention", "sliding_attention"],
            sliding_window=6,
            attention_bias=False,
            tie_word_embeddings=True,
            rope_parameters=YARN,
            intermediate_size=32,  # as hidden_size: no shape says which way the experts lie
        ),
    ),
    "ministral3": (
        "Ministral3Config",
        "Ministral3ForCausalLM",
        dict(head_dim=16, rope_parameters=MINISTRAL_ROPE, tie_word_embeddings=True),
    ),
    "ministral3_window": (
        "Ministral3Config",
        "Ministral3ForCausalLM",
        dict(head_dim=8, rope_parameters={**MINISTRAL_ROPE, "llama_4_scaling_beta": 0.0}, sliding_window=9),
    ),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", dict(head_dim=16, sliding_window=8, num_hidden_layers=4)),
    "gemma2_plain": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        dict(
            head_dim=8,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            sliding_window=7,
            query_pre_attn_scalar=20,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            attention_bias=True,
            tie_word_embeddings=False,
        ),
    ),
    "gemma2_caps": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        dict(head_dim=16, sliding_window=8, attn_logit_softcapping=1.5, final_logit_softcapping=4.0),
    ),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    "olmo2_bias": ("Olmo2Config", "Olmo2ForCausalLM", dict(attention_bias=True, num_key_value_heads=None)),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", dict(num_hidden_layers=4)),
    "smollm3_window": (
        "SmolLM3Config",
        "SmolLM3ForCausalLM",
        dict(
            no_rope_layers=[1, 0, 0, 1],
            num_hidden_layers=4,
            use_sliding_window=True,
            sliding_window=9,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=False,
            rope_parameters=YARN,
        ),
    ),
    "smollm3_mixed": (
        "SmolLM3Config",
        "SmolLM3ForCausalLM",
        dict(
            no_rope_layer_interval=2,
            use_sliding_window=True,
            sliding_window=7,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    "granite": (
        "GraniteConfig",
        "GraniteForCausalLM",
        dict(attention_multiplier=0.2, residual_multiplier=0.4, embedding_multiplier=3.0, logits_scaling=2.5),
    ),
    "granite_bias": (
        "GraniteConfig",
        "GraniteForCausalLM",
        dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, attention_multiplier=0.5),
    ),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", dict(num_local_experts=5, num_experts_per_tok=2)),
    "mixtral_window": (
        "MixtralConfig",
        "MixtralForCausalLM",
        dict(num_local_experts=4, num_experts_per_tok=3, head_dim=16, sliding_window=9, intermediate_size=32),
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        dict(
            num_hidden_layers=4,
            first_k_dense_replace=2,
            n_routed_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            use_qk_norm=True,
            attention_bias=True,
            head_dim=16,
            routed_scaling_factor=2.5,
        ),
    ),
    "glm4_moe_groups": (
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        dict(
            first_k_dense_replace=0,
            n_routed_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            n_group=4,
            topk_group=2,
            n_shared_experts=2,
            norm_topk_prob=False,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0},
        ),
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        dict(
            MLA,
            topk_method="group_limited_greedy",
            n_group=3,
            topk_group=2,
            routed_scaling_factor=1.7,
            rope_parameters=MLA_YARN,
        ),
    ),
    "deepseek_v2_lite": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        dict(MLA, q_lora_rank=None, n_shared_experts=1, attention_bias=True, tie_word_embeddings=True),
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        dict(MLA, n_group=3, topk_group=2, rope_parameters=MLA_YARN, attention_bias=True),
    ),
    "deepseek_v3_dense": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        dict(MLA, q_lora_rank=None, first_k_dense_replace=3, rope_interleave=False, n_group=1, topk_group=1),
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        "Glm4MoeLiteForCausalLM",
        dict(MLA, num_hidden_layers=4, mlp_layer_types=["dense", "sparse", "dense", "sparse"]),
    ),
    "glm4_moe_lite_yarn": (
        "Glm4MoeLiteConfig",
        "Glm4MoeLiteForCausalLM",
        dict(MLA, q_lora_rank=None, rope_interleave=False, rope_parameters=MLA_YARN, norm_topk_prob=False),
    ),
    "mistral4": (
        "Mistral4Config",
        "Mistral4ForCausalLM",
        dict(MLA, qk_nope_head_dim=8, rope_parameters={**MINISTRAL_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0}),
    ),
    "mistral4_plain": (
        "Mistral4Config",
        "Mistral4ForCausalLM",
        dict(
            MLA,
            q_lora_rank=None,
            first_k_dense_replace=0,
            n_group=2,
            topk_group=1,
            rope_interleave=False,
            attention_bias=True,
            rope_parameters={**MINISTRAL_ROPE, "llama_4_scaling_beta": 0.0},
        ),
    ),
    "gemma4_text": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        dict(
            GEMMA4,
            num_hidden_layers=6,
            num_kv_shared_layers=3,
            layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
            + ["sliding_attention", "full_attention"],
            attention_k_eq_v=True,
            num_global_key_value_heads=1,
            use_double_wide_mlp=True,
        ),
    ),
    "gemma4_text_moe": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        dict(
            GEMMA4,
            hidden_size_per_layer_input=0,
            enable_moe_block=True,
            num_experts=5,
            top_k_experts=2,
            moe_intermediate_size=32,  # as hidden_size: no shape says which way the experts lie
            num_hidden_layers=4,
            layer_types=["sliding_attention", "full_attention"] * 2,
            tie_word_embeddings=False,
            final_logit_softcapping=4.0,
            attention_bias=True,
        ),
    ),
    "gemma4_text_plain": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        dict(
            GEMMA4,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            num_kv_shared_layers=1,
            rope_parameters={
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.5,
                    "rope_theta": 100.0,
                    "factor": 2.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        ),
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        dict(
            head_dim=16,
            sliding_window=8,
            query_pre_attn_scalar=20,
            num_hidden_layers=4,
            layer_types=["sliding_attention", "full_attention"] * 2,
        ),
    ),
    "gemma3_text_caps": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        dict(
            head_dim=16,
            sliding_window=8,
            query_pre_attn_scalar=20,
            num_hidden_layers=4,
            layer_types=["sliding_attention", "full_attention"] * 2,
            rope_parameters=GEMMA_ROPE,
            attention_bias=True,
            tie_word_embeddings=False,
            final_logit_softcapping=6.0,
        ),
    ),
}

VARIANTS |= HYBRIDS
# Second variants of families that share their code with others: compared with transformers, and not run again through
# the whole engine.
TWINS = (
    "kimi_linear_plain",
    "deepseek_v2_lite",
    "deepseek_v3",
    "glm4_moe_lite_yarn",
    "mistral4_plain",
    "mistral3_latents",
)
VISION = dict(
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=28,
    patch_size=14,
    vision_use_head=False,
)
PIXTRAL = dict(
    model_type="pixtral",
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    head_dim=8,
    image_size=28,
    patch_size=14,
)
GEMMA4_VISION = dict(
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=8,
    patch_size=4,
    position_embedding_size=16,
)
QWEN_VISION = dict(depth=1, num_heads=2, patch_size=4, out_hidden_size=32, num_position_embeddings=16)
QWEN_VISION |= dict(hidden_size=16, intermediate_size=16)
QWEN_TOKENS = dict.fromkeys(
    ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"), VOCAB - 1
)
# Models whose text is one part of several: name: (config class, class of the text's config, model class, what differs
# in the text, the other parts).
MULTIMODAL: dict[str, tuple[str, str, str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "Gemma3Config",
        "Gemma3TextConfig",
        "Gemma3ForConditionalGeneration",
        VARIANTS["gemma3_text"][2],
        dict(vision_config=VISION, mm_tokens_per_image=4, image_token_index=VOCAB - 1),
    ),
    "gemma3_untied": (
        "Gemma3Config",
        "Gemma3TextConfig",
        "Gemma3ForConditionalGeneration",
        {**VARIANTS["gemma3_text_caps"][2], "final_logit_softcapping": None},
        dict(vision_config=VISION, mm_tokens_per_image=4, tie_word_embeddings=False, image_token_index=VOCAB - 1),
    ),
    "mistral3": (
        "Mistral3Config",
        "MistralConfig",
        "Mistral3ForConditionalGeneration",
        dict(sliding_window=None, head_dim=16),
        dict(vision_config=PIXTRAL, tie_word_embeddings=False, image_token_index=VOCAB - 1),
    ),
    "mistral3_ministral": (
        "Mistral3Config",
        "Ministral3Config",
        "Mistral3ForConditionalGeneration",
        dict(VARIANTS["ministral3"][2]),
        dict(vision_config=PIXTRAL, tie_word_embeddings=True, image_token_index=VOCAB - 1),
    ),
    "mistral3_latents": (
        "Mistral3Config",
        "Mistral4Config",
        "Mistral3ForConditionalGeneration",
        dict(VARIANTS["mistral4"][2]),
        dict(vision_config=PIXTRAL, tie_word_embeddings=False, image_token_index=VOCAB - 1),
    ),
    "gemma4": (
        "Gemma4Config",
        "Gemma4TextConfig",
        "Gemma4ForConditionalGeneration",
        dict(VARIANTS["gemma4_text"][2], pad_token_id=0),
        dict(vision_config=GEMMA4_VISION, image_token_id=VOCAB - 1, video_token_id=VOCAB - 1, audio_token_id=VOCAB - 1),
    ),
    "qwen3_5": (
        "Qwen3_5Config",
        "Qwen3_5TextConfig",
        "Qwen3_5ForConditionalGeneration",
        dict(**DELTA, layer_types=["linear_attention", "full_attention", "linear_attention"]),
        dict(vision_config=QWEN_VISION, **QWEN_TOKENS),
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeConfig",
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForConditionalGeneration",
        dict(
            **DELTA,
            **MOE,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            shared_expert_intermediate_size=20,
        ),
        dict(vision_config=QWEN_VISION, **QWEN_TOKENS),
    ),
}
VARIANTS |= {name: (made[0], made[2], made[3]) for name, made in MULTIMODAL.items()}


def write(
    folder: Path,
    variant: str,
    seed: int = 0,
    edit: Callable[[dict[str, Any]], None] | None = None,
    shards: bool = False,
    **changes: Any,
) -> Path:
    """Write a checkpoint of ``variant`` into ``folder``; ``changes`` go to its config, ``edit`` to the config.json
    written."""
    import torch
    import transformers

    config_class, model_class, quirks = VARIANTS[variant]
    if not hasattr(transformers, config_class):
        pytest.skip(f"transformers {transformers.__version__} has no {config_class}")
    own = {**SHAPE, **json.loads(json.dumps(quirks)), **changes}
    if variant in MULTIMODAL:
        _, text_class, _, _, others = MULTIMODAL[variant]
        text = getattr(transformers, text_class)(**own)
        config = getattr(transformers, config_class)(text_config=text.to_dict(), **json.loads(json.dumps(others)))
    else:
        config = getattr(transformers, config_class)(**own)
    with torch.random.fork_rng(devices=[]):  # some vectors are drawn by their own initialiser, and kept
        torch.manual_seed(seed)
        model = getattr(transformers, model_class)(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * (1.5 * parameter.shape[-1] ** -0.5))
        parameters = dict(model.named_parameters())
        for name, buffer in model.state_dict().items():
            if name not in parameters and buffer.is_floating_point():
                buffer.add_(torch.randn(buffer.shape, generator=generator) * 0.3)
    model.save_pretrained(folder, max_shard_size="20KB" if shards else "1GB")
    if edit is not None:
        edit_json(folder / "config.json", edit)
    return folder


def edit_json(file: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    value = json.loads(file.read_text())
    edit(value)
    file.write_text(json.dumps(value))


def reference(folder: Path) -> Any:
    """The transformers model of a checkpoint, fp32, plain attention."""
    import torch
    import transformers

    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    model_class = getattr(transformers, name)
    return model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
