"""Healing: the trained model is the engine's, its losses fall, a resumed run is the whole run, and refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from kvasir.convert.calibrate import Layers
from kvasir.errors import ConfigError
from kvasir.models import checkpoint
from kvasir.models.loader import load_model, read_tensors
from kvasir_lab.healing import heal as healing
from kvasir_lab.healing.data import Corpus, cut
from kvasir_lab.healing.heal import Healing, Plan, divergence, heal
from kvasir_lab.healing.student import Student, Unnormed
from tests.checkpoints import VOCAB, write
from tests.convert.test_mla import CHANGES, made, slow, texts

RANK = {"qwen3": "rank=20,rope_dim=8", "llama": "rank=10,rope_dim=4", "gemma2_caps": "rank=20,rope_dim=8"}
RANK |= {"qwen3_moe": "rank=20,rope_dim=8", "mixtral": "rank=10,rope_dim=4"}
RANK |= {"llama_bias": "rank=10,rope_dim=4", "qwen2": "rank=10,rope_dim=4", "mistral": "rank=10,rope_dim=4"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A source and its conversion by variant, written when first asked for."""
    home = tmp_path_factory.mktemp("healing")

    def get(variant: str):
        source, result = home / variant, home / f"{variant}-mla"
        if not source.exists():
            write(source, variant, **CHANGES.get(variant, {}))
            made(source, result, f"{RANK[variant]},fold=auto")
        return source, result

    return get


def corpus() -> Corpus:
    ids = np.random.default_rng(3).integers(1, VOCAB, 100).astype(np.int32)
    return Corpus([ids], torch.from_numpy(np.stack([ids[:40], ids[40:80]]).astype(np.int64)))


VARIANTS = ["qwen3", "qwen3_moe", *map(slow, ("llama", "mixtral", "gemma2_caps", "llama_bias", "qwen2", "mistral"))]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_student_computes_what_the_engine_serves(variant, folders):
    for folder in folders(variant):
        config = checkpoint.read_config(folder)
        model = load_model(folder, config, device="cpu", dtype=torch.float32, num_positions=64)
        layers = Layers(model, texts().held_out)
        layers.run()
        student = Student.load(folder, config, 64)
        for ids, (wanted, _) in zip(texts().held_out, layers.logits()):
            found = student(torch.tensor([ids]))[0, :-1].detach()
            assert float((found - wanted).abs().max()) < 1e-4
        for name, tensor in read_tensors(folder):
            found = student.stored()[name]
            assert torch.allclose(found, tensor, rtol=1e-6, atol=0), f"{name} is written as it was read"


def test_a_latent_without_its_scale_fails(folders, monkeypatch):
    """The control of the test above: DeepSeek's norm over the latent at an ordinary size."""
    _, folder = folders("llama")
    config, ids = checkpoint.read_config(folder), torch.tensor([texts().held_out[0]])
    right = Student.load(folder, config, 64)(ids)
    assert Student.load(folder, config, 64).kept.scales, "the form that this control is about"
    monkeypatch.setattr(Unnormed, "of", classmethod(lambda cls, spec, tensors: cls({})))
    found = Student.load(folder, config, 64)
    name = next(n for n in found.places if n.endswith("kv_a_proj_with_mqa.weight"))
    with torch.no_grad():
        found.weights[found.places[name]][: found.spec.layers[0].mixer.rank] *= 2.0**30
    assert float((found(ids) - right).detach().abs().max()) > 1e-2


@pytest.mark.parametrize("variant", ["qwen3", slow("llama")])
def test_losses_fall_and_a_resumed_run_is_the_whole_run(variant, folders, tmp_path, monkeypatch):
    monkeypatch.setattr(healing, "RATE", 1e-3)  # these models are random, and far from any answer
    monkeypatch.setattr(healing, "BLOCK_RATE", 3e-3)
    source, converted = folders(variant)
    plan = Plan(steps=12, rows=2)
    whole = heal(converted, tmp_path / "whole", source, plan, corpus)
    first, last = whole["held_out"]
    assert last["kl"] < 0.95 * first["kl"] and last["loss"] < first["loss"]
    assert heal(converted, tmp_path / "parts", source, plan, corpus, stop_after=4) is None
    with pytest.raises(ConfigError, match="--resume"):
        heal(converted, tmp_path / "parts", source, plan, corpus)
    with pytest.raises(ConfigError, match="other models, texts, steps or seed"):
        heal(converted, tmp_path / "parts", source, Plan(steps=12, rows=2, seed=1), corpus, resume=True)
    assert heal(converted, tmp_path / "parts", source, plan, corpus, resume=True, stop_after=3) is None
    parts = heal(converted, tmp_path / "parts", source, plan, corpus, resume=True)
    assert parts["held_out"] == whole["held_out"]
    one, other = (dict(read_tensors(tmp_path / name)) for name in ("whole", "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    changed = [name for name, tensor in read_tensors(converted) if not torch.equal(tensor, one[name])]
    assert any("self_attn" in name for name in changed) and any("mlp" in name for name in changed)
    assert json.loads((tmp_path / "whole" / "conversion.json").read_text())["teacher"] == source.name
    checkpoint.read_config(tmp_path / "whole")
    load_model(tmp_path / "whole", checkpoint.read_config(tmp_path / "whole"), device="cpu", dtype=torch.float32)
    assert not (tmp_path / "parts" / healing.STATE).exists()


def test_the_first_stage_trains_latents_alone(folders):
    source, converted = folders("qwen3")
    run = Healing(converted, source, corpus(), Plan(steps=6, rows=1), "cpu")
    before = run.student.stored()
    run.step()
    after = run.student.stored()
    changed = {name.split("self_attn.")[-1] for name in after if not torch.equal(before[name], after[name])}
    assert changed and not any(name.startswith(("model.", "o_proj")) or "norm" in name for name in changed), changed


def test_the_divergence_over_all_tokens_is_the_whole_one():
    """The divergence with all other tokens as one class is smaller, never negative, and zero for equal answers."""
    drawn = torch.Generator().manual_seed(0)
    p, q = (torch.randn(5, 40, generator=drawn) for _ in range(2))
    whole = torch.nn.functional.kl_div(q.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="sum") / 5
    assert torch.allclose(divergence(q, p, 64), whole) and torch.allclose(divergence(p, p, 8), torch.zeros(()))
    assert 0 < float(divergence(q, p, 8)) < float(whole)


# ------------------------------------------------------------------------------------------------------------- refusals


def test_what_cannot_be_healed_is_refused_before_anything_is_read(folders, tmp_path, monkeypatch):
    source, converted = folders("qwen3")
    other, _ = folders("llama")
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    experts = write(tmp_path / "experts", "qwen3_moe")
    monkeypatch.setattr(Student, "load", None)
    for (src, dst, teacher, resume), why in {
        (source, tmp_path / "new", source, False): "no latent attention",
        (converted, full, source, False): "exists already",
        (converted, tmp_path / "new", source, True): "nothing to resume",
        (converted, tmp_path / "new", other, False): "was converted from",
        (converted, tmp_path / "new", converted, False): "latent attention itself",
        (converted, tmp_path / "new", experts, False): "was converted from",
    }.items():
        with pytest.raises(ConfigError, match=why):
            heal(src, dst, teacher, Plan(steps=2), lambda: None, resume=resume)
    assert not (tmp_path / "new").exists()
    with pytest.raises(ConfigError, match="at least 2"):
        Plan(steps=1)
    with pytest.raises(ConfigError, match="needs at least"):
        cut(np.arange(5), "--texts short")
