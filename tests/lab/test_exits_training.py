"""Training of early exits: an exit is the truncated model, the weights are LayerSkip's, and good exits are found."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from kvasir.errors import ConfigError
from kvasir_lab import export
from kvasir_lab.drafters import data as drafter_data
from kvasir_lab.drafters.data import Texts, batches
from kvasir_lab.drafters.kind import MODELS
from kvasir_lab.drafters.target import Target
from kvasir_lab.drafters.training import Plan, Trainer, main
from kvasir_lab.model import Model, Shape
from kvasir_lab.tokenizer import shipped_tokenizer
from tests.lab.test_drafter_training import TINY

SHAPE = Shape(dim=32, layers=4, ffn=48, heads=2, kv_heads=1, head_dim=16, positions=160)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def target() -> Target:
    model = Model(SHAPE, 1)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(12)
        for p in model.model.layers.parameters():
            p.mul_(3)
    return Target(model, "tiny")


@pytest.fixture(scope="module")
def texts() -> Texts:
    rng = np.random.default_rng(0)
    parts = [np.resize(rng.integers(10, 40, 5), int(n)) for n in rng.integers(6, 40, 16)]
    return Texts(
        np.concatenate(parts).astype(np.int32),
        np.cumsum([0, *map(len, parts)]),
        np.full(16, 3),
        np.arange(16) % 2,
        ("a", "b"),
    )


def trainer(target, texts, options: str = "", steps: int = 8) -> Trainer:
    return Trainer(target, texts, Plan(f"exits:{options}", MODELS, steps=steps, lr=4e-3))


def truncated(model: Model, layers: int) -> Model:
    """The model of the first layers alone."""
    found = Model(Shape(**{**vars(SHAPE), "layers": layers}))
    found.load_state_dict(
        {
            name: p
            for name, p in model.state_dict().items()
            if not name.startswith("model.layers.") or int(name.split(".")[2]) < layers
        }
    )
    return found


@torch.no_grad()
def test_an_exit_is_the_truncated_model_and_the_loss_is_the_sum_over_exits(target, texts):
    kind = trainer(target, texts, "curriculum=all,dropout=0,scale=0.5").kind
    batch = next(batches(texts, 512, 0, 0))
    total, shown = kind.losses(batch, 3, 0.5)
    # Weights of layers 0 to 3: 0.5 times 0, 1, 3, and 3 + 0.5 times 3 for the last.
    weights = np.array([0, 0.5, 1.5, 4.5]) / 6.5
    np.testing.assert_allclose(kind.weights(3, 0.5), weights)
    wanted = []
    for layers in range(1, 5):
        logits, sums, rows = truncated(target.source, layers)(batch.ids), 0.0, 0
        for i, (begin, length) in enumerate(zip(batch.begins.tolist(), batch.lengths.tolist())):
            sums += float(
                F.cross_entropy(logits[i, begin - 1 : length - 1], batch.ids[i, begin:length], reduction="sum")
            )
            rows += length - begin
        wanted.append(sums / rows)
    assert shown[0] == 0 and shown[1:].tolist() == pytest.approx(wanted[1:], rel=1e-4)
    assert total.item() == pytest.approx(float(weights @ wanted), rel=1e-4)
    assert len({round(x, 3) for x in wanted}) == 4, "an exit one layer off would be found"
    dropped = trainer(target, texts, "curriculum=all,dropout=0.9,scale=0.5").kind.losses(batch, 3, 0.5)[0]
    assert dropped.item() != pytest.approx(total.item(), rel=1e-3)


def test_the_curricula(target, texts):
    turns = trainer(target, texts, "rotation=3").kind
    enabled = [np.flatnonzero(turns.weights(step, 0.5)).tolist() for step in range(3)]
    assert enabled == [[3], [2, 3], [1, 3]], "layer 0 has no weight; the last layer is always trained"
    sinks = trainer(target, texts, "curriculum=gradual").kind
    enabled = [np.flatnonzero(sinks.weights(0, share)).tolist() for share in (0, 0.13, 0.3, 0.5, 1)]
    assert enabled == [[3], [2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]]
    assert all(turns.weights(step, 0.1).sum() == pytest.approx(1) for step in range(5))


def test_layers_are_left_out_more_often_the_later_they_are(target, texts):
    kind = trainer(target, texts, "dropout=0.6").kind
    kept = torch.stack([kind.kept(step, 64) for step in range(60)]).float().mean((0, 2))
    assert kept.tolist() == pytest.approx([1 - 0.6 * (2 ** (layer / 3) - 1) for layer in range(4)], abs=0.03)
    assert torch.equal(kind.kept(5, 8), kind.kept(5, 8)) and kept[0] == 1


def test_exits_improve_and_a_resumed_run_goes_on_to_the_bit(target, texts, tmp_path):
    whole = trainer(target, texts, steps=24)
    before = whole.kind.measure(texts)
    stream = whole.stream()
    for step in range(24):
        whole.step(next(stream))
        if step == 15:
            whole.save(tmp_path)
    after = whole.kind.measure(texts)
    assert after["exits"][2]["right"] > max(0.15, before["exits"][2]["right"])
    second = trainer(target, texts, steps=24)
    second.restore(tmp_path)
    stream = second.stream()
    for _ in range(8):
        second.step(next(stream))
    assert all(torch.equal(a, b) for a, b in zip(whole.kind.module.parameters(), second.kind.module.parameters()))


def test_a_model_whose_upper_layers_do_nothing_exits_early(texts):
    """Layers 2 to 4 add nothing, so the exit after the first is always right, and the cheapest."""
    model = Model(SHAPE, 1)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(12)
        for layer in model.model.layers[1:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        ids = torch.arange(10, 22).view(4, 3)
        for _ in range(21):
            ids = torch.cat([ids, model(ids)[:, -1].argmax(-1, keepdim=True)], 1)
    own = Texts(ids.flatten().numpy().astype(np.int32), np.arange(5) * 24, np.full(4, 3), np.zeros(4, int), ("own",))
    found = trainer(Target(model, "tiny"), own).kind.measure(own)
    assert all(row["right"] == 1 for row in found["exits"].values())
    head = found["head_layers"]
    # 20 tokens after the first of each reply: four forwards of five. Longer drafts reach beyond the end.
    assert found["forwards"] == 16 and found["best"] == {"exit": 1, "drafts": 4}
    assert found["exits"][1]["of_plain"] == pytest.approx((4 * (1 + head) + 4 + head) * 4 / 20 / (4 + head))
    assert found["exits"][3]["of_plain"] > found["exits"][1]["of_plain"]


def test_the_folder_and_bad_options(tmp_path, monkeypatch):
    monkeypatch.setitem(drafter_data.BATCH_TOKENS, "cpu", 256)
    export.export(Model(SHAPE, 1), shipped_tokenizer(), tmp_path / "model")
    plan = Plan("exits", MODELS, steps=2, replies=8, held_out=4, reply_tokens=6, mix=TINY)
    main(plan, str(tmp_path / "model"), tmp_path / "out", device="cpu", command="kvasir train exits")
    assert len(json.loads((tmp_path / "out" / "training.json").read_text())["acceptance"]["exits"]) == 3
    assert "--drafter layer_skip" in (tmp_path / "out" / "README.md").read_text()
    assert export.load(tmp_path / "out").shape == SHAPE
    for options in ("scale=0", "dropout=1", "rotation=-1"):
        with pytest.raises(ConfigError, match="dropout from 0"):
            Plan(f"exits:{options}", MODELS).load()
