"""Medusa-2: the joint loss is the written one, the model rests while the heads warm up, and the folder serves."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from kvasir.api.offline.llm import LLM
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError
from kvasir.speculation import heads
from kvasir.types import SamplingParams
from kvasir_lab import export
from kvasir_lab.drafters import data as drafter_data
from kvasir_lab.drafters.data import batches
from kvasir_lab.drafters.kind import MODELS
from kvasir_lab.drafters.training import Plan, Trainer, main
from kvasir_lab.model import Model
from kvasir_lab.tokenizer import shipped_tokenizer
from tests.lab.test_drafter_training import TINY
from tests.lab.test_exits_training import SHAPE, target, texts  # noqa: F401 (fixtures)

pytestmark = pytest.mark.usefixtures("one_thread")


def trainer(target, texts, options: str = "", steps: int = 8) -> Trainer:  # noqa: F811
    return Trainer(target, texts, Plan(f"medusa2:{options}", MODELS, steps=steps, lr=4e-3))


def test_the_joint_loss_is_the_written_one(target, texts):  # noqa: F811
    kind = trainer(target, texts, "scale=0.3,warmup=0,data=text").kind
    with torch.no_grad():
        kind.module.head.weight.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
    batch = next(batches(texts, 96, 0, 0))
    total, shown = kind.losses(batch, 3, 0.5)
    with torch.no_grad():
        normed, sums, counts = kind.normed(batch.ids), np.zeros(5), np.zeros(5)
        outputs = [*kind.module.head(normed).unbind(2), normed]
        for i, (begin, length) in enumerate(zip(batch.begins.tolist(), batch.lengths.tolist())):
            for j, out in enumerate(outputs):
                ahead = 1 if j == 4 else 2 + j
                for p in range(begin - 1, length - ahead):
                    sums[j] += float(F.cross_entropy(kind.logits(out[i, p]), batch.ids[i, p + ahead]))
                    counts[j] += 1
    wanted = sums / counts
    assert shown.tolist() == pytest.approx(wanted.tolist(), rel=1e-4)
    assert total.item() == pytest.approx(wanted[4] + 0.3 * (wanted[:4] @ 0.8 ** np.arange(1, 5)), rel=1e-4)


def test_the_model_rests_while_the_heads_warm_up(target, texts):  # noqa: F811
    kind = trainer(target, texts, "warmup=0.5").kind
    batch = next(batches(texts, 512, 0, 0))
    total, shown = kind.losses(batch, 0, 0.2)
    total.backward()
    assert all(p.grad is None for p in kind.module.backbone.parameters()) and shown[-1] < 1e-3
    assert kind.module.head.weight.grad.abs().sum() > 0
    kind.losses(batch, 0, 0.6)[0].backward()
    assert all(p.grad is not None for p in kind.module.backbone.parameters()), "then both are trained"


@pytest.mark.slow
def test_drafts_improve_more_than_with_a_frozen_model(target, texts):  # noqa: F811
    found = {}
    for name, options in (("joint", "data=text,warmup=0.1"), ("frozen", "data=text,warmup=0.999")):
        run = trainer(target, texts, options, steps=40)
        stream = run.stream()
        for _ in range(40):
            run.step(next(stream))
        found[name] = run.kind.measure(texts)["tokens_per_forward"]
    assert found["joint"] > found["frozen"] + 0.03


def test_its_heads_change_no_token_of_the_new_model(target, texts, tmp_path):  # noqa: F811
    """Tokens with drafts are those of the written model. Those of the target are not: the comparison can fail."""
    prompts = [{"prompt_token_ids": [1, *texts.text(i)[:5].tolist()]} for i in range(4)]
    params = [SamplingParams(temperature=1.0, max_tokens=24, seed=i, ignore_eos=True) for i in range(4)]

    def outputs(folder, drafter: str = "") -> tuple[list[list[int]], int]:
        config = EngineConfig.of(
            model=str(folder), device="cpu", num_pages=32, max_num_seqs=4, drafter=drafter, draft_control="fixed"
        )
        with LLM(config=config) as llm:
            found = [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params)]
            return found, llm.engine.stats().drafted_tokens

    tokenizer = shipped_tokenizer()
    export.export(target.source, tokenizer, tmp_path / "target")
    before = export.load(tmp_path / "target")
    for name, warmup in (("joint", 0), ("frozen", 0.99)):
        run = trainer(target, texts, f"data=text,warmup={warmup}")
        stream = run.stream()
        for _ in range(8):
            run.step(next(stream))
        run.kind.write(tmp_path / name, tokenizer)
        moved = [not torch.equal(p, q) for p, q in zip(before.parameters(), export.load(tmp_path / name).parameters())]
        assert all(moved) if name == "joint" else not any(moved)
    drafted, count = outputs(tmp_path / "joint", f"medusa:model={tmp_path / 'joint' / 'medusa'}")
    assert count > 0 and drafted == outputs(tmp_path / "joint")[0]
    assert drafted != outputs(tmp_path / "target")[0], "it is another model"


def test_the_folder_and_bad_options(tmp_path, monkeypatch):
    monkeypatch.setitem(drafter_data.BATCH_TOKENS, "cpu", 256)
    export.export(Model(SHAPE, 1), shipped_tokenizer(), tmp_path / "model")
    plan = Plan("medusa2", MODELS, steps=2, replies=8, held_out=4, reply_tokens=6, mix=TINY)
    main(plan, str(tmp_path / "model"), tmp_path / "out", device="cpu", command="kvasir train medusa2")
    assert "--drafter medusa:model=FOLDER/medusa" in (tmp_path / "out" / "README.md").read_text()
    assert json.loads((tmp_path / "out" / "training.json").read_text())["kind"] == "medusa2"
    model = export.load(tmp_path / "out")
    assert model.shape == SHAPE
    trained_for = heads.made("medusa", tmp_path / "out" / "medusa")[1]
    assert trained_for["weights"] == heads.fingerprint(model.model.norm.weight), "its heads are for this model"
    for options in ("scale=0", "warmup=1"):
        with pytest.raises(ConfigError, match="scale must be above 0"):
            Plan(f"medusa2:{options}", MODELS).load()
