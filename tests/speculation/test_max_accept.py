"""``draft_model:max_accept=true`` keeps the model's distribution, whatever the drafter's. Unsupported combinations are
refused.
"""

from __future__ import annotations

import pytest
import torch

from kvasir.config import EngineConfig
from kvasir.decoding import max_accept, sampler
from kvasir.engine.engine import Engine
from kvasir.errors import ConfigError
from kvasir.speculation.router import load_drafter
from kvasir.types import Grammar
from tests.speculation.helpers import FEW, driver, outputs, plain, requests
from tests.speculation.test_distribution import PROMPT, RARE, joint, limit

SAMPLES = 600
DRAFTER = "draft_model:model=nano,max_depth=3"
TREE = f"{DRAFTER},tree=dyspec,threshold=0.05"


def bent(d) -> None:
    """Change the drafter's output by other weights in its last layer."""
    model = d.engine.proposals.drafting.drafter._model._runner.model
    rng = torch.Generator().manual_seed(3)
    for name, slot in model.slots().items():
        if name.endswith("o.weight") or "down" in name:
            slot.target.add_(0.05 * torch.randn(slot.target.shape, generator=rng))
    d.engine.proposals.drafting.drafter._model._runner.weights_changed()


def counts(max_accepted: bool, drafter: str = DRAFTER, **options) -> tuple[dict[tuple[int, ...], int], float]:
    """Return tokens 2 to 4 of many answers, and the accepted drafts of a verification."""
    d = driver(
        drafter + (",max_accept=true" if max_accepted else ""),
        max_num_seqs=64,
        batch_invariant=False,
        check=False,
        poison=False,
        num_pages=512,
        max_num_batched_tokens=512,
        **options,
    )
    d.engine.proposals.drafting.controller._rest = 0
    bent(d)
    for i in range(SAMPLES):
        d.submit(
            d.request(
                str(i), PROMPT, temperature=6.0, allowed_token_ids=FEW, max_tokens=5, ignore_eos=True, seed=1000 + i
            )
        )
    while d.engine.has_work():
        d.step()
    assert not d.errors
    stats = d.engine.stats()
    rate = stats.accepted_tokens / stats.drafts
    d.close()
    seen: dict[tuple[int, ...], int] = {}
    for out in d.outputs.values():
        seen[tuple(out.tokens[:3])] = seen.get(tuple(out.tokens[:3]), 0) + 1
    return seen, rate


def chi_square(expected, seen) -> tuple[float, float]:
    cells = [(seen.get(cell, 0), SAMPLES * p) for cell, p in expected.items()]
    often, rare = [c for c in cells if c[1] >= RARE], [c for c in cells if c[1] < RARE]
    often.append((sum(n for n, _ in rare), max(1e-9, sum(e for _, e in rare))))
    return sum((n - e) ** 2 / e for n, e in often), limit(len(often) - 1)


@pytest.fixture(scope="module")
def expected():
    return joint()


def test_the_joint_distribution_is_the_models_and_more_drafts_are_right(expected):
    seen, rate = counts(True)
    found, most = chi_square(expected, seen)
    assert found < most
    assert rate > 1.02 * counts(False)[1]


@pytest.mark.slow
def test_so_it_is_with_drawn_trees(expected):
    """DySpec as published: drawn without replacement, level by level, and verified by multi-round rejection."""
    seen, rate = counts(True, TREE)
    found, most = chi_square(expected, seen)
    assert found < most
    assert rate > 0.5, "answers of 5 tokens allow trees of 3 nodes"


def test_a_rest_that_is_not_the_rest_is_seen(expected, monkeypatch):
    real = max_accept.verify
    monkeypatch.setattr(max_accept, "verify", lambda p, q, drafts, lengths: (real(p, q, drafts, lengths)[0], p))
    found, most = chi_square(expected, counts(True)[0])
    assert found > most


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    "params",
    [
        {},
        dict(presence_penalty=0.8, repetition_penalty=1.3),
        dict(grammar=Grammar("regex", "(ab|ba|c)*"), allowed_token_ids=None),
    ],
    ids=["none", "penalties", "grammar"],
)
def test_what_is_reported_is_what_was_emitted(params, static):
    """Every log-probability is that of the text as the plain engine scores it, with chunks, branches, preemption,
    prefix hits, invariants and poison."""
    d = driver(
        DRAFTER + ",max_accept=true", batch_invariant=False, max_num_batched_tokens=32, max_num_seqs=4, static=static
    )
    bent(d)
    d.run(requests(d, 1.0, 2, max_tokens=20, **params), preempt_every=5)
    assert not d.errors and d.engine.stats().accepted_tokens > 5
    bare = driver(enable_prefix_caching=False, batch_invariant=False)
    given = {r.id: r for r in requests(bare, 1.0, 2, max_tokens=20)}
    texts = {f"{i}/{branch}": (given[i], out) for (i, branch), out in d.outputs.items() if out.tokens}
    bare.run(
        [
            bare.request(name, [*r.prompt_ids, *out.tokens], max_tokens=1, prompt_logprobs=0)
            for name, (r, out) in texts.items()
        ]
    )
    for name, (r, out) in texts.items():
        known = bare.outputs[name, 0].prompt_logprobs[len(r.prompt_ids) :]
        assert [p.id for p in out.logprobs] == out.tokens
        assert [p.logprob for p in out.logprobs] == pytest.approx([p.logprob for p in known], abs=1e-3)
    d.close()
    bare.close()


def test_greedy_tokens_are_the_plain_ones():
    d = driver(DRAFTER + ",max_accept=true", batch_invariant=False)
    d.run(requests(d, 0.0))
    assert {k: tokens for k, (tokens, _) in outputs(d).items()} == {k: tokens for k, (tokens, _) in plain(0.0).items()}
    d.close()


def test_blocks_that_a_slice_of_logits_cuts_are_walked(monkeypatch):
    monkeypatch.setattr(sampler, "SLICE_BYTES", 4 * 3 * 2048)
    d = driver(DRAFTER + ",max_accept=true", batch_invariant=False)
    d.run(requests(d, 1.0))
    assert not d.errors and d.engine.stats().drafts
    d.close()


def test_what_would_bend_it_is_refused():
    with pytest.raises(ConfigError, match="draft_model.*must run alone"):
        load_drafter(DRAFTER + ",max_accept=true+suffix")
    with pytest.raises(ConfigError, match="not the tokens, which --batch-invariant promises"):
        Engine(EngineConfig.of(model="nano", drafter=DRAFTER + ",max_accept=true", batch_invariant=True))
    with pytest.raises(ConfigError, match="tree=fixed takes the likeliest tokens.*choose tree=dyspec"):
        load_drafter(DRAFTER + ",tree=fixed,max_accept=true")
    with pytest.raises(ConfigError, match="no option 'max_accept'"):
        load_drafter("suffix:max_accept=true")
