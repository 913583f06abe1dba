"""Checkpoints as GGUF files: every tensor has the right type, and interleaved rows match llama.cpp's rotation."""

import json
import sys

import pytest
import torch
from safetensors.torch import save_file

from kvasir.bench import gguf
from kvasir.errors import ConfigError
from kvasir.models import checkpoint
from tests.bench.helpers import SITE


@pytest.fixture(autouse=True)
def package(monkeypatch):
    monkeypatch.syspath_prepend(SITE)
    real = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "gguf"}
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "gguf"]:
        del sys.modules[name]
    sys.modules.update(real)


@pytest.mark.parametrize("file_type, kind", [("f32", "F32"), ("bf16", "BF16"), ("q8_0", "Q8_0")])
def test_the_small_model(tmp_path, file_type, kind):
    gguf.write(checkpoint.resolve("nano"), tmp_path / "m", file_type)
    found = json.loads((tmp_path / "m").read_text())
    tensors = found["tensors"]
    assert found["architecture"] == "qwen3" and len(tensors) == 2 + 4 * 11, "tied: no tensor of the head"
    assert tensors["model.layers.3.mlp.down_proj.weight"] | {"sum": 0, "column": 0} == {
        "shape": [192, 640],
        "type": kind,
        "sum": 0,
        "column": 0,
    }
    assert {t["type"] for name, t in tensors.items() if "norm" in name} == {"F32"}
    told = {
        k: found[k]
        for k in (
            "block_count",
            "head_count",
            "head_count_kv",
            "key_length",
            "rope_freq_base",
            "vocab_size",
            "tokenizer_model",
        )
    }
    assert told == {
        "block_count": 4,
        "head_count": 4,
        "head_count_kv": 2,
        "key_length": 64,
        "rope_freq_base": 10000.0,
        "vocab_size": 2048,
        "tokenizer_model": "none",
    }


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": 4,
}


def folder(path, tensors, **changes):
    (path / "config.json").write_text(json.dumps(LLAMA | changes))
    save_file(tensors, path / "model.safetensors")
    return path


def test_llama_heads_are_rearranged_and_others_are_not(tmp_path):
    rows = torch.arange(8.0)[:, None].repeat(1, 8)
    gguf.write(
        folder(tmp_path, {f"model.layers.0.self_attn.{p}.weight": rows.clone() for p in ("q_proj", "v_proj")}),
        tmp_path / "m",
        "f32",
    )
    tensors = json.loads((tmp_path / "m").read_text())["tensors"]
    assert tensors["model.layers.0.self_attn.v_proj.weight"]["column"] == list(range(8))
    assert tensors["model.layers.0.self_attn.q_proj.weight"]["column"] == [0, 2, 1, 3, 4, 6, 5, 7], "two heads of four"


def test_rope_in_the_newer_spelling(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 5e5}
    gguf.write(folder(tmp_path, {"model.norm.weight": torch.ones(8)}, rope_parameters=rope), tmp_path / "m", "f32")
    assert json.loads((tmp_path / "m").read_text())["rope_freq_base"] == 5e5


def test_rotating_neighbours_of_rows_in_turns_is_rotating_halves():
    torch.manual_seed(0)
    heads, dim, columns = 3, 8, 16
    weight, x, angle = torch.randn(heads * dim, columns), torch.randn(columns), torch.rand(dim // 2)
    plain = (weight @ x).view(heads, 2, dim // 2)
    halves = torch.stack(
        [plain[:, 0] * angle.cos() - plain[:, 1] * angle.sin(), plain[:, 1] * angle.cos() + plain[:, 0] * angle.sin()],
        1,
    )
    turned = (gguf._interleaved(weight, heads) @ x).view(heads, dim // 2, 2)
    neighbours = torch.stack(
        [
            turned[..., 0] * angle.cos() - turned[..., 1] * angle.sin(),
            turned[..., 1] * angle.cos() + turned[..., 0] * angle.sin(),
        ],
        2,
    )
    torch.testing.assert_close(neighbours.transpose(1, 2), halves)


@pytest.mark.parametrize(
    "changes, file_type, words",
    [
        ({"architectures": ["MixtralForCausalLM"]}, "f32", "no GGUF of a MixtralForCausalLM"),
        ({}, "q2_k", "no GGUF file type 'q2_k'"),
        ({"rope_scaling": {"factor": 2}}, "f32", "rope_scaling"),
        ({"sliding_window": 8}, "f32", "sliding_window=8"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2}}, "f32", "'linear'"),
        ({}, "f32", "llama.cpp has no tensor for model.layers.0.odd.weight"),
    ],
)
def test_what_it_cannot_write(tmp_path, changes, file_type, words):
    with pytest.raises(ConfigError, match=words):
        gguf.write(
            folder(tmp_path, {"model.layers.0.odd.weight": torch.zeros(2, 2)}, **changes), tmp_path / "m", file_type
        )
