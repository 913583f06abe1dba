"""Translation of config.json to layers: both forms of RoPE, every family's quirks, and refusals by name."""

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvasir import technique
from kvasir.config import EngineConfig
from kvasir.engine.start.build import _info
from kvasir.errors import ConfigError
from kvasir.layers.spec import DenseSpec, MoESpec, RopeSpec
from kvasir.models import cost
from kvasir.models.families import FAMILIES, build_spec, find_family, text_of
from kvasir.types import CacheGroup, CacheRow

BASE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


GEMMA4 = {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0}
# Families whose config is made of parts, and the model_type of the text.
PARTS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}


def config(model_type="llama", **changes):
    flat = {k: v for k, v in {**BASE, "model_type": model_type, **changes}.items() if v is not ...}
    if model_type not in PARTS:
        return flat
    return {"model_type": model_type, "text_config": {**flat, "model_type": PARTS[model_type]}}


def test_the_served_families():
    assert technique.own(FAMILIES) == [
        "deepseek_v2",
        "deepseek_v3",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "gemma4",
        "gemma4_text",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt_oss",
        "granite",
        "kimi_linear",
        "kvasir_m2rnn",
        "kvasir_mamba3",
        "kvasir_mla",
        "llama",
        "mimo",
        "ministral3",
        "mistral",
        "mistral3",
        "mistral4",
        "mixtral",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_moe",
        "qwen3_next",
        "smollm3",
    ]


def test_llama():
    spec = build_spec(config(architectures=["LlamaForCausalLM"]))
    layer = spec.layers[0]
    assert len(spec.layers) == 4 and len(set(spec.layers)) == 1
    assert (layer.mixer.num_heads, layer.mixer.num_kv_heads, layer.mixer.head_dim, layer.mixer.scale) == (
        4,
        2,
        8,
        8**-0.5,
    )
    assert (
        layer.rope == RopeSpec(10000.0, 8) and layer.ffn == DenseSpec(48) and layer.norm.eps == 1e-5 and not spec.tied
    )
    assert spec.cache_groups() == (CacheGroup("full", (0, 1, 2, 3), (CacheRow(2, 8, 8),) * 4),)


def test_head_counts_default():
    assert build_spec(config(num_key_value_heads=...)).layers[0].mixer.num_kv_heads == 4
    assert build_spec(config("qwen3")).layers[0].mixer.head_dim == 128
    assert build_spec(config("qwen2")).layers[0].mixer.head_dim == 8
    assert build_spec(config("gemma3_text")).layers[0].mixer.head_dim == 256


