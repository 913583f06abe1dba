"""Latent attention made of grouped heads: exact where it must be, in the engine and in transformers, and refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from kvasir.convert import lowrank
from kvasir.convert.calibrate import Layers, Texts
from kvasir.convert.checkpoint import convert
from kvasir.convert.converter import load_converter
from kvasir.convert.converters import mla
from kvasir.errors import ConfigError
from kvasir.layers.mixers.gqa import Mixer
from kvasir.layers.rope import frequencies
from kvasir.models import checkpoint
from kvasir.models.families import build_spec
from kvasir.models.loader import load_model
from tests.checkpoints import VOCAB, write


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def texts(_path: Path | None = None) -> Texts:
    drawn = torch.Generator().manual_seed(5)
    ids = [torch.randint(1, VOCAB, (n,), generator=drawn).tolist() for n in (40, 33, 47, 25, 38, 44)]
    return Texts(ids[:4], ids[4:], "random")


def made(source: Path, home: Path, options: str) -> Path:
    spec = f"mla:{options}"
    convert(load_converter(spec), spec, source, home, texts=texts)
    return home


@torch.inference_mode()
def logits(folder: Path) -> list[torch.Tensor]:
    model = load_model(folder, checkpoint.read_config(folder), device="cpu", dtype=torch.float32, num_positions=64)
    layers = Layers(model, texts().held_out)
    layers.run()
    return [x for x, _ in layers.logits()]


def worst(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(first, second))


# All keys stay rotary, so nothing is lost at full rank: twice the head's width where there are two heads.
WHOLE = {"llama": 16, "llama_llama3": 8, "llama_bias": 12, "qwen2": 16, "qwen3": 32, "mistral": 16}
CHANGES = {
    "llama_llama3": dict(num_key_value_heads=1),
    "mistral": dict(sliding_window=None),
    "qwen3_window": dict(attention_bias=False),
}


@pytest.mark.parametrize("variant", [v if v in ("qwen2", "qwen3") else slow(v) for v in WHOLE])
def test_all_heads_rotary_at_full_rank_is_the_source(variant, tmp_path):
    source = write(tmp_path / "source", variant, **CHANGES.get(variant, {}))
    result = made(source, tmp_path / "mla", f"rank=parity,rope_dim={WHOLE[variant]},fold=1")
    assert worst(logits(source), logits(result)) < 1e-4


def test_interleaved_pairs_read_as_halves_fail(tmp_path, monkeypatch):
    """The control of the test above."""
    source = write(tmp_path / "source", "llama")
    monkeypatch.setattr(mla, "_interleaved", lambda columns: columns)
    assert worst(logits(source), logits(made(source, tmp_path / "mla", "rope_dim=16,fold=1"))) > 1e-2


class PartlyRotary(Mixer):
    """Grouped heads whose mixed keys rotate in a few columns only, by their definition: dense, and without a latent."""

    def forward(self, x_TE, angles, cache, backend, batch, norm=None, residual_TE=None, wanted_M=None):
        spec, mix = self.spec, self.mix
        heads_TXD = self.qkv(x_TE, norm).view(len(x_TE), -1, spec.head_dim)
        qk, v_TGD = heads_TXD.split_with_sizes(self.split, 1)
        if self.qk_norm is not None:
            qk = self.qk_norm(qk.contiguous())
        q_THD, k_TGD = (x.double() for x in qk.split_with_sizes((spec.num_heads, spec.num_kv_heads), 1))
        share, out, row = spec.num_heads // spec.num_kv_heads, [], 0
        for length in batch.lengths:
            rows = slice(row, row + length)
            turned = torch.outer(batch.positions[rows].double(), self.frequencies)
            cos, sin = turned.cos(), turned.sin()

            def turn(x, cos=cos, sin=sin):
                real, imag = x.chunk(2, -1)
                return torch.cat((real * cos - imag * sin, imag * cos + real * sin), -1)

            k_TN, heads = k_TGD[rows].flatten(1), []
            for head in range(spec.num_heads):
                group = slice(head // share * spec.head_dim, (head // share + 1) * spec.head_dim)
                q_TD = q_THD[rows, head]
                scores = turn(q_TD @ mix.rope[group]) @ turn(k_TN @ mix.rope).T
                scores = spec.scale * (scores + q_TD @ mix.rest[group] @ (k_TN @ mix.rest).T)
                if spec.softcap is not None:
                    scores = spec.softcap * torch.tanh(scores / spec.softcap)
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
                heads.append(scores.softmax(-1) @ v_TGD[rows, head // share].double())
            out.append(torch.stack(heads, 1).flatten(1))
            row += length
        return self.o(torch.cat(out).float(), residual_TN=residual_TE)


@torch.inference_mode()
def partly_rotary(folder: Path, rope_dim: int, fold: int) -> list[torch.Tensor]:
    """Logits of the source with the same mixtures of keys and no latent."""
    model = load_model(folder, checkpoint.read_config(folder), device="cpu", dtype=torch.float32, num_positions=64)
    layers, held = Layers(model, texts().calibration), Layers(model, texts().held_out)
    for index, layer in enumerate(layers.specs):
        if layer.mixer.window is None:
            gram, spec = layers.sums(index, ("kv",)).kv, layer.mixer
            size = spec.num_kv_heads * spec.head_dim
            mixer = PartlyRotary(spec, model.spec.hidden_size, model.place)
            for name, slot in model.blocks[index].mixer.slots().items():
                mixer.slots()[name].target.copy_(slot.target)
            mixer.mix = lowrank.mixing(gram[:size, :size], spec.num_kv_heads, spec.head_dim, rope_dim, fold)
            mixer.frequencies = frequencies(layer.rope).double()[:: spec.head_dim // rope_dim]
            layers.replace(index, layer, mixer)
        layers.advance(index)
    held.run()
    return [x for x, _ in held.logits()]


@pytest.mark.parametrize(
    "variant,rope_dim,fold",
    [
        ("llama", 4, 2),
        ("qwen3", 8, 2),
        ("gemma2_caps", 8, 2),
        slow("llama", 8, 1),
        slow("llama", 2, 4),
        slow("llama_linear", 8, 2),
        slow("llama_bias", 6, 2),
        slow("qwen2", 4, 4),
        slow("qwen3_window", 8, 2),
        slow("gemma2", 8, 4),
    ],
)
def test_full_rank_is_the_partly_rotary_model(variant, rope_dim, fold, tmp_path):
    """Biases, norms of heads, scaled frequencies, softcaps, tied heads and windows among them."""
    source = write(tmp_path / "source", variant, **CHANGES.get(variant, {}))
    result = made(source, tmp_path / "mla", f"rope_dim={rope_dim},fold={fold}")
    found, wanted = logits(result), partly_rotary(source, rope_dim, fold)
    assert worst(found, wanted) < 1e-4 * max(1.0, float(wanted[0].abs().max()))
    assert worst(found, logits(source)) > 1e-3, "something must be dropped"


def test_sliding_layers_stay(tmp_path):
    source = write(tmp_path / "source", "gemma2")
    config = json.loads((made(source, tmp_path / "mla", "rope_dim=8,fold=4,rank=16") / "config.json").read_text())
    spec = build_spec(config)
    kinds = {layer.mixer.kind for layer in spec.layers if layer.mixer.window is not None}
    assert kinds == {"gqa"} and [r is None for r in config["kv_lora_rank_per_layer"]] == [True, False] * 2


@torch.inference_mode()
@pytest.mark.parametrize(
    "variant,options", [("llama", "rank=12,rope_dim=4"), slow("llama_llama3", "rank=9,rope_dim=8")]
)
def test_transformers_loads_it_as_deepseek_v3(variant, options, tmp_path):
    import transformers

    folder = made(write(tmp_path / "source", variant), tmp_path / "mla", options)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    for ids, ours in zip(texts().held_out, logits(folder)):
        theirs = model.eval()(torch.tensor([ids])).logits[0, :-1]
        torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("codec", ["plain", slow("int8")])
def test_the_engine_serves_it_in_chunks_and_with_ranks_by_layer(codec, tmp_path):
    """Greedy tokens of the engine are those of whole texts, layer by layer."""
    from kvasir import LLM, SamplingParams

    source = write(tmp_path / "source", "qwen3", num_hidden_layers=4)
    folder = made(source, tmp_path / "mla", "rank=24,rope_dim=8,fold=2,alloc=relative,step=4")
    assert len(set(json.loads((folder / "config.json").read_text())["kv_lora_rank_per_layer"])) > 1
    prompts = texts().held_out
    with LLM(str(folder), device="cpu", skip_tokenizer_init=True, kv_codec=codec, max_num_batched_tokens=16) as llm:
        replies = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        )
    if codec == "plain":
        ids = [ids + [0] for ids in prompts]
        model = load_model(folder, checkpoint.read_config(folder), device="cpu", dtype=torch.float32, num_positions=64)
        layers = Layers(model, ids)
        layers.run()
        assert [r.outputs[0].token_ids for r in replies] == [[int(x[-1].argmax())] for x, _ in layers.logits()]


@pytest.mark.parametrize(
    "variant,options,words",
    [
        ("llama", "rank=25,rope_dim=8", ["rank=25 is above 24", "rank=parity"]),
        ("llama", "rope_dim=6", ["rope_dim=6 does not divide", "head_dim of 8", "8, 4, 2"]),
        ("llama", "rope_dim=24", ["does not divide"]),
        ("llama", "rope_dim=4,fold=3", ["fold=3", "[2, 4]"]),
        ("llama", "rank=8,rope_dim=4,alloc=relative", ["step=32", "smaller step"]),
        ("llama_yarn", "rope_dim=4", ["RoPE of kind 'yarn'", "llama3"]),
        ("olmo2", "rope_dim=4", ["one norm over all heads"]),
        ("qwen3_window", "rope_dim=4", ["norms of heads and biases"]),
        ("deepseek_v2", "rope_dim=4", ["latent attention already"]),
    ],
)
def test_what_is_refused(variant, options, words, tmp_path, monkeypatch):
    source = write(tmp_path / "source", variant)
    monkeypatch.setattr("kvasir.convert.calibrate.load_model", None)  # refused before anything is read
    with pytest.raises(ConfigError) as e:
        made(source, tmp_path / "mla", options)
    assert all(word in str(e.value) for word in words), str(e.value)
    assert not (tmp_path / "mla").exists()


@pytest.mark.parametrize("options", ["rank=0", "rank=half", "fold=-1", "rope_dim=3", "balance=0", "step=0"])
def test_bad_options(options):
    with pytest.raises(ConfigError, match=options.split("=")[0]):
        load_converter(f"mla:{options}")


def test_a_target_that_exists_and_missing_texts_are_refused(tmp_path):
    source = write(tmp_path / "source", "llama")
    (tmp_path / "mla").mkdir()
    (tmp_path / "mla" / "file").touch()
    with pytest.raises(ConfigError, match="exists already"):
        made(source, tmp_path / "mla", "rope_dim=4")
    with pytest.raises(ConfigError, match="texts=FILE"):
        convert(load_converter("mla:rope_dim=4"), "mla:rope_dim=4", source, tmp_path / "other")
