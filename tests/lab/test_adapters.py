"""Adapters that the lab trains: every method begins as the model, learns, and is served as it was trained."""

from __future__ import annotations

import sys

import pytest
import torch

from kvasir.convert.checkpoint import convert
from kvasir.convert.converter import load_converter
from kvasir.models import checkpoint
from kvasir.types import Variant
from kvasir_lab import export
from kvasir_lab.adapters.methods import METHODS
from kvasir_lab.adapters.training import Plan, attach, calibrate, loss_of, train
from kvasir_lab.training.data import Mixture, Rows
from tests.engine.driver import Driver
from tests.test_progress import Terminal

NANO = checkpoint.resolve("nano")
TASK = "chain:modulus=499"


@pytest.fixture(scope="module")
def batch(tokenizer):
    return Mixture((Rows(2, 256, {TASK: 1.0}),), tokenizer, 0, pool=50).batch(0)[0]


@pytest.mark.parametrize("method", METHODS)
def test_it_begins_as_the_model_with_as_many_numbers_as_lora(method, batch, one_thread):
    model = export.load(NANO)
    want = loss_of(model, batch)
    grams = calibrate(model, [batch]) if METHODS[method].calibrated else {}
    changes = attach(model, Plan(method, TASK, rank=8), grams)
    assert torch.allclose(loss_of(model, batch), want, atol=1e-4)
    numbers = sum(p.numel() for change in changes.values() for p in change.parameters())
    plain = sum(8 * (change.inputs + change.outputs) for change in changes.values())
    assert len(changes) == 28 and numbers <= 1.05 * plain and (method == "soka" or numbers > 0.8 * plain)


def test_training_shows_the_progress_of_other_long_commands(tmp_path, capsys, monkeypatch):
    """Lines where there is no terminal, a bar on one."""
    plan = Plan("lora", TASK, rank=4, steps=2, rows=1, length=256, warmup=1, pool=50)
    train(plan, NANO, tmp_path / "lines")
    assert "lora 1/2 loss " in (out := capsys.readouterr().out) and "lora 2/2 loss " in out
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    train(plan, NANO, tmp_path / "bar")
    assert "2/2" in sys.stderr.getvalue() and "2/2" not in capsys.readouterr().out


@pytest.mark.parametrize("method", METHODS)
def test_what_it_learned_is_served_in_a_mixed_batch(method, tmp_path, batch, one_thread):
    """The engine's log-probabilities of a text, with the exported adapter, are those of the trained model."""
    plan = Plan(method, TASK, rank=4, steps=20, rows=2, length=256, warmup=1, pool=50)
    record = train(plan, NANO, tmp_path / "trained", say=lambda text: None)
    assert record["history"][-1]["loss"] < record["history"][0]["loss"], "it learned nothing"
    spec = f"to_lora:method={method},rank=64,tolerance=0.01,trained={tmp_path / 'trained'}"
    convert(load_converter(spec), spec, NANO, tmp_path / "adapter")

    model = export.load(NANO)
    grams = calibrate(model, [batch]) if METHODS[method].calibrated else {}
    changes = attach(model, plan, grams)
    from safetensors.torch import load_file

    for name, tensor in load_file(tmp_path / "trained" / "training.safetensors").items():
        module, part = name.rsplit(".", 1)
        getattr(changes[module], part).data.copy_(tensor)
    ids = batch.ids[0][:100].tolist()
    with torch.no_grad():
        logits = model(torch.tensor([ids]))[0]
    want = logits.float().log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]

    d = Driver(enable_lora=True, max_lora_rank=64, lora_modules=(f"x={tmp_path / 'adapter'}",))
    made = [d.request(name, ids, max_tokens=1, temperature=0.0, prompt_logprobs=0) for name in ("x", "plain")]
    made[0].variant = Variant("x", d.engine.info.adapters["x"].key)
    d.run(made)
    found, plain = (
        torch.tensor([p.logprob for p in d.outputs[name, 0].prompt_logprobs[1:]]) for name in ("x", "plain")
    )
    d.close()
    assert (found - want).abs().max() < 2e-3 < 1e-2 < (found - plain).abs().max()
