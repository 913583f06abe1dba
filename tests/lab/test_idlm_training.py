"""Training of I-DLM at a tiny size: losses fall, resuming is exact to the bit, and folders hold what is served."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from kvasir.errors import ConfigError
from kvasir.learn.walk import forwards, walk
from kvasir.models.checkpoint import SIDECAR
from kvasir.models.peft import PREFIX
from kvasir_lab import export
from kvasir_lab.drafters import data as drafter_data
from kvasir_lab.drafters.gated_adapter import WEIGHTS, GatedAdapter
from kvasir_lab.drafters.kind import DRAFTERS, MODELS
from kvasir_lab.drafters.target import Target
from kvasir_lab.drafters.training import STATE, Plan, Trainer, main
from kvasir_lab.model import Model, Shape
from kvasir_lab.tokenizer import shipped_tokenizer
from kvasir_lab.trained_models.idlm import MASK
from tests.lab.test_drafter_training import TINY

SHAPE = Shape(dim=32, layers=2, ffn=48, heads=2, kv_heads=1, head_dim=16, positions=160)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def target() -> Target:
    model = Model(SHAPE, 1)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(12)
    return Target(model, "tiny")


@pytest.fixture(scope="module")
def texts(target) -> drafter_data.Texts:
    """The model's own greedy continuations of three tokens."""
    ids = torch.arange(10, 34).view(8, 3)
    with torch.no_grad():
        for _ in range(21):
            ids = torch.cat([ids, target.model(ids)[:, -1].argmax(-1, keepdim=True)], 1)
    return drafter_data.Texts(
        ids.flatten().numpy().astype(np.int32), np.arange(9) * 24, np.full(8, 3), np.arange(8) % 2, ("a", "b")
    )


def trainer(package, spec, target, texts, steps) -> Trainer:
    return Trainer(target, texts, Plan(spec, package, steps=steps, lr=4e-3))


@pytest.mark.parametrize("package, spec", [(DRAFTERS, "idlm"), (MODELS, "idlm")])
def test_the_loss_falls_and_a_resumed_run_goes_on_to_the_bit(package, spec, target, texts, tmp_path):
    """A run has stride 2 for its first third, so both strides are trained on both sides of the break."""
    whole = trainer(package, spec, target, texts, 12)
    before = float(whole.kind.losses(next(whole.stream()), 0, 0.9)[0].detach())
    stream = whole.stream()
    for step in range(12):
        whole.step(next(stream))
        if step == 2:
            whole.save(tmp_path)
    assert float(whole.kind.losses(next(whole.stream()), 0, 0.9)[0].detach()) < 0.97 * before
    second = trainer(package, spec, target, texts, 12)
    second.restore(tmp_path)
    stream = second.stream()
    for _ in range(9):
        second.step(next(stream))
    pairs = zip(whole.kind.module.parameters(), second.kind.module.parameters())
    assert all(torch.equal(a, b) for a, b in pairs)
    with pytest.raises(ConfigError, match="another"):
        trainer(package, "idlm:stride=2", target, texts, 12).restore(tmp_path)


def test_an_adapter_that_learnt_the_replies_is_accepted(target, texts):
    t = trainer(DRAFTERS, "idlm:rank=8", target, texts, 60)
    before = t.kind.measure(texts)
    stream, frozen = t.stream(), [p.clone() for p in target.model.parameters()]
    for _ in range(60):
        t.step(next(stream))
    after = t.kind.measure(texts)
    assert after["tokens_per_forward"] > max(1.3, before["tokens_per_forward"])
    assert 1 < after["chain"]["tokens_per_forward"] <= after["tokens_per_forward"]
    assert all(torch.equal(a, b) for a, b in zip(frozen, target.model.parameters())), "the base model is frozen"


def test_forwards_of_the_two_layouts():
    """Anchor 3 is known. In a chain, a forward that rejects a draft leaves none for the next."""
    right = np.zeros((2, 12), bool)
    right[0, [2, 5, 8]] = True
    right[1, [2, 8]] = True
    assert list(forwards(right, 3, 12)) == [(2, 2, 2), (5, 2, 1), (7, 1, 0), (8, 2, 2)]
    # Row 5 verifies and rejects, so row 7 is cold; its masks draft for row 8.
    assert list(forwards(right, 3, 12, chain=True)) == [(2, 2, 2), (5, 2, 1), (7, 0, 0), (8, 2, 2)]
    assert list(forwards(np.zeros((2, 8), bool), 3, 8, chain=True)) == [(2, 1, 0), (3, 0, 0), (4, 1, 0), (5, 0, 0)]
    assert walk(right, 3, 12)[0] == 4 and list(forwards(right, 11, 12, chain=True)) == []


