"""State after every step of drafting: the committed slots equal, to the bit, what a fresh prefill of the same tokens
writes (CPU exact mode).

Tokens could be right over a cache that is wrong where nobody looked. The cache of a paged drafter is compared, too,
with a tolerance, since it is not computed in exact mode.
"""

from __future__ import annotations

import pytest
import torch

from kvasir.engine.start import build
from kvasir.engine.start.attention_choice import choose_backend
from kvasir.kv.pool import KVPool
from tests.speculation.helpers import Hostile, WithGuests, driver, install, plain, requests

State = dict[str, torch.Tensor]


def slots(pool: KVPool, tables: list[list[int]], count: int) -> State:
    """Return every plane of every layer at positions 0 .. ``count``, as bytes [count, heads, bytes]."""
    found = {}
    positions = torch.arange(count)
    for layer, cache in pool._layers.items():
        pages = torch.tensor(tables[cache.group])[positions // pool.page_slots]
        for name, plane in cache.planes.items():
            found[f"{layer}.{name}"] = plane[pages, :, positions % pool.page_slots].clone()
    return found


def prefilled(prompt: list[int], codec: str) -> State:
    """Return the snapshot of a plain engine that computes all tokens as one chunk of a prompt."""
    d = driver(max_num_batched_tokens=512, enable_prefix_caching=False, kv_codec=codec)
    d.submit(d.request("whole", prompt, max_tokens=4, ignore_eos=True))
    d.step()
    (seq,) = d.engine.scheduler.running
    assert seq.num_computed == len(prompt)
    found = slots(d.engine.runner.pool, seq.tables, len(prompt))
    d.close()
    return found


def run(d, given, watch) -> None:
    """Run step by step, with disturbances of the scheduler. ``watch`` sees every running sequence after its commit."""
    for request in given:
        d.submit(request)
    for step in range(400):
        if not d.engine.has_work():
            break
        d.step(preempt=step % 7 == 6)
        for seq in d.engine.scheduler.running:
            watch(seq)
    assert not d.errors and not d.engine.has_work()


def differences(name: str, codec: str) -> int:
    """Return the snapshots of a run with the drafter ``name`` that differ from the prefill's."""
    told = {key: tokens for key, (tokens, _) in plain(1.0, codec=codec).items()}
    d = driver(
        "replay" if name in ("hostile", "guests") else name,
        kv_codec=codec,
        max_num_batched_tokens=48,
        max_num_seqs=4,
        check=False,
    )
    if name == "hostile":
        install(d, Hostile(told))
    elif name == "guests":
        install(d, WithGuests(told, d.engine.runner.model.spec.hidden_size))
    seen: list[tuple[tuple[str, int], int, State]] = []
    run(
        d,
        requests(d, 1.0),
        lambda seq: seen.append(
            ((seq.request.id, seq.branch), seq.num_computed, slots(d.engine.runner.pool, seq.tables, seq.num_computed))
        ),
    )
    prompts = {r.id: list(r.prompt_ids) for r in requests(d, 1.0)}
    accepted = d.engine.stats().accepted_tokens
    d.close()
    told = {key: out.tokens for key, out in d.outputs.items()}
    assert accepted and len(seen) > 5
    whole = {(i, branch): prefilled(prompts[i] + told[i, branch], codec) for i, branch in {key for key, _, _ in seen}}
    return sum(
        any(
            not torch.equal(part.view(torch.uint8), whole[key][plane][:count].contiguous().view(torch.uint8))
            for plane, part in state.items()
        )
        for key, count, state in seen
    )


@pytest.mark.parametrize("codec", ["plain", "int4_bdr"])
@pytest.mark.parametrize("name", ["hostile", "guests", "suffix:min_match=1", "draft_model:model=nano"])
def test_committed_slots_are_those_of_a_prefill(name, codec):
    assert not differences(name, codec)


def test_slots_that_stay_where_they_were_are_seen(monkeypatch):
    monkeypatch.setattr(KVPool, "move_slots", lambda self, group, sources, targets: None)
    assert differences("hostile", "plain")


def test_a_draft_model_has_its_own_choice_of_attention(monkeypatch):
    """A backend that serves the target, or that was timed for it before a restart, may not fit the draft model."""
    asked = []
    monkeypatch.setattr(build, "choose_backend", lambda name, *at: asked.append(name) or choose_backend(name, *at))
    driver("draft_model:model=nano", attention_backend="torch").close()
    assert asked == ["auto", "torch"]


def test_a_draft_models_own_slots_are_those_of_a_prefill():
    d = driver("draft_model:model=nano", max_num_batched_tokens=48, max_num_seqs=4)
    second = d.engine.proposals.drafting.drafter._model
    seen: list[tuple[tuple[str, int], int, State]] = []

    def watch(seq) -> None:
        shadow = second._shadows.get(seq)
        if shadow is not None:
            pairs = list(zip(shadow.tokens[: shadow.num_computed], seq.tokens))
            count = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
            seen.append(((seq.request.id, seq.branch), count, slots(second._runner.pool, shadow.tables, count)))

    run(d, requests(d, 1.0, max_tokens=30), watch)
    prompts, told = (
        {r.id: list(r.prompt_ids) for r in requests(d, 1.0)},
        {key: out.tokens for key, out in d.outputs.items()},
    )
    d.close()
    assert len(seen) > 5
    whole = {(i, branch): prefilled(prompts[i] + told[i, branch], "plain") for i, branch in {key for key, _, _ in seen}}
    for key, count, state in seen:
        for plane, part in state.items():
            torch.testing.assert_close(part, whole[key][plane][:count], atol=1e-4, rtol=1e-4)
