"""Known model shapes for random weights, and batch workloads."""

from __future__ import annotations

import contextlib
import json
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir.errors import ConfigError, nearest

# The hybrids of Qwen 3.5 share these fields: every fourth layer attends, the others are Gated DeltaNet.
QWEN_HYBRID: dict[str, Any] = dict(
    full_attention_interval=4,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
    vocab_size=248320,
    max_position_embeddings=262144,
    rms_norm_eps=1e-6,
    rope_parameters=dict(rope_type="default", rope_theta=10000000.0, partial_rotary_factor=0.25),
    tie_word_embeddings=False,
    hidden_act="silu",
    attention_bias=False,
    mamba_ssm_dtype="float32",  # states of other engines, as published
    torch_dtype="bfloat16",
    bos_token_id=1,
    eos_token_id=2,
)
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        tie_word_embeddings=False,
        hidden_act="silu",
        torch_dtype="bfloat16",
        bos_token_id=1,
        eos_token_id=2,
    ),
    # Llama 8B with DeepSeek's latent attention in place of its eight KV heads: 1,152 bytes a token and layer.
    "llama-8b-mla": dict(
        architectures=["DeepseekV3ForCausalLM"],
        model_type="deepseek_v3",
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        first_k_dense_replace=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        vocab_size=128256,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        tie_word_embeddings=False,
        hidden_act="silu",
        torch_dtype="bfloat16",
        bos_token_id=1,
        eos_token_id=2,
    ),
    # DeepSeek V2 Lite with dense blocks only, so that attention is compared and no experts are.
    "deepseek-dense": dict(
        architectures=["DeepseekV2ForCausalLM"],
        model_type="deepseek_v2",
        hidden_size=2048,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        num_hidden_layers=27,
        first_k_dense_replace=27,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        num_attention_heads=16,
        num_key_value_heads=16,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        vocab_size=102400,
        max_position_embeddings=131072,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        hidden_act="silu",
        torch_dtype="bfloat16",
        bos_token_id=100000,
        eos_token_id=100001,
    ),
    "glm-4.7-flash": dict(
        architectures=["Glm4MoeLiteForCausalLM"],
        model_type="glm4_moe_lite",
        hidden_size=2048,
        intermediate_size=10240,
        moe_intermediate_size=1536,
        num_hidden_layers=47,
        first_k_dense_replace=1,
        n_routed_experts=64,
        n_shared_experts=1,
        num_experts_per_tok=4,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.8,
        num_attention_heads=20,
        num_key_value_heads=20,
        kv_lora_rank=512,
        q_lora_rank=768,
        qk_rope_head_dim=64,
        qk_nope_head_dim=192,
        v_head_dim=256,
        vocab_size=154880,
        max_position_embeddings=202752,
        rms_norm_eps=1e-5,
        rope_theta=1000000.0,
        tie_word_embeddings=False,
        hidden_act="silu",
        torch_dtype="bfloat16",
        bos_token_id=0,
        eos_token_id=1,
    ),
    "qwen3-0.6b": dict(
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        tie_word_embeddings=True,
        hidden_act="silu",
        torch_dtype="bfloat16",
        bos_token_id=1,
        eos_token_id=2,
        attention_bias=False,
    ),
    "qwen3-30b-a3b": dict(
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=151936,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        tie_word_embeddings=False,
        hidden_act="silu",
        torch_dtype="bfloat16",
        bos_token_id=1,
        eos_token_id=2,
        attention_bias=False,
    ),
    # Qwen 3.5 of 9B: 24 of 32 layers keep a state. It has the parts that are published, because vLLM 0.25.1 knows no
    # class of the text alone; the tower for images is built by nobody.
    "qwen3.5-9b": dict(
        architectures=["Qwen3_5ForConditionalGeneration"],
        model_type="qwen3_5",
        text_config=dict(
            model_type="qwen3_5_text",
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=32,
            num_attention_heads=16,
            num_key_value_heads=4,
            head_dim=256,
            **QWEN_HYBRID,
        ),
        vision_config=dict(model_type="qwen3_5", depth=27, hidden_size=1152, num_heads=16, out_hidden_size=4096),
        image_token_id=248056,
        video_token_id=248057,
        vision_start_token_id=248053,
        vision_end_token_id=248054,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        vocab_size=248320,
    ),
    "qwen3.5-35b-a3b": dict(
        architectures=["Qwen3_5MoeForCausalLM"],
        model_type="qwen3_5_moe_text",
        hidden_size=2048,
        num_hidden_layers=40,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=256,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        **QWEN_HYBRID,
    ),
    "gemma-3-27b": dict(
        architectures=["Gemma3ForCausalLM"],
        model_type="gemma3_text",
        hidden_size=5376,
        intermediate_size=21504,
        num_hidden_layers=62,
        num_attention_heads=32,
        num_key_value_heads=16,
        head_dim=128,
        vocab_size=262208,
        max_position_embeddings=131072,
        rms_norm_eps=1e-6,
        query_pre_attn_scalar=168,
        sliding_window=1024,
        layer_types=["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(62)],
        rope_theta=1000000.0,
        rope_local_base_freq=10000.0,
        rope_scaling=dict(rope_type="linear", factor=8.0),
        tie_word_embeddings=True,
        hidden_activation="gelu_pytorch_tanh",
        torch_dtype="bfloat16",
        bos_token_id=2,
        eos_token_id=1,
    ),
    "gpt-oss-20b": dict(
        architectures=["GptOssForCausalLM"],
        model_type="gpt_oss",
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=24,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=201088,
        num_local_experts=32,
        num_experts_per_tok=4,
        max_position_embeddings=131072,
        sliding_window=128,
        rope_theta=150000.0,
        rope_scaling=dict(
            rope_type="yarn",
            factor=32.0,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
            original_max_position_embeddings=4096,
        ),
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        attention_bias=True,
        torch_dtype="bfloat16",
        bos_token_id=199998,
        eos_token_id=200002,
    ),
}

