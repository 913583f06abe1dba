"""Hybrids of the lab: the scan beside the rule itself, documents apart, the exported folder in transformers and in the
engine, sampling with a cache, and a run that goes on where it stopped."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers

from kvasir import LLM, SamplingParams
from kvasir.errors import ConfigError
from kvasir.kernels import gated_delta
from kvasir_lab import delta, export
from kvasir_lab.model import Model, Shape, document_mask, documents_of, losses
from kvasir_lab.sample import complete
from kvasir_lab.training import loop
from kvasir_lab.training.recipe import BASE, BASE_HYBRID, SMOKE_HYBRID, Curves
from kvasir_lab.training.trainer import Trainer

SHAPE = Shape(
    vocab=2048, dim=32, layers=4, ffn=48, heads=2, kv_heads=1, head_dim=16, positions=256,
    recurrent=(0, 1, 3), key_heads=2, value_heads=4, state_dim=8,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("one_thread")


def lively(seed=0):
    """A model whose weights are large enough that every part shows."""
    model = Model(SHAPE, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * (0.3 if p.ndim == 1 else p.shape[-1] ** -0.5))
    return model


def drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("length", [1, 64, 150])
def test_the_scan_is_the_rule(length):
    q, k, v = (drawn(2, length, 3, 8, seed=s) for s in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    decay, beta = -drawn(2, length, 3, seed=3).abs(), drawn(2, length, 3, seed=4).sigmoid()
    documents, state = torch.zeros(2, length), drawn(2, 3, 8, 8, seed=5)
    got, after = delta.scan(q, k, v, decay, beta, documents, state)
    for b in range(2):
        want, last = gated_delta.recurrence(q[b], k[b], v[b], decay[b], beta[b], state[b])
        torch.testing.assert_close(got[b], want, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(after[b], last, atol=1e-5, rtol=1e-4)


def test_many_rows_are_mixed_in_parts(monkeypatch):
    model, ids = lively(), torch.randint(3, 2048, (5, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model(ids)
        monkeypatch.setattr(delta, "AT_ONCE", 80)
        torch.testing.assert_close(model(ids), whole, atol=1e-5, rtol=1e-5)


def test_documents_do_not_see_each_other():
    """Packed rows give the losses of their documents alone; without their numbers they do not."""
    model, ids = lively(), torch.randint(3, 2048, (1, 150), generator=torch.Generator().manual_seed(0))
    numbers = torch.tensor([0] * 40 + [1] * 3 + [2] * 67 + [3] * 40)[None].to(torch.int16)
    logits = model(ids, document_mask(numbers))
    assert torch.equal(documents_of(document_mask(numbers)), numbers)
    for number in range(4):
        alone = model(ids[numbers == number][None])
        torch.testing.assert_close(logits[numbers == number][None], alone, atol=1e-4, rtol=1e-4)
    assert (logits - model(ids)).abs().max() > 1e-2
    trained = torch.ones_like(ids, dtype=torch.bool)
    loss = losses(model, ids, numbers, trained)[0]
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


def test_the_folder_is_what_others_read(tokenizer, tmp_path):
    model = lively()
    export.export(model, tokenizer, tmp_path, dtype=torch.float32)
    ids = torch.randint(3, 2048, (1, 90), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        want = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(ids).logits
        torch.testing.assert_close(model(ids), want, atol=2e-4, rtol=2e-4)
        again = export.load(tmp_path)
        assert again.shape == SHAPE and torch.equal(again(ids), model(ids))
    prompts = [ids[0, :5].tolist(), ids[0, :70].tolist()]
    want = complete(model, prompts, 12, [])  # the shorter one is padded
    assert want == [complete(model, [p], 12, [])[0] for p in prompts]
    with LLM(str(tmp_path), device="cpu", dtype="float32", max_model_len=128) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        found = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
    assert [list(r.outputs[0].token_ids) for r in found] == want
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(
        config.replace('"partial_rotary_factor": 0.25', '"partial_rotary_factor": 0.5')
    )
    with pytest.raises(ConfigError, match="rope_parameters differ"):
        export.load(tmp_path)


@pytest.mark.slow
def test_a_run_goes_on_where_it_stopped(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "LOOK", 3)
    recipe = SMOKE_HYBRID.replace(phases=(), own=None, curves=Curves(), steps=6, warmup=2, pool=10)

    def run(folder, **options):
        trainer = Trainer(recipe, tokenizer, "cpu", workers=0)
        if folder.exists():
            trainer.restore(folder)
        folder.mkdir(exist_ok=True)
        return trainer, loop.run(trainer, folder, minutes=None, save_every=1e9, **{"stop_after": None, **options})

    whole, done = run(tmp_path / "whole")
    assert done and whole.done == 6
    half, done = run(tmp_path / "cut", stop_after=1e-9)
    assert not done and half.done == 3
    again, done = run(tmp_path / "cut")
    assert done and all(map(torch.equal, again.model.parameters(), whole.model.parameters()))
    assert not all(map(torch.equal, half.model.parameters(), whole.model.parameters()))


def test_it_has_about_the_parameters_of_base():
    sizes = [Model(recipe.shape).num_parameters for recipe in (BASE, BASE_HYBRID)]
    assert abs(sizes[1] / sizes[0] - 1) < 0.04 and len(BASE_HYBRID.shape.recurrent) == 6
    assert replace(BASE_HYBRID.shape, recurrent=(), ffn=BASE.shape.ffn) == BASE.shape
