"""``idlm:max_accept=true`` keeps the model's distribution: drafts drawn from few tokens, verified by blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvasir.decoding import max_accept
from kvasir.decoding.max_accept import Spread
from kvasir.speculation.drafters.idlm import MaskDrafter
from kvasir.speculation.router import load_drafter
from tests.speculation.helpers import FEW, driver, outputs, plain, requests
from tests.speculation.masks import random_masks
from tests.speculation.test_distribution import PROMPT, RARE, joint, limit

SAMPLES = 600


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return random_masks(tmp_path_factory.mktemp("masks") / "m")


@pytest.fixture(scope="module")
def expected():
    return joint()


def chi_square(expected, folder) -> tuple[float, float, float]:
    """Return the statistic of tokens 2 to 4 of many answers, its bound, and the accepted drafts of a verification."""
    d = driver(
        f"idlm:model={folder},max_accept=true", max_num_seqs=64, batch_invariant=False, check=False, poison=False,
        num_pages=512, max_num_batched_tokens=512,
    )  # fmt: skip
    given = dict(temperature=6.0, allowed_token_ids=FEW, max_tokens=6, ignore_eos=True)
    for i in range(SAMPLES):
        d.submit(d.request(str(i), PROMPT, seed=1000 + i, **given))
    while d.engine.has_work():
        d.step()
    stats = d.engine.stats()
    assert not d.errors and not d.engine.proposals.drafting._failures
    d.close()
    seen: dict[tuple[int, ...], int] = {}
    for out in d.outputs.values():
        seen[tuple(out.tokens[:3])] = seen.get(tuple(out.tokens[:3]), 0) + 1
    cells = [(seen.get(cell, 0), SAMPLES * p) for cell, p in expected.items()]
    often, rare = [c for c in cells if c[1] >= RARE], [c for c in cells if c[1] < RARE]
    often.append((sum(n for n, _ in rare), max(1e-9, sum(e for _, e in rare))))
    return sum((n - e) ** 2 / e for n, e in often), limit(len(often) - 1), stats.accepted_tokens / stats.drafts


def test_the_joint_distribution_is_the_models(expected, folder):
    found, most, rate = chi_square(expected, folder)
    assert found < most and rate > 0.3


def test_the_likeliest_draft_with_the_whole_distributions_ratio_is_seen(expected, folder, monkeypatch):
    """Negative control: the rule of the released code, which draws the likeliest token and divides by softmax."""
    real = MaskDrafter._draw

    def likeliest(self, ask, guesses):
        real(self, ask, guesses)
        return [row[0][0] for row in guesses]

    monkeypatch.setattr(MaskDrafter, "_draw", likeliest)
    found, most, _ = chi_square(expected, folder)
    assert found > most


def test_greedy_tokens_are_the_plain_ones(folder):
    d = driver(f"idlm:model={folder},max_accept=true", batch_invariant=False)
    d.run(requests(d, 0.0))
    assert {k: tokens for k, (tokens, _) in outputs(d).items()} == {k: tokens for k, (tokens, _) in plain(0.0).items()}
    d.close()


def test_a_spread_is_its_own_distribution():
    spread = Spread.of([[(3, 0.5), (0, 0.3)], [(2, 1.0)], [(1, 0.2), (4, 0.2)]])
    q = spread.dense(3, 6, torch.device("cpu")).softmax(-1)
    want = torch.zeros(3, 6)
    want[0, 3], want[0, 0], want[1, 2], want[2, 1], want[2, 4] = 0.625, 0.375, 1.0, 0.5, 0.5
    assert torch.allclose(q, want) and spread.dense(2, 6, torch.device("cpu")).shape == (2, 6)


def test_the_golden_example_of_the_bias():
    """With q = p the released rule accepts the likeliest token always; drawn drafts give p (the page's example)."""
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    h, _ = max_accept.verify(
        p.repeat(1, 2, 1), p.repeat(1, 1, 1), torch.tensor([[0]]), torch.tensor([1])
    )  # argmax drafts, accepted with min(1, p / q)
    assert float(h[0, 0]) == 1.0, "so the output is always token 0: 0.5 from p in total variation"
    rng, counts = np.random.default_rng(0), np.zeros(4)
    for draft in rng.choice(4, size=4000, p=p.numpy().astype(np.float64) / float(p.double().sum())):
        h, weights = max_accept.verify(
            p.repeat(1, 2, 1), p.repeat(1, 1, 1), torch.tensor([[int(draft)]]), torch.tensor([1])
        )
        counts[draft if rng.random() < float(h[0, 0]) else int(weights[0, 0].argmax())] += 1
    assert np.abs(counts / counts.sum() - p.numpy()).max() < 0.03


def test_it_runs_alone(folder):
    with pytest.raises(Exception, match="idlm.*must run alone"):
        load_drafter(f"idlm:model={folder},max_accept=true+suffix")