def test_options_that_mean_nothing_are_refused():
    for spec, why in (
        ("idlm:stride=1", "from 2 to 16"),
        ("idlm:rank=0", "from 1 to 256"),
        ("idlm:objective=mse", "kl"),
    ):
        with pytest.raises(ConfigError, match=why):
            Plan(spec).load()
    with pytest.raises(ConfigError, match="no trained_models named 'idln'.*idlm"):
        Plan("idln", MODELS).load()


def test_the_replies_of_the_tasks_can_be_trained_on():
    tokenizer = shipped_tokenizer()
    texts = drafter_data.written_texts(tokenizer, TINY, 8, 0, 40, 160)
    assert 4 <= len(texts) <= 8 and texts.bounds[-1] == len(texts.ids)
    for i, begin in enumerate(texts.begins.tolist()):
        reply = texts.text(i)[begin:]
        assert 1 < len(reply) <= 40 and reply[-1] == tokenizer.token_to_id("<|im_end|>")


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Return a function that trains from a tiny checkpoint for three steps."""
    monkeypatch.setitem(drafter_data.BATCH_TOKENS, "cpu", 256)
    export.export(Model(SHAPE, 1), shipped_tokenizer(), tmp_path / "model")

    def run(package: str, spec: str):
        plan = Plan(spec, package, steps=3, replies=8, held_out=4, reply_tokens=6, mix=TINY)
        main(plan, str(tmp_path / "model"), tmp_path / "out", device="cpu", command=f"kvasir train {spec}")
        return tmp_path / "out", json.loads((tmp_path / "out" / "training.json").read_text())

    return run


def test_the_adapters_folder(made):
    out, record = made(DRAFTERS, "idlm:rank=4,objective=ce")
    config, model = json.loads((out / "config.json").read_text()), export.load(out.parent / "model")
    assert {name: config[name] for name in ("kind", "stride", "mask_token_id", "rank", "alpha")} == {
        "kind": "idlm",
        "stride": 4,
        "mask_token_id": None,
        "rank": 4,
        "alpha": 8.0,
    }
    assert config["target"]["weights"] == Target(model, "model").facts["weights"]
    from safetensors.torch import load_file

    tensors = load_file(out / WEIGHTS)
    names = {f"self_attn.{x}_proj" for x in "qkvo"} | {f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    assert set(tensors) == {"mask_embedding"} | {
        f"{PREFIX}model.layers.{i}.{name}.lora_{ab}.weight" for i in range(2) for name in names for ab in "AB"
    }
    assert tensors["mask_embedding"].shape == (32,)
    assert tensors[f"{PREFIX}model.layers.1.mlp.down_proj.lora_B.weight"].abs().max() > 0
    back = GatedAdapter.read(out, model)
    for name, p in back.named_parameters():
        assert torch.equal(p, p.bfloat16().float()), name
    assert torch.equal(back.b[13].bfloat16(), tensors[f"{PREFIX}model.layers.1.mlp.down_proj.lora_B.weight"])
    assert list(record["history"][-1]) == ["step", "seconds", "ce"] and record["spec"] == "idlm:rank=4,objective=ce"
    text = (out / "README.md").read_text()
    assert "--drafter idlm:model=FOLDER" in text and "alpha_introspective" in text and not (out / STATE).exists()


@pytest.mark.slow
def test_the_script_for_a_gpu_runs_on_a_cpu(tmp_path):
    """Sampling, an adapter and a whole model, as `tools/train_idlm.sh` trains them, and the result that it stores."""
    export.export(Model(Shape(**{**vars(SHAPE), "positions": 1400}), 1), shipped_tokenizer(), tmp_path / "model")
    script = Path(__file__).parents[2] / "tools" / "train_idlm.sh"
    settings = {"PARTS": "kl converted", "DEVICE": "cpu", "REPLIES": "8", "OMP_NUM_THREADS": "1"}
    command = [script, tmp_path / "out", tmp_path / "model", "0.02", "0.02"]
    subprocess.run(command, check=True, env=os.environ | settings, timeout=600)
    found = json.loads((tmp_path / "out" / "idlm.json").read_text())
    assert [arm["name"] for arm in found["arms"]] == ["kl", "converted"]
    assert all(arm["metrics"]["acceptance"]["chain"]["forwards"] for arm in found["arms"])


def test_the_converted_models_folder(made):
    out, record = made(MODELS, "idlm:stride=2")
    assert json.loads((out / SIDECAR).read_text()) == {"kind": "idlm", "mask_token_id": MASK, "stride": 2}
    before, after = export.load(out.parent / "model"), export.load(out)
    assert any(not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters()))
    assert (out / "tokenizer.json").is_file() and record["parameters"] == before.num_parameters
    assert "--drafter idlm`" in (out / "README.md").read_text()
