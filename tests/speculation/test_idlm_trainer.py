"""The engine's mask rows are the trainer's noisy half, from the folder that the trainer writes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvasir.models.checkpoint import resolve
from kvasir.technique import load
from kvasir_lab import export
from kvasir_lab.drafters import mask_rows
from kvasir_lab.drafters.data import Batch
from kvasir_lab.drafters.gated_adapter import GatedAdapter
from kvasir_lab.drafters.kind import DRAFTERS, Kind
from kvasir_lab.drafters.target import Target
from tests.speculation.helpers import driver, requests

CLOSE = 2e-3
MASKS = 3


@pytest.fixture(scope="module")
def kind(tmp_path_factory):
    """Return what a training run holds, its adapter random and read back from its folder, and that folder."""
    kind = load(DRAFTERS, "idlm:rank=4", Kind)
    kind.begin(Target(export.load(resolve("nano")), "nano"), 0)
    generator, folder = torch.Generator().manual_seed(3), tmp_path_factory.mktemp("trained")
    with torch.no_grad():
        for b in kind.module.b:
            b.copy_(torch.randn(b.shape, generator=generator) * 0.1)
    kind.write(folder, None)
    kind.module = GatedAdapter.read(folder, kind.target.model)
    return kind, folder


def own_clean_tokens(rows: mask_rows.Layout) -> mask_rows.Layout:
    """Let a mask see the clean tokens of its block up to itself."""
    clean = torch.arange(rows.sees.shape[-1] - rows.sees.shape[-2]) <= rows.place[..., None]
    sees = rows.sees.clone()
    sees[..., : clean.shape[-1]] |= clean[:, None]
    return dataclasses.replace(rows, sees=sees)


def no_clean_tokens(rows: mask_rows.Layout) -> mask_rows.Layout:
    """Let masks see what one causal mask over noisy | clean would show them: the noisy half alone."""
    sees = rows.sees.clone()
    sees[..., : -rows.sees.shape[-2]] = False
    return dataclasses.replace(rows, sees=sees)


@torch.no_grad()
def test_the_engine_computes_the_noisy_half(kind, monkeypatch):
    """Guesses in trees, in chunks, behind prompts and after preemptions have the chances that the loss is computed
    from. Must fail: one causal mask over both halves, and a block that sees its own clean tokens."""
    drafters = pytest.importorskip("kvasir.speculation.drafters.idlm")
    trained, folder = kind
    heard = []
    real = drafters.MaskDrafter.answer

    def record(self, seq, tree, node, guesses):
        heard.append((list(seq.tokens), guesses))
        real(self, seq, tree, node, guesses)

    monkeypatch.setattr(drafters.MaskDrafter, "answer", record)
    d = driver(f"idlm:model={folder},layout=tree", max_num_batched_tokens=96)
    d.run(requests(d, 0.0, allowed_token_ids=None), preempt_every=4)
    assert not d.engine.proposals.drafting._failures
    d.close()
    checked, missed = 0, {own_clean_tokens: 0, no_clean_tokens: 0}
    for tokens, guesses in heard[::5]:
        if not guesses:
            continue
        begin = len(tokens) - 1  # masks stand where the last token stands, and behind it
        ids = torch.tensor([[*tokens, *[0] * MASKS]])
        batch = Batch(ids, torch.tensor([begin + MASKS + 1]), torch.tensor([begin]), None)
        rows = mask_rows.layout(batch, MASKS, torch.tensor([-begin % MASKS]), ids.device)
        text = trained.text(ids)[1]
        chances = trained.log_probs(trained.masks(rows, text))[0].exp()
        wrong = {change: trained.log_probs(trained.masks(change(rows), text))[0].exp() for change in missed}
        for j, (token, chance) in enumerate(row[0] for row in guesses):
            assert abs(chance - float(chances[j, token])) < CLOSE
            checked += 1
            for change, found in wrong.items():
                missed[change] += abs(chance - float(found[j, token])) > CLOSE
    assert checked > 10 and all(count > checked // 4 for count in missed.values()), missed
