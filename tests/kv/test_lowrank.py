"""The codec `lowrank`: at full rank the plain cache, below it the projected keys and values, and refusals.

Its plain reference is a decoder whose keys, before RoPE, and values are projected. Exact mode gives the same bits for
any chunk, prefix hit and preemption.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from kvasir.convert.calibrate import Layers
from kvasir.convert.checkpoint import convert
from kvasir.convert.converter import load_converter
from kvasir.convert.converters import lowrank as converter
from kvasir.errors import ConfigError
from kvasir.kv.codec import Codec
from kvasir.kv.latents import DESCRIPTION, LatentLayer, Maps
from kvasir.layers.mixers.gqa import Mixer
from kvasir.models import checkpoint
from kvasir.models.loader import load_model
from kvasir.technique import load
from tests.checkpoints import write
from tests.convert.test_mla import slow, texts
from tests.engine.driver import Driver
from tests.latents import write_latents

CHANGES = {"mistral": dict(sliding_window=None)}


def latents(source, home, options: str):
    spec = f"lowrank:{options}"
    return convert(load_converter(spec), spec, source, home, texts=texts)


def codec(folder) -> Codec:
    return load("kvasir.kv.codecs", f"lowrank:folder={folder}", Codec)


def worst(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The largest difference, as a share of the largest logit."""
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted)) / max(float(b.abs().max()) for b in wanted)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Checkpoints by variant, written when first asked for."""
    home = tmp_path_factory.mktemp("sources")

    def get(variant: str):
        if not (home / variant).exists():
            write(home / variant, variant, **CHANGES.get(variant, {}))
        return home / variant

    return get


class Projected(Mixer):
    """The mode by its definition: keys before RoPE, and values, are projected, and cached as they are."""

    def _write(self, heads_TXD, angles, cache, batch):
        heads, groups, dim = self.spec.num_heads, self.spec.num_kv_heads, self.spec.head_dim
        x = heads_TXD.clone()
        if self.qk_norm is not None:
            x[:, : heads + groups] = self.qk_norm(x[:, : heads + groups].contiguous())
        for first, down, up in self.maps:
            side = x[:, first : first + groups].flatten(1).double()
            x[:, first : first + groups] = (side @ down.T.double() @ up.T.double()).view(-1, groups, dim).float()
        norm, self.qk_norm = self.qk_norm, None
        q_THD = super()._write(x, angles, cache, batch)
        self.qk_norm = norm
        return q_THD


@torch.inference_mode()
def logits(source, folder=None, projected=False) -> list[torch.Tensor]:
    """Logits of the source with its cache, with latents, or by the definition of these."""
    model = load_model(source, checkpoint.read_config(source), device="cpu", dtype=torch.float32, num_positions=64)
    layers = Layers(model, texts().held_out)
    if folder is not None:
        used = codec(folder)
        used.attach(model.cached_layers(), torch.device("cpu"), torch.float32, False)
        layers.codecs = {i: used.layer(i) for i in range(len(layers.specs))}
    for index, layer in enumerate(layers.specs if projected else ()):
        own = layers.codecs.pop(index)
        if isinstance(own, LatentLayer):
            mixer = Projected(layer.mixer, model.spec.hidden_size, model.place)
            for name, slot in model.blocks[index].mixer.slots().items():
                mixer.slots()[name].target.copy_(slot.target)
            first, maps = layer.mixer.num_heads, own.maps
            mixer.maps = (
                (first, maps.k_down, maps.k_up),
                (first + layer.mixer.num_kv_heads, maps.v_down, maps.v_up.flatten(0, 1)),
            )
            layers.replace(index, layer, mixer)
    layers.run()
    return [x for x, _ in layers.logits()]


VARIANTS = ["qwen3", *map(slow, ("gemma2_caps", "llama", "llama_bias", "qwen2", "mistral", "gemma3"))]


@pytest.mark.parametrize("variant", VARIANTS)
def test_full_rank_is_the_plain_cache(variant, sources, tmp_path):
    source = sources(variant)
    latents(source, tmp_path / "latents", "rank=parity")
    assert worst(logits(source), logits(source, tmp_path / "latents")) < 1e-5


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("options", ["rank=8", slow("rank=8,metric=score,alloc=relative,step=4")])
def test_below_full_rank_it_is_the_projection(variant, options, sources, tmp_path):
    source, folder = sources(variant), tmp_path / "latents"
    latents(source, folder, options)
    found, wanted = logits(source, folder), logits(source, folder, projected=True)
    assert worst(found, wanted) < 1e-5
    assert worst(found, logits(source)) > 1e-3, "a rank of 8 loses something"


def test_another_position_or_another_layers_latents_fail(sources, tmp_path, monkeypatch):
    """The controls: keys that are turned by the next position, and latents of another layer, give other logits."""
    source, folder = sources("qwen3"), tmp_path / "latents"
    latents(source, folder, "rank=8")
    wanted, kept = logits(source, folder, projected=True), LatentLayer.write
    with monkeypatch.context() as patch:
        patch.setattr(LatentLayer, "write", lambda *args: kept(*args[:-1], args[-1] * 2))
        assert worst(logits(source, folder), wanted) > 1e-3
    first = Maps.of
    seen = []
    monkeypatch.setattr(Maps, "of", lambda *args: seen.append(first(*args)) or replace(seen[-1], k_up=seen[0].k_up))
    assert worst(logits(source, folder), wanted) > 1e-3


def test_the_right_metric_is_the_smallest_error():
    """No other projection of keys is closer in outputs than theirs; the score's is closer in scores."""
    from kvasir.convert import lowrank

    drawn = torch.Generator().manual_seed(1)
    k, q = (torch.randn(n, 12, generator=drawn, dtype=torch.float64) @ torch.randn(12, 12, generator=drawn).double()
            for n in (300, 40))  # fmt: skip
    by = {name: lowrank.side(k.T @ k, 5, w) for name, w in (("output", None), ("score", q.T @ q))}
    loss = {n: [float((x @ (k - k @ s.down @ s.up.T).T).norm()) for x in (torch.eye(12).double(), q)]
            for n, s in by.items()}  # fmt: skip
    assert loss["output"][0] < loss["score"][0] and loss["score"][1] < loss["output"][1]