def test_sliding_windows():
    every = build_spec(config("mistral", sliding_window=16))
    assert every.cache_groups() == (CacheGroup("window-16", (0, 1, 2, 3), (CacheRow(2, 8, 8),) * 4, 16),)
    assert build_spec(config("mistral", sliding_window=None)).cache_groups()[0].window is None
    assert build_spec(config("mistral", max_position_embeddings=8192)).cache_groups()[0].window == 4096, (
        "absent is 4096, not none"
    )
    assert build_spec(config("mistral", sliding_window=128)).cache_groups()[0].window is None, (
        "it would never hide a position"
    )
    upper = build_spec(config("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=3))
    assert upper.cache_groups() == (
        CacheGroup("full", (0, 1, 2), (CacheRow(2, 8, 8),) * 3),
        CacheGroup("window-16", (3,), (CacheRow(2, 8, 8),), 16),
    )
    assert all(
        build_spec(config("qwen2", sliding_window=16, max_window_layers=0)).layers[i].mixer.window is None
        for i in range(4)
    )
    for family in ("qwen2", "qwen3", "qwen3_moe"):
        slides = dict(
            use_sliding_window=True,
            max_window_layers=0,
            max_position_embeddings=8192,
            num_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=8,
        )
        assert build_spec(config(family, **slides)).layers[3].mixer.window == 4096, "absent is 4096 here, too"
        assert build_spec(config(family, **slides, sliding_window=None)).layers[3].mixer.window is None
    given = build_spec(
        config(
            "qwen3", use_sliding_window=True, sliding_window=16, layer_types=["full_attention", "sliding_attention"] * 2
        )
    )
    assert [layer.mixer.window for layer in given.layers] == [None, 16, None, 16]


@pytest.mark.parametrize(
    "spelling", [{"sliding_window_pattern": 2}, {"layer_types": ["sliding_attention", "full_attention"] * 2}], ids=str
)
def test_gemma_layer_types(spelling):
    spec = build_spec(config("gemma3_text", sliding_window=16, query_pre_attn_scalar=64, **spelling))
    assert [layer.mixer.window for layer in spec.layers] == [16, None, 16, None]
    assert [layer.rope.theta for layer in spec.layers] == [1e4, 1e6] * 2
    assert spec.tied and spec.embed_scale == 32**0.5 and spec.layers[0].mixer.scale == 1 / 8
    assert spec.final_norm.offset == spec.layers[0].norm.offset == spec.layers[0].mixer.qk_norm.offset == 1.0
    unread = build_spec(config("gemma3_text", sliding_window=16, _sliding_window_pattern=2))
    assert [layer.mixer.window for layer in unread.layers] == [16] * 4, "as in transformers"
    full = build_spec(config("gemma3_text", sliding_window=None, layer_types=["full_attention"] * 4))
    assert full.cache_groups()[0].window is None, "null where nothing slides"
    assert spec.layers[0].norms == "sandwich" and spec.layers[0].ffn.activation == "gelu_tanh"


def test_gemma_softcaps():
    spec = build_spec(config("gemma3_text", attn_logit_softcapping=50.0, final_logit_softcapping=30.0))
    assert spec.layers[0].mixer.attention().softcap == 50.0 and spec.logit_softcap == 30.0


def test_mixture_layers():
    moe = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8)
    kinds = [
        layer.ffn for layer in build_spec(config("qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[3], **moe)).layers
    ]
    assert kinds == [DenseSpec(48), MoESpec(8, 2, 16, False), DenseSpec(48), DenseSpec(48)]
    renamed = config("qwen3_moe", **{**moe, "num_experts": ..., "num_local_experts": 8, "norm_topk_prob": True})
    assert {layer.ffn for layer in build_spec(renamed).layers} == {MoESpec(8, 2, 16, True)}
    assert build_spec({**renamed, "intermediate_size": None}).layers[0].ffn.num_experts == 8, (
        "no dense layer, no need of its size"
    )


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "llama3", **LLAMA3}},
        {
            "rope_theta": 1.0,
            "rope_scaling": {},
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
        },
    ],
    ids=str,
)
def test_every_spelling_of_llama3_rope(fields):
    assert build_spec(config(**fields)).layers[0].rope == RopeSpec(5e5, 8, "llama3", 8.0, 64, 1.0, 4.0)


def test_where_the_original_length_is_read():
    outer, inner = {"original_max_position_embeddings": 32}, {"rope_type": "llama3", **LLAMA3}
    assert build_spec(config(**outer, rope_parameters=inner)).layers[0].rope.original_max_position == 32, "as in Phi 3"
    by_kind = build_spec(
        config(
            "gemma3_text",
            **outer,
            rope_parameters={"full_attention": {"rope_type": "default"}, "sliding_attention": inner},
        )
    )
    assert by_kind.layers[0].rope.original_max_position == 64, "transformers reads the one of the layer type only"


def test_yarn_rope():
    rope = (
        build_spec(
            config(rope_theta=1e6, rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32})
        )
        .layers[0]
        .rope
    )
    assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 4.0, 32)
    assert rope.attention_factor == pytest.approx(1.1386294)
    explicit = {
        "rope_type": "yarn",
        "factor": 4.0,
        "attention_factor": 0.5,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    }
    rope = build_spec(config(rope_parameters=explicit)).layers[0].rope
    assert (rope.attention_factor, rope.beta_fast, rope.beta_slow, rope.truncate, rope.original_max_position) == (
        0.5,
        16.0,
        2.0,
        False,
        128,
    )