# As Qwen and DeepSeek publish theirs.
SHAPES["llama-8b-f8"] = SHAPES["llama-8b"] | dict(
    quantization_config=dict(
        quant_method="fp8",
        fmt="e4m3",
        activation_scheme="dynamic",
        weight_block_size=[128, 128],
        modules_to_not_convert=["lm_head"],
    )
)
# W4A16 in groups of 128, as llm-compressor and `kvasir convert quantise:format=u4` write it.
SHAPES["llama-8b-w4"] = SHAPES["llama-8b"] | dict(
    quantization_config=dict(
        quant_method="compressed-tensors",
        format="pack-quantized",
        quantization_status="compressed",
        config_groups=dict(
            group_0=dict(
                targets=["Linear"],
                weights=dict(num_bits=4, type="int", symmetric=True, strategy="group", group_size=128, dynamic=False),
                input_activations=None,
                output_activations=None,
            )
        ),
        ignore=["lm_head"],
    )
)
# As published: experts of four bits, everything else in bf16.
SHAPES["gpt-oss-20b-mxfp4"] = SHAPES["gpt-oss-20b"] | dict(quantization_config=dict(quant_method="mxfp4"))


@contextlib.contextmanager
def shape_folder(name: str, *, tokenizer: bool = False) -> Iterator[str]:
    """Yield a folder with nothing but the shape's config.json, for ``load_format='dummy'``. Raises ConfigError.

    With ``tokenizer``, which servers need, it also has a tokenizer with a word for every id, so that every streamed
    token has text.
    """
    if name not in SHAPES:
        raise ConfigError(f"no shape named '{name}'; there are {', '.join(SHAPES)}.{nearest(name, SHAPES)}")
    with tempfile.TemporaryDirectory(prefix=f"kvasir-{name}-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[name]))
        if tokenizer:
            words = {
                "model": {
                    "type": "WordLevel",
                    "vocab": {f"t{i}": i for i in range(SHAPES[name]["vocab_size"])},
                    "unk_token": "t0",
                },
                "pre_tokenizer": {"type": "WhitespaceSplit"},
                "added_tokens": [],
                "version": "1.0",
            }
            (Path(folder) / "tokenizer.json").write_text(json.dumps(words))
            (Path(folder) / "tokenizer_config.json").write_text(
                json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0"})
            )
        yield folder


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of ``batch`` prompts of ``prompt`` random tokens each, with ``output`` output tokens each."""

    name: str
    batch: int
    prompt: int
    output: int

    @classmethod
    def parse(cls, text: str) -> Batch:
        try:
            name, *numbers = text.split(":")
            batch, prompt, output = map(int, numbers)
        except ValueError as e:
            raise ConfigError(
                f"workload {text!r}: expected NAME:BATCH:PROMPT_TOKENS:OUTPUT_TOKENS, e.g. decode8:8:1024:128"
            ) from e
        if min(batch, prompt) < 1 or output < 2:
            raise ConfigError(f"workload {text!r}: needs at least one prompt of one token, and two output tokens")
        return cls(name, batch, prompt, output)

    def beginnings(self, vocab_size: int, seed: str) -> list[list[int]]:
        """Prompts that depend only on the row and ``seed``.

        The prompts of a smaller batch are the first of a larger one, and shorter prompts begin longer ones.
        """
        low, high = vocab_size // 64, vocab_size - vocab_size // 64
        rows = [random.Random(f"{seed} {row}") for row in range(self.batch)]
        return [[rng.randrange(low, high) for _ in range(self.prompt)] for rng in rows]

    def prompts(self, vocab_size: int, rng: random.Random) -> list[list[int]]:
        return [
            [rng.randrange(vocab_size // 64, vocab_size - vocab_size // 64) for _ in range(self.prompt)]
            for _ in range(self.batch)
        ]
