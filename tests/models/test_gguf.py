"""GGUF files: every block is what ``gguf.quants`` says, logits are those of the dequantised model, weights stay
quantised, and what is not served is refused by name. Controls that mix up rows, nibbles or scales fail."""

import json

import numpy as np
import pytest
import torch

from kvasir.errors import ConfigError
from kvasir.kernels.native.library import native
from kvasir.models import checkpoint, gguf_blocks, gguf_folder
from kvasir.models.gguf_file import BLOCKS
from kvasir.models.loader import load_model, weight_bytes
from kvasir.models.tokenizer import Tokenizer
from tests.models import gguf_files, small_tokenizers
from tests.models.test_gguf_tokenizer import source_of
from tests.models.test_native_decoder import NativePaged
from tests.models.test_parity import Paged

gguf = pytest.importorskip("gguf", reason="GGUF files are read by the gguf package: pip install gguf")
CPU = dict(device="cpu", dtype=torch.float32)


def medium(name):
    """The types of a Q4_K_M file: v, and down of some layers, have more bits."""
    if "attn_v" in name or name == "output.weight" or name.startswith("blk.0.ffn_down"):
        return "Q6_K"
    return "Q4_K"


FILES = {
    "Q8_0": ("llama", "Q8_0"),
    "Q4_0": ("qwen3", "Q4_0"),
    "Q4_K_M": ("llama", medium),
    "Q6_K": ("qwen2", lambda name: "Q5_0" if "ffn_up" in name else "Q6_K"),
    "F16": ("llama", "F16"),
}
# Bytes of the layers' matrices of those of fp32.
SIZES = {"Q8_0": 9 / 32, "Q4_0": 5 / 32, "Q4_K_M": 5.4 / 32, "Q6_K": 7.6 / 32, "F16": 1}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    native()  # compiled, or found, before the cache is another
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module", params=FILES)
def made(request, tmp_path_factory):
    arch, kinds = FILES[request.param]
    return request.param, *gguf_files.write(tmp_path_factory.mktemp("gguf"), arch, kinds)


def load(folder):
    return load_model(folder, checkpoint.read_config(folder), **CPU)


def matrices(model):
    return [w for b in model.blocks for w in (b.mixer.qkv.weight, b.mixer.o.weight, b.ffn.gate_up.weight,
                                              b.ffn.down.weight)] + [model.head]  # fmt: skip


def test_every_weight_is_what_the_package_says(made):
    name, file, plain = made
    mine, wide = load(checkpoint.resolve(str(file))), load(plain)
    for got, want in zip(matrices(mine), matrices(wide)):
        torch.testing.assert_close(got.dequantise(), want.dequantise(), rtol=0, atol=0)
    assert torch.equal(mine.embed_VE, wide.embed_VE)
    mine_bytes, wide_bytes = (sum(w.num_bytes for w in matrices(m)[:-1]) for m in (mine, wide))
    assert mine_bytes <= SIZES[name] * wide_bytes, "the planes hold codes"


@pytest.mark.parametrize(
    "made", [pytest.param(n, marks=[] if n == "Q4_K_M" else [pytest.mark.slow]) for n in FILES], indirect=True
)
def test_logits_are_those_of_the_dequantised_model(made):
    """The plain path and the C kernels."""
    name, file, plain = made
    folder = checkpoint.resolve(str(file))
    want = Paged(plain).run(lambda i: 50)
    runs = [Paged(folder)] + ([NativePaged(folder)] if native().library is not None else [])
    for run in runs:
        for got, logits in zip(run.run(lambda i: 3 + 5 * i), want):
            torch.testing.assert_close(got, logits, atol=2e-4, rtol=2e-4)


