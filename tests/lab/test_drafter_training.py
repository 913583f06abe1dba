"""Drafter training at a tiny size: losses are exact and fall, resuming is exact to the bit, and the command works."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from kvasir.errors import ConfigError
from kvasir.learn.walk import walk
from kvasir.speculation import heads
from kvasir.speculation.head_kinds.ppd import Prompts, PromptShape
from kvasir_lab import export
from kvasir_lab.drafters import data as drafter_data
from kvasir_lab.drafters.data import Texts, batches, load_texts, mixture, save_texts
from kvasir_lab.drafters.target import Target
from kvasir_lab.drafters.training import STATE, Plan, Trainer, load_target, main
from kvasir_lab.lookup import load_task
from kvasir_lab.model import Model, Shape
from kvasir_lab.tokenizer import shipped_tokenizer

SHAPE = Shape(dim=32, layers=3, ffn=48, heads=2, kv_heads=1, head_dim=16, positions=160)
TINY = {"chain:modulus=5,max_factor=2,min_steps=1,max_steps=1": 0.5, "countdown": 0.5}
KINDS = ("medusa", "eagle", "ppd")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def target() -> Target:
    model = Model(SHAPE, 1)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(12)  # a model with strong preferences
    return Target(model, "tiny")


@pytest.fixture(scope="module")
def texts() -> Texts:
    """Repetitive texts of several lengths."""
    rng = np.random.default_rng(0)
    parts = [np.resize(rng.integers(10, 40, 5), int(n)) for n in rng.integers(6, 40, 24)]
    sizes = [len(part) for part in parts]
    return Texts(
        np.concatenate(parts).astype(np.int32), np.cumsum([0, *sizes]), np.full(24, 3), np.arange(24) % 2, ("a", "b")
    )


def trainer(target, texts, kind, **options) -> Trainer:
    return Trainer(target, texts, Plan(kind, **({"steps": 40, "lr": 0.1 if kind == "ppd" else 6e-3} | options)))


@pytest.mark.parametrize("kind", KINDS[:2])
def test_the_losses_are_those_of_each_row_alone(kind, target, texts):
    """Compare with plain loops: one text, one root, one step at a time."""
    t = trainer(target, texts, kind)
    with torch.no_grad():
        for p in t.kind.module.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    batch = next(batches(texts, 256, 0, 0))
    assert len(batch.ids) > 1
    found = t.losses(batch)[1]
    wanted: list[list[float]] = [[] for _ in found]
    with torch.no_grad():
        for ids, begin, length in zip(batch.ids, batch.begins.tolist(), batch.lengths.tolist()):
            features, normed, following = target.features(ids[None, :length], t.kind.module.shape.layers)
            log_p = target.logits(normed[0]).log_softmax(-1)
            for j, x in enumerate(t.kind.module.unroll(features, normed, following)):
                log_q = target.logits(x[0]).log_softmax(-1)
                for root in range(begin - 1, length - 2 - j):
                    wanted[j].append(
                        float(F.kl_div(log_q[root], log_p[root + 1 + j], log_target=True, reduction="sum"))
                    )
    torch.testing.assert_close(
        found, torch.tensor([np.mean(rows) for rows in wanted], dtype=torch.float32), rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize("ensemble", [1, 2])
def test_prompt_tokens_are_rows_of_the_model_like_others(ensemble, target, texts, monkeypatch):
    """Compare with the model run over a text that ends with the prompt tokens, for each root, count and member."""
    shape = lambda cls, dim, layers: PromptShape(dim, depth=2, ensemble=ensemble)  # noqa: E731
    monkeypatch.setattr(Prompts, "shape_for", classmethod(shape))
    t = trainer(target, texts, "ppd")
    batch = next(batches(texts, 256, 0, 0))
    assert len(batch.ids) > 1
    found, trunk = t.losses(batch)[1], target.model.model
    wanted: list[list[float]] = [[] for _ in found]
    with torch.no_grad():
        for ids, begin, length in zip(batch.ids, batch.begins.tolist(), batch.lengths.tolist()):
            log_p = target.model(ids[None, :length])[0].log_softmax(-1)
            for j in range(2):
                for root in range(begin - 1, length - 2 - j):
                    logits = []
                    for member in t.kind.module.weight:
                        x = torch.cat([trunk.embed_tokens(ids[: root + 1]), member[: j + 1]])[None]
                        for layer in trunk.layers:
                            x = layer(x, target.model.rope(x.shape[1]), None)
                        logits.append(target.model.logits(x[0, -1]))
                    log_q = torch.stack(logits).mean(0).log_softmax(-1)
                    wanted[j].append(float(F.kl_div(log_q, log_p[root + 1 + j], log_target=True, reduction="sum")))
    torch.testing.assert_close(
        found, torch.tensor([np.mean(rows) for rows in wanted], dtype=torch.float32), rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_falls_and_a_resumed_run_goes_on_to_the_bit(kind, target, texts, tmp_path):
    whole = trainer(target, texts, kind, steps=12)
    stream = whole.stream()
    losses = [whole.step(next(stream)) for _ in range(12)]
    assert sum(losses[-1]) < 0.95 * sum(losses[0])
    first = trainer(target, texts, kind, steps=12)
    stream = first.stream()
    for _ in range(6):
        first.step(next(stream))
    first.save(tmp_path)
    second = trainer(target, texts, kind, steps=12)
    second.restore(tmp_path)
    stream = second.stream()
    for _ in range(6):
        second.step(next(stream))
    assert all(torch.equal(a, b) for a, b in zip(whole.kind.module.parameters(), second.kind.module.parameters()))
    with pytest.raises(ConfigError, match="another"):
        trainer(target, texts, KINDS[kind == "medusa"]).restore(tmp_path)


def test_the_walk_counts_as_the_engine_does():
    """Anchor 3 is known, so a forward whose guesses 0 and 1 are right gives three tokens, and so on to the end."""
    right = np.zeros((2, 12), bool)
    right[0, [2, 5, 8]] = True
    right[1, [2, 8]] = True
    forwards, by_depth = walk(right, 3, 12)
    # Anchor 3 accepts 2 and continues at 6. Root 5 accepts 1 and continues at 8. Root 7 accepts none and continues at
    # 9. Root 8 accepts 2 and reaches the end.
    assert (forwards, by_depth) == (4, [[4, 3], [3, 2]])
    assert walk(right, 11, 12) == (0, [[0, 0], [0, 0]])


@pytest.mark.parametrize("kind, forwards", [("eagle", 3), ("ppd", 1.5)])
def test_acceptance_of_a_head_that_knows_and_of_one_that_does_not(kind, forwards, target, texts):
    """A head that learnt the model's greedy continuation by heart is accepted; an untrained one is not."""
    ids = [5, 6, 7]
    with torch.no_grad():
        for _ in range(24):
            ids.append(int(target.model(torch.tensor([ids]))[0, -1].argmax()))
    own = Texts(np.array(ids, np.int32), np.array([0, 27]), np.array([3]), np.array([0]), ("own",))
    t = trainer(target, own, kind, steps=60)
    before = t.kind.measure(own)
    stream = t.stream()
    for _ in range(60):
        t.step(next(stream))
    after = t.kind.measure(own)
    assert after["tokens"] == before["tokens"] == 23 and after["tokens_per_forward"] > max(
        forwards, before["tokens_per_forward"]
    )
    assert after["by_task"] == {"own": after["tokens_per_forward"]}


