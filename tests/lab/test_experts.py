"""Experts of the lab's model: the definition, the balancing gradient, and the engine's rows of what is exported."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F

from kvasir.errors import ConfigError
from kvasir_lab import export
from kvasir_lab import tokenizer as lab_tokenizer
from kvasir_lab.experts import BALANCE
from kvasir_lab.model import Model, Shape
from kvasir_lab.training.recipe import EXPERTS
from tests.engine.driver import Driver

SHAPE = Shape(dim=32, layers=2, ffn=24, heads=2, kv_heads=1, head_dim=16, positions=64, experts=6, top_k=2)


def test_each_token_uses_its_experts():
    layer = Model(SHAPE).eval().model.layers[0].mlp
    x = torch.randn(2, 5, SHAPE.dim, generator=torch.Generator().manual_seed(0))
    found = layer(x)
    for row, got in zip(x.flatten(0, 1), found.flatten(0, 1)):
        weights, ids = layer.gate(row).softmax(-1).topk(2)
        want = sum(w / weights.sum() * layer.experts[i](row) for w, i in zip(weights, ids.tolist()))
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


def test_training_adds_the_gradient_of_the_balancing_loss():
    """The control: outside training the same probabilities get none."""
    layer = Model(SHAPE).model.layers[0].mlp
    x = torch.randn(40, SHAPE.dim, generator=torch.Generator().manual_seed(1))
    (layer(x).sum() * 0).backward()
    found = layer.gate.weight.grad.clone()
    weight = layer.gate.weight.detach().clone().requires_grad_()
    p = F.linear(x, weight).softmax(-1)
    chosen = torch.zeros_like(p).scatter(1, p.topk(2, -1).indices, 1.0)
    (BALANCE * SHAPE.experts * (chosen.mean(0) / 2 * p.mean(0)).sum()).backward()
    torch.testing.assert_close(found, weight.grad, atol=1e-8, rtol=1e-4)
    assert float(weight.grad.abs().max()) > 0
    layer.eval()
    layer.gate.weight.grad = None
    (layer(x).sum() * 0).backward()
    assert not layer.gate.weight.grad.any()


def test_the_engine_computes_what_was_trained(tmp_path):
    shape = Shape(**{**SHAPE.__dict__, "vocab": 2048})
    model = Model(shape, seed=4).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((p * 4 if p.ndim == 2 else p).bfloat16())
    export.export(model, lab_tokenizer.shipped_tokenizer(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "qwen3_moe" and config["num_experts"] == 6
    again = export.load(tmp_path)
    ids = [(37 * i) % 2000 + 5 for i in range(30)]
    with torch.no_grad():
        logits = again(torch.tensor([ids]))
        assert torch.equal(logits, model(torch.tensor([ids])))
    want = logits[0].log_softmax(-1)
    d = Driver(str(tmp_path), max_model_len=64)
    d.run([d.request("a", ids, temperature=0.0, max_tokens=1, prompt_logprobs=0)])
    found = [at.logprob for at in d.outputs["a", 0].prompt_logprobs[1:]]
    d.close()
    assert found == pytest.approx([float(want[i, ids[i + 1]]) for i in range(len(ids) - 1)], abs=2e-3)


def test_the_recipe():
    assert EXPERTS.shape.top_k * EXPERTS.shape.ffn == Shape().ffn
    with pytest.raises(ConfigError, match="top_k=0 must be from 1"):
        Shape(experts=4)