def test_the_folder_is_made_once_and_again_for_another_file(tmp_path, cache):
    file, _ = gguf_files.write(tmp_path, "llama", "Q8_0", num_hidden_layers=1)
    folder = checkpoint.resolve(str(file))
    assert folder == checkpoint.resolve(str(tmp_path / "model.gguf")) and folder.is_relative_to(cache)
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "x.gguf").symlink_to(file)
    assert checkpoint.resolve(str(tmp_path / "alone")) == folder
    config = checkpoint.read_config(folder)
    assert config["model_type"] == "llama" and not config["tie_word_embeddings"]
    plain = config | {"quantization_config": None}
    assert weight_bytes(config, torch.float32) < 0.5 * weight_bytes(plain, torch.float32)
    changed, _ = gguf_files.write(tmp_path / "more", "llama", "Q4_0", num_hidden_layers=1, hidden_size=128, head_dim=32)
    file.write_bytes(changed.read_bytes())
    assert checkpoint.resolve(str(file)) != folder
    (tmp_path / "alone" / "y.gguf").symlink_to(file)
    with pytest.raises(ConfigError, match="several GGUF files: name one"):
        checkpoint.resolve(str(tmp_path / "alone"))


WRONG = {
    "rows of another order": ("llama", "Q8_0", lambda m: m.setattr(gguf_folder, "_types", unpaired_types)),
    "nibbles of neighbours": ("qwen3", "Q4_0", lambda m: m.setattr(gguf_blocks, "_nibbles", neighbours)),
    "a neighbour's scale": ("qwen3", "Q8_0", lambda m: m.setitem(gguf_blocks.CONVERT["Q8_0"], "scale", rolled)),
    "scale and least code": ("qwen3", "Q4_K", lambda m: m.setitem(gguf_blocks.CONVERT["Q4_K"], "scale", swapped)),
}
types, halves, scales = gguf_folder._types, gguf_blocks._halves, gguf_blocks._small_scales


def unpaired_types(*args):
    return types(*args) | {"paired": {}}


def neighbours(codes, run):
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2)


def rolled(numbers):
    return halves(numbers).roll(1, -1)


def swapped(numbers):
    return scales(numbers).unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


@pytest.mark.parametrize("what", WRONG)
def test_the_comparison_can_fail(what, tmp_path, monkeypatch):
    arch, kind, break_it = WRONG[what]
    file, plain = gguf_files.write(tmp_path, arch, kind, num_hidden_layers=1)
    want = matrices(load(plain))[0].dequantise()
    assert torch.equal(matrices(load(checkpoint.resolve(str(file))))[0].dequantise(), want)
    file.touch()
    break_it(monkeypatch)
    got = matrices(load(checkpoint.resolve(str(file))))[0].dequantise()
    assert (got - want).norm() > 0.05 * want.norm()


@pytest.mark.parametrize("kind", BLOCKS)
def test_random_blocks_are_dequantised_bit_for_bit(kind):
    data = gguf_files.blocks(kind, 8, 512, np.random.default_rng(3))
    want = torch.from_numpy(gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind]))
    stored = torch.from_numpy(data).unflatten(1, (-1, BLOCKS[kind].num_bytes))
    planes = BLOCKS[kind].planes
    parts = {plane: gguf_blocks.CONVERT[kind][plane](stored[..., where]) for plane, where in planes.items()}
    assert torch.equal(gguf_blocks.NUMBERS[kind](parts), want)
    read = sorted(byte for where in planes.values() for byte in range(where.start, where.stop))
    assert read == list(range(BLOCKS[kind].num_bytes))


def test_rope_of_llama_3_is_found_from_its_factors(tmp_path):
    rule = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192, "rope_theta": 500000.0}  # fmt: skip
    plain = 500000.0 ** -(np.arange(0, 64, 2) / 64)
    wave, factors = 2 * np.pi / plain, np.ones(32, np.float32)
    for i, length in enumerate(wave):  # as llama.cpp's converter computes them
        if length > 8192 / 1:
            factors[i] = 8
        elif length >= 8192 / 4:
            smooth = (8192 / length - 1) / (4 - 1)
            factors[i] = 1 / ((1 - smooth) / 8 + smooth)
    for wrong in (False, True):
        file = tmp_path / f"{wrong}.gguf"
        writer = gguf.GGUFWriter(file, "llama")
        gguf_files.describe(writer, gguf_files.SHAPE | {"rope_theta": 500000.0}, {})
        writer.add_tensor("token_embd.weight", np.zeros((96, 256), np.float32))
        writer.add_tensor("rope_freqs.weight", factors[::-1].copy() if wrong else factors)
        gguf_files.finish(writer)
        if wrong:
            with pytest.raises(ConfigError, match="factors that Llama 3's rule does not give"):
                checkpoint.resolve(str(file))
            continue
        config = checkpoint.read_config(checkpoint.resolve(str(file)))
        assert config["rope_scaling"] | {"rope_theta": config["rope_theta"]} == rule
        assert config["tie_word_embeddings"]