def test_replies_are_kept_and_read_back(target, texts, tmp_path):
    file = tmp_path / "s.safetensors"
    save_texts(file, {"train": texts}, "w")
    back = load_texts(file, "w")["train"]
    assert np.array_equal(back.ids, texts.ids) and back.specs == texts.specs and len(back) == 24
    with pytest.raises(ConfigError, match="another model"):
        load_texts(file, "v")
    file.write_bytes(b"no")
    with pytest.raises(ConfigError, match="sample them again"):
        load_texts(file, "w")


def test_the_mixture_names_tasks_that_exist():
    mix = mixture()
    assert sum(mix.values()) == pytest.approx(1.0)
    for spec in mix:
        load_task(spec)


def test_the_command_from_end_to_end(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(drafter_data.BATCH_TOKENS, "cpu", 256)
    export.export(Model(SHAPE, 1), shipped_tokenizer(), tmp_path / "model")
    out = tmp_path / "out"
    plan = Plan("eagle", steps=3, replies=8, held_out=4, reply_tokens=6, mix=TINY)
    main(
        plan,
        str(tmp_path / "model"),
        out,
        samples=tmp_path / "s.safetensors",
        device="cpu",
        command="kvasir train drafter eagle",
    )
    assert "tokens a forward" in capsys.readouterr().out
    head, facts = heads.read("eagle", out)
    assert head.shape.layers == (0, 1, 2) and facts["hidden_size"] == 32 and facts["name"] == "model"
    record = json.loads((out / "training.json").read_text())
    assert record["steps"] == 3 and len(record["acceptance"]["by_depth"]) == head.shape.depth
    assert "kvasir train drafter eagle" in (out / "README.md").read_text() and not (out / STATE).exists()
    assert (tmp_path / "s.safetensors").exists()
    with pytest.raises(ConfigError, match="nothing to resume"):
        main(plan, str(tmp_path / "model"), out, samples=tmp_path / "s.safetensors", resume=True, device="cpu")
    shutil.copy(tmp_path / "s.safetensors", out / STATE)
    with pytest.raises(ConfigError, match="--resume"):
        main(plan, str(tmp_path / "model"), out, device="cpu")
    with pytest.raises(ConfigError, match="no trained_drafters named 'egle'.*eagle"):
        Trainer(
            Target(Model(SHAPE, 1), "x"),
            load_texts(tmp_path / "s.safetensors", facts["weights"])["train"],
            Plan("egle"),
        )


def test_batches_hold_every_text_once(texts):
    seen = []
    for batch in batches(texts, 256, 0, 3):
        assert batch.ids.numel() <= 256 or len(batch.ids) == 1
        for row, number in zip(batch.ids, batch.texts):
            text = texts.text(number)
            assert row[: len(text)].tolist() == text.tolist()
        seen += batch.texts.tolist()
    assert sorted(seen) == list(range(24))
    assert drafter_data.PADDED == 64


def test_a_gpu_that_is_named_becomes_the_present_one(monkeypatch):
    chosen = []

    def load(folder, device):
        assert device == chosen[-1]
        raise ConfigError("far enough")

    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(export, "load", load)
    with pytest.raises(ConfigError, match="far enough"):
        load_target("nano", "cuda:1")
    assert chosen == ["cuda:1"]