@pytest.mark.parametrize(
    "scaling,longest",
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 96}, 384),
        ({"rope_type": "yarn", "factor": 4.0}, 512),
        ({"rope_type": "yarn", "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "linear", "factor": 2.5}, 320),
        ({"rope_type": "llama3", **LLAMA3}, 128),
        ({"rope_type": "default", "factor": 4.0}, 128),
    ],
    ids=str,
)
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_scaling_lengthens_the_context_as_in_vllm(field, scaling, longest):
    """Qwen's model cards say to add YaRN to config.json and to leave ``max_position_embeddings``."""
    assert build_spec(config("qwen3", **{field: scaling})).max_position == longest
    slides = build_spec(config("mistral", sliding_window=128, **{field: scaling}))
    assert slides.layers[0].mixer.window == (128 if longest > 128 else None), "it hides positions beyond"
    if field == "rope_scaling":
        assert build_spec(config("gemma3_text", rope_scaling=scaling)).max_position == 128, "lengthened already"


@pytest.mark.parametrize(
    "changes,words",
    [
        ({"hidden_size": ...}, ["hidden_size", "missing"]),
        ({"vocab_size": None}, ["vocab_size", "missing"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"num_hidden_layers": -3}, ["num_hidden_layers", "-3"]),
        ({"hidden_size": "32"}, ["hidden_size", "'32'"]),
        ({"hidden_size": 32.5}, ["hidden_size", "32.5"]),
        ({"vocab_size": True}, ["vocab_size", "True"]),
        ({"vocab_size": 10**12}, ["vocab_size"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads", "num_key_value_heads"]),
        ({"hidden_size": 30}, ["hidden_size", "num_attention_heads"]),
        ({"head_dim": 7}, ["head_dim", "7", "even"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps"]),
        ({"rope_theta": 10**400}, ["rope_theta"]),
        ({"hidden_act": "relu2"}, ["hidden_act", "relu2", "silu"]),
        ({"hidden_act": 3}, ["hidden_act"]),
        ({"attention_bias": "yes"}, ["attention_bias", "'yes'"]),
        ({"tie_word_embeddings": 1}, ["tie_word_embeddings"]),
        ({"is_encoder_decoder": True}, ["is_encoder_decoder"]),
        ({"is_causal": False}, ["is_causal", "bidirectional"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
            ["rope_parameters.partial_rotary_factor"],
        ),
        ({"rope_scaling": "linear"}, ["rope_scaling", "'linear'"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope_type", "dynamic", "llama3"]),
        ({"rope_parameters": {"rope_type": "dynamic"}}, ["rope_parameters.rope_type", "dynamic"]),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["rope_parameters.short_factor", "list of 4"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"model_type": "phi3", "partial_rotary_factor": 0.2}, ["partial_rotary_factor", "0.2", "paired"]),
        ({"model_type": "phi3", "partial_rotary_factor": 1.5}, ["partial_rotary_factor", "at most 1"]),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, ["mrope"]),
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling.factor", "missing"]),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, ["high_freq_factor"]),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5.0}}},
            ["rope_parameters", "layer type"],
        ),
        ({"rope_theta": -1}, ["rope_theta"]),
        (
            {"architectures": ["LlamaForTokenClassification"]},
            ["architectures", "LlamaForTokenClassification", "LlamaForCausalLM"],
        ),
        ({"architectures": "LlamaForCausalLM"}, ["architectures", "list"]),
        ({"model_type": "Llama"}, ["model_type", "Llama", "qwen3_moe", "Did you mean 'llama'"]),
        ({"model_type": "../llama"}, ["model_type", "not served"]),
        ({"model_type": "mistral", "sliding_window": 0}, ["sliding_window", "0"]),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 4}, ["layer_types"]),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, ["layer_types", "1", "4"]),
        ({"model_type": "qwen2", "layer_types": ["linear_attention"] * 4}, ["layer_types", "linear_attention"]),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 4}, ["layer_types", "use_sliding_window"]),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ({"model_type": "gemma3_text", "rope_parameters": {"rope_type": "default"}}, ["rope_parameters", "flat"]),
        ({"model_type": "gemma3_text", "sliding_window": None}, ["sliding_window", "null", "layer_types"]),
        ({"rope_scaling": {"type": "linear", "factor": 1e9}}, ["max_position_embeddings", "1e+09"]),
        ({"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2.0}}, ["rope_theta", "is 1"]),
        ({"rope_scaling": {"type": "linear", "factor": 1e308}}, ["max_position_embeddings", "1e+308"]),
        ({"model_type": "gemma3_text", "query_pre_attn_scalar": 0}, ["query_pre_attn_scalar"]),
        ({"model_type": "ministral3", "layer_types": ["full_attention"] * 4}, ["layer_types", "ministral3"]),
        (
            {"model_type": "ministral3", "rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
            ["rope_parameters.original_max_position_embeddings", "missing"],
        ),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ({"model_type": "gemma2", "sliding_window": None}, ["sliding_window", "null", "layer_types"]),
        ({"model_type": "gemma2", "attn_logit_softcapping": -1.0}, ["attn_logit_softcapping", "-1.0"]),
        ({"model_type": "olmo2", "clip_qkv": 8.0}, ["clip_qkv", "8.0"]),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, ["no_rope_layers", "2 entries", "4"]),
        ({"model_type": "smollm3", "layer_types": ["sliding_attention"] * 4}, ["layer_types", "use_sliding_window"]),
        ({"model_type": "granite", "logits_scaling": 0}, ["logits_scaling", "0"]),
        ({"model_type": "mixtral", "num_local_experts": 1}, ["num_experts_per_tok", "2", "1 experts"]),
        ({"model_type": "glm4_moe", "n_group": 3}, ["n_group", "3", "128 experts"]),
        ({"model_type": "glm4_moe", "n_group": 64}, ["num_experts_per_tok", "8", "2 experts"]),
        ({"model_type": "gemma4_text", "vocab_size_per_layer_input": 96, "num_kv_shared_layers": 4}, ["num_kv_shared"]),
        ({"model_type": "gemma4_text", "vocab_size_per_layer_input": 64}, ["vocab_size_per_layer_input", "96"]),
        ({"model_type": "gemma4_text", "use_bidirectional_attention": "all"}, ["use_bidirectional_attention", "all"]),
        ({**GEMMA4, "sliding_window": None}, ["sliding_window", "null"]),
        ({**GEMMA4, "per_layer_config": {"full_attention": {"head_dim": 8}}}, ["per_layer_config.full_attention"]),
        ({**GEMMA4, "per_layer_config": {"03": {"sliding_window": 8}}}, ["per_layer_config.03.sliding_window"]),
        ({**GEMMA4, "rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["rope_parameters.sliding"]),
        (
            {**GEMMA4, "enable_moe_block": True, "num_experts": 2, "top_k_experts": 3, "moe_intermediate_size": 8},
            ["top_k_experts", "3", "2 experts"],
        ),
        ({"model_type": "gpt_oss", "swiglu_limit": 5.0}, ["swiglu_limit", "5.0"]),
        ({"model_type": "gpt_oss", "swiglu_alpha": 1.0}, ["swiglu_alpha", "1.0"]),
        ({"model_type": "gpt_oss", "num_local_experts": 3}, ["num_experts_per_tok", "4", "3 experts"]),
        ({"model_type": "qwen3_moe", "num_experts_per_tok": 2, "moe_intermediate_size": 8}, ["num_experts", "missing"]),
        (
            {"model_type": "qwen3_moe", "num_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 8},
            ["num_experts_per_tok", "3"],
        ),
        (
            {
                "model_type": "qwen3_moe",
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 8,
                "mlp_only_layers": 3,
            },
            ["mlp_only_layers"],
        ),
    ],
    ids=str,
)
def test_bad_configs_are_refused_by_field(changes, words):
    with pytest.raises(ConfigError) as e:
        build_spec(config(**changes))
    for word in ["config.json", *words]:
        assert word in str(e.value), str(e.value)


def test_the_text_of_mistral3_is_of_a_served_type():
    other = config("mistral3")
    other["text_config"]["model_type"] = "llama"
    with pytest.raises(ConfigError, match="text_config.model_type is 'llama'.*ministral3"):
        build_spec(other)


def test_a_layer_that_reads_another_layers_cache_has_no_pages():
    from dataclasses import replace

    spec = build_spec(config())
    shared = replace(spec, layers=(*spec.layers[:3], replace(spec.layers[3], cache_of=2)))
    assert shared.cache_groups()[0].layers == (0, 1, 2)
    assert cost.kv_bytes_per_token(shared, 2) == {"full": 3 * 2 * 2 * 8 * 2}
    assert cost.num_params(spec) - cost.num_params(shared) == 2 * 2 * 8 * 32


def test_cost_of_llama_3_8b():
    """The published figures: 8.03 B parameters, 128 KiB of KV per token in 16 bits."""
    spec = build_spec(
        config(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=8192,
        )
    )
    assert cost.num_params(spec) == 8_030_261_248 and cost.weight_bytes(spec, 2) == 16_060_522_496
    assert cost.kv_bytes_per_token(spec, 2) == {"full": 131072}
    assert cost.kv_bytes(spec, 1000, 2) == 131072000
    assert cost.flops_per_token(spec, 1) == 2 * (8_030_261_248 - 128256 * 4096 - 65 * 4096) + 4 * 4096 * 32
    assert cost.flops_per_token(spec, 101) - cost.flops_per_token(spec, 1) == 100 * 4 * 4096 * 32


def test_cost_of_windows_and_experts():
    spec = build_spec(
        config(
            "qwen3_moe",
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            head_dim=8,
            use_sliding_window=True,
            sliding_window=10,
        )
    )
    assert cost.kv_bytes(spec, 5, 1) * 2 == cost.kv_bytes(spec, 10, 1) == cost.kv_bytes(spec, 1000, 1)
    assert cost.num_params(spec) - cost.active_params(spec) == 96 * 32 + 4 * (6 * 3 * 32 * 16 + 2 * 32 + 2 * 8) + 32
    assert cost.flops_per_token(spec, 100) == cost.flops_per_token(spec, 10)


@pytest.mark.parametrize(
    "family", [name for name in technique.own(FAMILIES) if not name.startswith("kvasir_") and name != "mimo"]
)
def test_what_a_config_leaves_out_means_what_it_means_to_transformers(family, tmp_path):
    """A config with the required fields only, and one whose head counts are null."""
    from transformers import CONFIG_MAPPING

    def ends(hf):
        return _info(EngineConfig(), tmp_path, text_of(hf), SimpleNamespace(spec=build_spec(hf)), None, None).eos_ids

    def changed(**changes):
        """The bare config; of a model made of parts, that of its text."""
        return {**bare, "text_config": {**bare["text_config"], **changes}} if family in PARTS else {**bare, **changes}

    bare = config(
        family,
        num_hidden_layers=32,
        num_attention_heads=64,
        hidden_size=2048,
        num_key_value_heads=...,
        rms_norm_eps=...,
        max_position_embeddings=8192,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        vocab_size=262144,
    )
    for given in (bare, changed(use_sliding_window=True)):
        whole = json.loads(CONFIG_MAPPING[family](**given).to_json_string(use_diff=False))
        if family == "mistral3":  # transformers looks whether the weights are tied
            whole["tie_word_embeddings"] = False
        assert build_spec(given) == build_spec(whole)
        end = text_of(whole)["eos_token_id"]
        assert ends(given) == ends(whole) == (() if end is None else (end,))
    assert ends(changed(eos_token_id=None)) == ()
    mixers = [layer.mixer for layer in build_spec(changed(num_key_value_heads=None)).layers]
    mixer = next(mixer for mixer in mixers if mixer.attention())
    assert getattr(mixer, "num_kv_heads", mixer.num_heads) == 64, "heads that share a latent have no count of their own"
    (tmp_path / "generation_config.json").write_text('{"temperature": 1.0}')
    assert ends(bare) == (), "it would be said there"


def test_specs_need_no_torch():
    code = (
        "import json, sys; from kvasir.models import checkpoint, cost; from kvasir.models.families import build_spec;"
        f"cost.flops_per_token(build_spec(json.loads('{json.dumps(config())}')), 1); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_rotation_of_another_width_is_no_layer():
    layer = build_spec(config()).layers[0]
    with pytest.raises(AssertionError, match="RoPE of 12 for heads of"):
        replace(layer, rope=replace(layer.rope, head_dim=12))


DELTA_35B = dict(
    hidden_size=2048,
    num_hidden_layers=40,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=256,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
)


def test_hybrids_keep_states_in_a_group_of_their_own():
    spec = build_spec(config("qwen3_5_moe_text", **DELTA_35B))
    full, state = spec.cache_groups()
    assert (state.kind, len(state.layers), full.kind, full.layers[:2]) == ("state", 30, "pages", (3, 7))
    mixer = spec.layers[0].mixer
    assert (mixer.mixed, mixer.values, mixer.attention(), mixer.cache_row()) == (8192, 4096, None, None)
    # 2 MiB of matrices a layer, the convolution's three rows and sixteen rows of look-ahead.
    assert cost.state_bytes(spec, 2) == 30 * (32 * 128 * 128 * 4 + 3 * 8192 * 2 + 16 * (8192 + 64) * 2 + 8)
    assert cost.state_bytes(spec, 2) - cost.state_bytes(spec, 2, 2) == 30 * 32 * 128 * 128 * 2
    assert cost.kv_bytes(spec, 100, 2) == cost.state_bytes(spec, 2) + 100 * 10 * 2 * 2 * 256 * 2


def test_hybrids_refuse_what_they_do_not_compute():
    for changes, message in (
        (dict(layer_types=["sliding_attention"] * 4), "layer_types has 'sliding_attention'"),
        (dict(linear_num_value_heads=24), "linear_num_value_heads is 24"),
        (dict(hidden_act="gelu"), "hidden_act is not silu"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_spec(config("qwen3_5_text", **changes))


# As Kimi-Linear-48B-A3B is published: its own names of fields, and layers numbered from 1.
KIMI_48B = dict(
    hidden_size=2304, intermediate_size=9216, moe_intermediate_size=1024, num_hidden_layers=27, num_attention_heads=32,
    num_key_value_heads=32, kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64,
    v_head_dim=128, mla_use_nope=True, num_experts=256, num_experts_per_token=8, num_shared_experts=1,
    moe_renormalize=True, moe_router_activation_func="sigmoid", num_expert_group=1, topk_group=1, moe_layer_freq=1,
    routed_scaling_factor=2.446, first_k_dense_replace=1, vocab_size=163840, model_max_length=1048576,
    max_position_embeddings=..., hidden_act="silu",
    linear_attn_config=dict(
        head_dim=128, num_heads=32, short_conv_kernel_size=4, full_attn_layers=[4, 8, 12, 16, 20, 24, 27],
        kda_layers=[i for i in range(1, 28) if i % 4 and i != 27],
    ),
)  # fmt: skip


def test_kimi_linear_as_published():
    spec = build_spec(config("kimi_linear", **KIMI_48B))
    full, state = spec.cache_groups()
    assert full.layers == (3, 7, 11, 15, 19, 23, 26) and len(state.layers) == 20 and spec.max_position == 1 << 20
    assert all(layer.rope is None for layer in spec.layers) and spec.layers[3].mixer.row_dim == 576
    assert cost.num_params(spec) / 1e9 == pytest.approx(49.12, abs=0.01)
    ffns = [layer.ffn for layer in spec.layers]
    assert isinstance(ffns[0], DenseSpec) and all(isinstance(ffn, MoESpec) and ffn.correction for ffn in ffns[1:])
    assert find_family("kimi_linear").stored("layers.0.ffn.gate.weight", spec) == "model.layers.0.mlp.gate_proj.weight"


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(layer_types=["full_attention"] * 26 + ["sliding_attention"]), "layer_types has 'sliding_attention'"),
        (dict(moe_router_activation_func="softmax"), "moe_router_activation_func"),
        (dict(mla_use_nope=False), "mla_use_nope"),
        (dict(linear_attn_config={"full_attn_layers": [4], "kda_layers": [1, 2]}), "every layer from 1 to 27 once"),
    ],
)
def test_kimi_linear_refuses_what_it_does_not_compute(changes, message):
    with pytest.raises(ConfigError, match=message):
        build_spec(config("kimi_linear", **{**KIMI_48B, **changes}))
