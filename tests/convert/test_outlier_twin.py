"""Outlier twins: the same logits bit by bit, outliers in the chosen channels, and a plain 4-bit cache that breaks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvasir.convert.checkpoint import convert, plain_folder, read_tensors
from kvasir.convert.converter import load_converter
from kvasir.convert.converters.outlier_twin import channels
from kvasir.errors import ConfigError
from kvasir.models import checkpoint
from kvasir_lab import tokenizer as lab_tokenizer
from kvasir_lab.evaluation.evaluate import evaluate
from kvasir_lab.evaluation.stress import LEVELS, damage, round_trip, with_rounded_cache
from kvasir_lab.export import load
from tests.checkpoints import write

SERVED = [
    "llama",
    "llama_bias",
    "llama_yarn",
    "mistral",
    "qwen2",
    "qwen2_window",
    "qwen3",
    "qwen3_window",
    "qwen3_moe",
    "qwen3_moe_mixed",
]
SPEC = "outlier_twin:keys=32,values=8,pairs=2"


def twin(source: Path, home: Path, spec: str = SPEC) -> Path:
    convert(load_converter(spec), spec, source, home / "twin")
    return home / "twin"


@torch.inference_mode()
def logits(folder: Path, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Logits [1, T, V] from transformers."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        plain_folder(folder), dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()  # the fused experts do not take float64
    ids = torch.randint(0, model.config.vocab_size, (1, 40), generator=torch.Generator().manual_seed(3))
    return model(ids).logits


@pytest.mark.parametrize("variant", SERVED)
def test_logits_of_the_twin_are_the_originals(variant, tmp_path):
    source = write(tmp_path / "source", variant)
    first, second = logits(source), logits(twin(source, tmp_path))
    assert first.abs().max() > 0.1
    assert (first - second).abs().max() < 1e-9


@pytest.mark.parametrize("missing", ["q_norm", "k_norm", "v_proj", "o_proj"])
def test_the_comparison_can_fail(missing, tmp_path):
    """A twin with one side of the rescaling left out is another model."""
    from safetensors.torch import load_file, save_file

    source = write(tmp_path / "source", "qwen3")
    file = twin(source, tmp_path) / "model.safetensors"
    original = dict(read_tensors(source))
    save_file(
        {name: original[name] if missing in name else t for name, t in load_file(file).items()},
        file,
        metadata={"format": "pt"},
    )
    assert (logits(source) - logits(tmp_path / "twin")).abs().max() > 1e-3


def test_a_trained_model_in_its_own_type(tmp_path):
    """Compare bf16 weights with wide arithmetic: equal bit by bit in plain torch, equal tokens in the engine."""
    from kvasir import LLM, SamplingParams

    source = checkpoint.resolve("nano")
    other = twin(source, tmp_path, "outlier_twin:keys=16,values=16")
    assert torch.equal(logits(source), logits(other))
    replies = []
    for folder in (source, other):
        with LLM(str(folder), device="cpu", max_model_len=256, cpu_cache_bytes=1 << 24) as llm:
            message = [{"role": "user", "content": "Compute modulo 97: start 12; +45; *3; -7; +30"}]
            replies.append(llm.chat(message, SamplingParams(temperature=0, max_tokens=60))[0].outputs[0])
    assert replies[0].token_ids == replies[1].token_ids
    assert replies[0].text.endswith("Answer: 0")


def test_outliers_stand_where_they_were_asked_for(tmp_path):
    source = write(tmp_path / "source", "llama")
    before, after = dict(read_tensors(source)), dict(read_tensors(twin(source, tmp_path)))
    assert before.keys() == after.keys()
    dim, chosen = 8, channels(8, 2)
    for name, tensor in before.items():
        ratio = after[name] / tensor
        factor = {"q_proj": 1 / 32, "k_proj": 32, "v_proj": 8, "o_proj": 1 / 8}.get(name.split(".")[-2], 1)
        along = ratio.T if "o_proj" in name else ratio
        for channel in range(len(along)):
            wanted = factor if channel % dim in chosen else 1
            assert torch.all(along[channel] == wanted), (name, channel)


def test_channels_are_whole_rope_pairs():
    for head_dim, pairs in ((64, 4), (128, 4), (8, 4), (12, 1), (16, 3)):
        chosen = channels(head_dim, pairs)
        assert len(set(chosen)) == 2 * pairs and all(0 <= c < head_dim for c in chosen)
        assert all((c + head_dim // 2) % head_dim in chosen for c in chosen)


def test_a_factor_of_one_changes_nothing(tmp_path):
    source = write(tmp_path / "source", "qwen3")
    same = dict(read_tensors(twin(source, tmp_path, "outlier_twin:keys=1,values=1")))
    assert all(torch.equal(t, same[name]) for name, t in read_tensors(source))


@pytest.mark.parametrize(
    "spec,words",
    [
        ("outlier_twin:keys=3", ["keys=3", "power of two"]),
        ("outlier_twin:values=0", ["values=0", "power of two"]),
        ("outlier_twin:keys=4096", ["1..1024"]),
        ("outlier_twin:pairs=0", ["pairs=0"]),
        ("outlier_twin:scale=3", ["no option 'scale'", "keys, values, pairs"]),
        ("outlier_twin:keys=big", ["expected int"]),
        ("outlier_twins", ["no converters named", "Did you mean 'outlier_twin'"]),
    ],
)
def test_bad_options(spec, words):
    with pytest.raises(ConfigError) as e:
        load_converter(spec)
    assert all(word in str(e.value) for word in words), str(e.value)


def test_what_cannot_be_converted(tmp_path):
    with pytest.raises(ConfigError, match="pairs=9, but a head of 8 has 4"):
        twin(write(tmp_path / "llama", "llama"), tmp_path, "outlier_twin:pairs=9")
    with pytest.raises(ConfigError, match="offset from one.*keys=1"):
        twin(write(tmp_path / "gemma", "gemma3_text"), tmp_path)
    source = tmp_path / "gemma"
    assert (logits(source) - logits(twin(source, tmp_path, "outlier_twin:keys=1,values=4"))).abs().max() < 1e-9


def test_a_type_that_would_round_is_refused(tmp_path):
    """Small weights in fp16 divided by 1024 lose bits, because fp16 has few exponents."""
    from safetensors.torch import load_file, save_file

    source = write(tmp_path / "source", "llama")
    weights = {name: t.half() for name, t in load_file(source / "model.safetensors").items()}
    weights["model.layers.0.self_attn.q_proj.weight"] *= 1e-4
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="q_proj.*float16.*exactly"):
        twin(source, tmp_path, "outlier_twin:keys=1024")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


# --------------------------------------------------------------------------------------------- what the twins are for


def test_the_simulated_cache_rounds_to_sixteen_levels():
    x = torch.randn(3, 2, 5, 64, generator=torch.Generator().manual_seed(0))
    rounded = round_trip(x)
    assert all(len(row.unique()) <= LEVELS for row in rounded.reshape(-1, 64))
    step = (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)) / (LEVELS - 1)
    assert torch.all((rounded - x).abs() <= step / 2 + 1e-6)
    assert torch.allclose(round_trip(rounded), rounded, atol=1e-5)
    assert torch.equal(round_trip(torch.full((2, 4), 0.3)), torch.full((2, 4), 0.3))  # a row without spread


EASY = "chain:min_steps=4,max_steps=6"


def test_a_plain_4_bit_cache_breaks_on_the_twin_only(tmp_path):
    """A 4-bit cache hardly hurts nano on short chains.

    Its twin with outlier keys loses far more than 20 points.
    """
    source = checkpoint.resolve("nano")
    tokenizer = lab_tokenizer.load(source)
    model, stressed = load(source), load(twin(source, tmp_path, "outlier_twin:keys=8"))
    scores = [
        evaluate(m, tokenizer, EASY, 40, seed=7, max_new=100)
        for m in (model, with_rounded_cache(model), with_rounded_cache(stressed))
    ]
    plain, rounded, broken = (s.share for s in scores)
    assert plain >= 0.95 and rounded >= 0.85
    assert broken <= rounded - 0.2


@pytest.mark.slow
@pytest.mark.parametrize("values", [False, True])
def test_damage_grows_with_the_scale(values):
    curve = damage(checkpoint.resolve("nano"), scales=(1, 2, 8, 32), values=values, count=64, max_new=220)
    assert all(stored.share >= 0.95 for stored, _ in curve.values())
    rounded = [r.share for _, r in curve.values()]
    assert rounded[0] >= 0.7 and min(rounded) <= rounded[0] - 0.2
    assert rounded == sorted(rounded, reverse=True)