def test_scaled_rope_is_read(tmp_path):
    more = {"qwen3.rope.scaling.type": "yarn", "qwen3.rope.scaling.factor": 4.0,
            "qwen3.rope.scaling.original_context_length": 64}  # fmt: skip
    file, _ = gguf_files.write(tmp_path, "qwen3", "F16", more, num_hidden_layers=1)
    config = checkpoint.read_config(checkpoint.resolve(str(file)))
    assert config["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert load(checkpoint.resolve(str(file))).spec.max_position == 256


@pytest.mark.parametrize(
    "arch, kind, metadata, message",
    [
        ("llama", "Q4_1", {}, "'model.*' is stored as Q4_1; served are Q8_0"),
        ("llama", "F16", {"llama.expert_count": 8}, "llama.expert_count 8 is not served"),
        ("llama", "F16", {"llama.rope.scaling.type": "longrope"}, "RoPE scaling 'longrope'"),
        ("llama", "F16", {"llama.attention.value_length": 32}, "value_length 32 with heads of 64"),
        ("llama", "F16", {"split.count": 3}, "one of 3 parts.*gguf-split --merge"),
        ("llama", "F16", {"tokenizer.ggml.model": "t5"}, "tokenizer 't5' is not served.*gpt2, llama"),
        ("gemma3", "F16", {}, "architecture 'gemma3' is not served.*llama, qwen2, qwen3"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(arch, kind, metadata, message, tmp_path):
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, arch)
    gguf_files.describe(writer, gguf_files.SHAPE, metadata)
    for name in ("token_embd.weight", "blk.0.attn_q.weight"):
        form = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quants.quantize(np.ones((96, 256), np.float32), form), raw_dtype=form)
    gguf_files.finish(writer)
    with pytest.raises(ConfigError, match=message):
        checkpoint.resolve(str(file))
    assert not list((tmp_path / "cache").glob("kvasir/gguf/*")), "nothing is left behind"


def test_a_damaged_file_is_refused(tmp_path):
    file, _ = gguf_files.write(tmp_path, "llama", "Q8_0", num_hidden_layers=1)
    data = file.read_bytes()
    for wrong in (b"no", b"GGUF" + bytes(40), data[:2000]):
        file.write_bytes(wrong)
        with pytest.raises(ConfigError, match="cannot be read as a GGUF file"):
            checkpoint.resolve(str(file))
    file.write_bytes(data[:-5000])  # the tensors are cut off
    with pytest.raises(ConfigError):
        load(checkpoint.resolve(str(file)))


def test_tokenizer_and_template_come_from_the_file(tmp_path):
    theirs = small_tokenizers.byte_level()
    fields = source_of(theirs, "gpt2", **{"ggml.pre": "gpt-2", "ggml.add_bos_token": True}).fields
    size = theirs.get_vocab_size()
    file, _ = gguf_files.write(tmp_path, "qwen3", "F16", fields, num_hidden_layers=1, vocab_size=size)
    folder = checkpoint.resolve(str(file))
    ours, text = Tokenizer.load(folder), "Hello there, world! naïve"
    want = [theirs.token_to_id("<s>"), *theirs.encode(text, add_special_tokens=False).ids]
    assert ours.encode(text) == want and "default" in ours.templates
    assert checkpoint.read_config(folder)["eos_token_id"] == ours.eos_token_id


def test_options_that_do_not_apply_are_refused(tmp_path):
    file, _ = gguf_files.write(tmp_path, "llama", "Q8_0", num_hidden_layers=1)
    folder = checkpoint.resolve(str(file))
    with pytest.raises(ConfigError, match="quantised already"):
        load_model(folder, json.loads((folder / "config.json").read_text()), weights="f8", **CPU)