def test_queries_are_averaged_over_all_angles():
    """Moments of turned queries, over every angle of two frequencies, are what `turned` says."""
    from kvasir.convert import lowrank

    q = torch.randn(1, 6, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    moment, mean = q @ q.mT, torch.zeros(1, 6, 6, dtype=torch.float64)
    for step in range(720):
        turn = torch.eye(6, dtype=torch.float64)
        for pair, speed in ((0, 1), (1, 3)):
            a = torch.tensor(step * speed * torch.pi / 360, dtype=torch.float64)
            for row, column, value in ((0, 0, a.cos()), (0, 2, -a.sin()), (2, 0, a.sin()), (2, 2, a.cos())):
                turn[pair + row, pair + column] = value
        mean += turn @ moment @ turn.T / 720
    assert torch.allclose(lowrank.turned(moment, 4)[:, :4, :4], mean[:, :4, :4], atol=1e-9)


# -------------------------------------------------------------------------------------------------------- in the engine


@pytest.fixture(scope="module")
def nano(tmp_path_factory) -> str:
    spec = checkpoint.read_config(checkpoint.resolve("nano"))
    heads, dim = spec["num_key_value_heads"], spec["head_dim"]
    half = heads * dim // 2
    folder = write_latents(
        tmp_path_factory.mktemp("nano") / "latents", [(half, half - 8)] * spec["num_hidden_layers"], heads, dim
    )
    return f"lowrank:folder={folder}"


def outputs(spec: str, **options) -> dict:
    driver = Driver(kv_codec=spec, max_model_len=112, **{"num_pages": 64, "page_slots": None} | options)
    prompt = [310 + (3 * i) % 7 for i in range(70)]
    for name, params in (("a", dict(temperature=0.0)), ("b", dict(seed=5)), ("c", dict(n=2, seed=6))):
        driver.run([driver.request(name, prompt[: 40 + len(name)], max_tokens=9, logprobs=0, **params)],
                   preempt_every=options.get("max_num_batched_tokens") == 7 and 3)  # fmt: skip
    assert not driver.errors
    found = {k: (o.tokens, [p.logprob for p in o.logprobs]) for k, o in driver.outputs.items()}
    driver.close()
    return found


def test_chunks_prefix_hits_and_preemption_change_no_bit(nano):
    wanted = outputs(nano, enable_prefix_caching=False)
    for options in (dict(max_num_batched_tokens=7, page_slots=16), dict(num_pages=9, page_slots=16)):
        assert outputs(nano, **options) == wanted, options
    assert outputs("plain") != wanted


def test_the_prefix_key_holds_the_latents(nano, tmp_path):
    other = write_latents(tmp_path / "other", [(16, 16)] * 2, 2, 16, seed=9)
    prints = {codec(nano.partition("=")[2]).fingerprint(), codec(other).fingerprint()}
    assert len(prints) == 2


# ------------------------------------------------------------------------------------------------------------- refusals


def test_refusals_name_the_fix(nano, tmp_path):
    made = "kvasir convert lowrank"
    with pytest.raises(ConfigError, match=made):
        Driver(kv_codec="lowrank")
    with pytest.raises(ConfigError, match=made):
        load("kvasir.kv.codecs", f"lowrank:folder={tmp_path}", Codec)
    broken = write_latents(tmp_path / "broken", [(16, 16)], 2, 16)
    with pytest.raises(ConfigError, match="another model"):
        Driver(kv_codec=f"lowrank:folder={broken}")
    (broken / DESCRIPTION).write_text(json.dumps({"ranks": [[0, 1]], "heads": [[2, 16]], "digest": ""}))
    with pytest.raises(ConfigError, match="holds no calibration"):
        codec(broken)


@pytest.mark.parametrize(
    "options,variant,why",
    [
        ("rank=33", "qwen3", "nothing is lost"),
        ("rank=8,alloc=relative", "qwen3", "smaller step"),
        ("rank=x", "qwen3", "whole number"),
        ("step=0", "qwen3", "at least 1"),
        ("rank=8", "deepseek_v3", "latents already"),
    ],
)
def test_what_cannot_be_converted_is_refused_before_anything_is_read(
    options, variant, why, sources, tmp_path, monkeypatch
):
    source = sources(variant)
    monkeypatch.setattr("kvasir.convert.checkpoint.read_tensors", None)
    monkeypatch.setattr("kvasir.convert.calibrate.Run.open", None)
    with pytest.raises(ConfigError, match=why):
        latents(source, tmp_path / "latents", options)


def test_the_converters_files_are_the_codecs():
    from kvasir.kv import latents as names

    assert converter.ToLowRank.files == (names.WEIGHTS, names.DESCRIPTION)
