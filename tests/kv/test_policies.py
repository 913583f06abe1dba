"""KV policies against literal definitions: what they note, what they keep, and when they forget."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir.errors import ConfigError
from kvasir.kv.codecs.plain import PlainCodec
from kvasir.kv.policies import lazy_eviction, r_kv
from kvasir.kv.policy import Memory, load
from kvasir.kv.pool import KVPool
from kvasir.kv.prompt_window import whole_shares
from kvasir.types import CacheGroup, CacheRow
from kvasir.types.sequence import NEVER

HEADS, SHARE, DIM, SLOTS = 2, 3, 8, 4
ROW = CacheRow(HEADS, DIM, DIM)


def one(spec: str):
    return load(spec).policies[0]


def memory_of(
    policy, count: int, num_prompt: int, length: int | None = None, layers: int = 1, layer: int = 0
) -> Memory:
    """A sequence of ``count`` cached tokens in a pool of its own, with random keys."""
    codec = PlainCodec()
    codec.beside = policy.planes
    pages = -(-count // SLOTS)
    group = CacheGroup("full", tuple(range(layers)), (ROW,) * layers)
    pool = KVPool([group], codec, [pages + 4], SLOTS, "cpu", torch.float32)
    draw = torch.Generator().manual_seed(count)
    for plane in pool.layer(layer).planes.values():
        plane.copy_(torch.randn(plane.shape, generator=draw))
    order = torch.randperm(pages + 3, generator=draw)[:pages] + 1
    return Memory(layer, pool.layer(layer), order, count, num_prompt, length or count, stream=7)


def attention(length: int, count: int, seed: int = 0) -> torch.Tensor:
    """Causal weights [G, R, L, N] of the last rows."""
    scores = torch.randn(HEADS, SHARE, length, count, generator=torch.Generator().manual_seed(seed))
    unseen = torch.arange(count) > torch.arange(count - length, count)[:, None]
    return scores.masked_fill(unseen, -torch.inf).softmax(-1)


# ------------------------------------------------------------------------------------------------------- prompt windows


def test_snapkv_keeps_the_best_of_smoothed_means():
    policy = one("snapkv:budget=20,window=6,pool=3")
    memory, p = memory_of(policy, 50, 50), attention(6, 50)
    policy.observe(memory, p, 44)
    kept = policy.keep(memory, 20)
    for head in range(HEADS):
        mean = p[head, :, :, :44].mean((0, 1)).tolist()
        smooth = [(mean[j - 1] if j else 0) / 3 + mean[j] / 3 + (mean[j + 1] if j < 43 else 0) / 3 for j in range(44)]
        best = sorted(sorted(range(44), key=lambda j: -smooth[j])[:14])
        assert kept[head].tolist() == [*best, *range(44, 50)]
    assert kept[0].tolist() != kept[1].tolist()


def test_pyramidkv_falls_from_layer_to_layer():
    policy = one("pyramidkv:budget=100,window=10,beta=10")
    memories = [memory_of(policy, 400, 400, layers=8, layer=i) for i in range(8)]
    budgets = policy.allot(memories, 100)
    assert sum(budgets) == 800 and budgets == sorted(budgets, reverse=True)
    assert budgets[0] == pytest.approx(10 + 2 * 90 - 9, abs=1) and budgets[-1] == pytest.approx(10 + 9, abs=1)
    short = policy.allot([memory_of(policy, 130, 130)] * 8, 100)  # the first layers would keep more than there is
    assert sum(short) == 800 and short[0] == 130
    assert one("pyramidkv:budget=100,window=10,beta=1").allot(memories, 100) == [100] * 8


def test_cake_shares_by_dispersion_and_shift():
    policy = one("cake:budget=30,window=4,pool=1,gamma=5,tau1=2,tau2=3")
    memories, want = [memory_of(policy, 60, 60, layers=3, layer=i) for i in range(3)], []
    for i, memory in enumerate(memories):
        p = attention(4, 60, seed=i) ** (1 + 0.1 * i)
        policy.observe(memory, p, 56)
        q = p[..., :56].double().numpy()
        entropy = -(q * np.log(q + 1e-10)).sum()
        want.append(entropy ** (1 / 2) * q.var(2).sum() ** (1 / 3))
        score = (q.mean(2) + 5 * q.var(2)).mean(1)
        best = np.sort(np.argsort(-score, 1, kind="stable")[:, :16], 1)
        notes = dict(memory.notes)
        assert policy.keep(memory, 20)[:, :16].tolist() == best.tolist()
        memory.notes.update(notes)
    budgets = policy.allot(memories, 30)
    assert sum(budgets) == 90
    for budget, share in zip(budgets, want):
        assert budget == pytest.approx(min(60, 4 + 78 * share / sum(want)), abs=2)


def test_cake_at_once_is_cake_in_a_cascade():
    """Shrinking earlier layers again and again keeps what one decision at the end keeps: the best of the best."""
    policy = one("cake:budget=30,window=4")
    memory = memory_of(policy, 60, 60)
    policy.observe(memory, attention(4, 60), 56)
    notes = dict(memory.notes)
    at_once = policy.keep(memory, 20)
    memory.notes.update(notes)
    first = policy.keep(memory, 35)
    scores = notes[0][0].gather(1, first[:, :31])
    again = first[:, :31].gather(1, scores.sort(dim=1, descending=True, stable=True).indices[:, :16]).sort(1).values
    assert torch.equal(again, at_once[:, :16])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.integers(0, 5000), st.integers(0, 300))
def test_whole_shares_sum_to_the_total(shares, total, most):
    found = whole_shares(shares, total, most)
    assert sum(found) == min(total, most * len(shares)) and all(0 <= n <= most for n in found)


# ------------------------------------------------------------------------------------------------- sums and recurrences


def observe_in_parts(policy, memory_at, p, cuts, first):
    """Show rows of the last L tokens in spans that end at ``cuts``."""
    count, length = p.shape[-1], p.shape[2]
    start = 0
    for end in [*cuts, length]:
        seen = count - length + end
        policy.observe(memory_at(seen), p[:, :, start:end, :seen], first + start)
        start = end


@pytest.mark.parametrize("spec", ["h2o:slack=4", "h2o:noise=true", "lazy_eviction:budget=20,window=4,alpha=0.02"])
def test_what_is_noted_does_not_depend_on_spans(spec):
    """Bit for bit, and not on what stood in the pages before."""
    policy, found = one(spec), []
    for cuts in ([], [3], [1, 2, 3, 4, 5, 9]):
        memory = memory_of(policy, 33, 21, length=33)
        notes = memory.notes

        def at(count, memory=memory, notes=notes):
            return Memory(0, memory.cache, memory.pages[: -(-count // SLOTS)], count, 21, count, 7, notes)

        p = attention(33, 33) if "h2o" in spec else attention(12, 33)
        observe_in_parts(policy, at, p, cuts, 33 - p.shape[2])
        found.append(memory.plane(policy.planes(ROW)[0].name))
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_h2o_sums_what_rows_gave():
    policy, p = one("h2o:heavy=0.2,recent=0.1,least=2"), attention(40, 40)
    memory = memory_of(policy, 40, 40)
    policy.observe(memory, p, 0)
    want = p.mean(1).sum(1)
    torch.testing.assert_close(memory.plane("k_attended")[..., 0], want, atol=1e-5, rtol=1e-5)
    left = policy.left(40, 40, 40)
    assert left == 8 + 4
    kept = policy.keep(memory, left)
    for head in range(HEADS):
        heavy = sorted(sorted(range(36), key=lambda j: -float(want[head, j]))[:8])
        assert kept[head].tolist() == [*heavy, *range(36, 40)]


def test_noise_of_keyformer_is_softmax_of_perturbed_logits():
    policy, p = one("h2o:noise=true,heat=0.5"), attention(3, 10)
    memory = memory_of(policy, 10, 8)
    noisy = policy._perturbed(memory, p, 7)
    torch.testing.assert_close(noisy.sum(-1), torch.ones(HEADS, SHARE, 3))
    assert (noisy[:, :, 0, 8:] == 0).all() and not torch.allclose(noisy, p, atol=1e-2)
    hot = one("h2o:noise=true,heat=100")._perturbed(memory, p, 7)  # the temperature ends at 2
    x = (p[:, :, 0, :8].log() - noisy[:, :, 0, :8].log()).std()
    assert x > 0.1 and torch.equal(hot[:, :, :2], noisy[:, :, :2])  # rows of the prompt, and its last, have tau = 1


def test_lazy_eviction_follows_recurrences():
    """Streams with known periods, against the definition in numpy."""
    policy = one("lazy_eviction:budget=12,window=4,alpha=0.05")
    num_prompt, steps = 10, 30
    last, longest = [0] * num_prompt, [0] * num_prompt
    memory = memory_of(policy, num_prompt + steps, num_prompt, length=num_prompt + steps)
    for t in range(1, steps + 1):
        count = num_prompt + t
        p = torch.zeros(HEADS, SHARE, 1, count)
        for j in range(count):
            if t % (j + 2) == 0:
                p[:, j % SHARE, 0, j] = 0.06  # one query head of the KV head
        last.append(t - 1)
        longest.append(0)
        for j in range(count):
            if t % (j + 2) == 0:
                longest[j] = max(longest[j], t - last[j])
                last[j] = t
        seen = Memory(0, memory.cache, memory.pages[: -(-count // SLOTS)], count, num_prompt, count, 7, memory.notes)
        policy.observe(seen, p, count - 1)
    found = memory.plane(lazy_eviction.PLANE)
    assert found[0].tolist() == [[a, b] for a, b in zip(last, longest)]
    score = [
        2 / (1 + math.exp(min(1 + (steps - a) / (b + 1e-5), 700))) + (2 / (1 + math.exp(b - 1)) if b else 0)
        for a, b in zip(last, longest)
    ]
    best = sorted(sorted(range(36), key=lambda j: -score[j])[:8])
    assert policy.keep(memory, 12)[0].tolist() == [*best, *range(36, 40)]


def test_r_kv_prefers_what_is_attended_and_said_once():
    policy = one("r_kv:budget=10,buffer=8,rows=2,mix=0.3,pool=1")
    memory = memory_of(policy, 20, 10, length=20)
    k = memory.keys().clone()
    k[:, 6] = k[:, 3] * 2  # the same direction: the earlier one is redundant
    planes = memory.cache.planes["k"]
    for j in range(20):
        planes[memory.pages[j // SLOTS], :, j % SLOTS] = k[:, j]
    for first in (18, 19):
        count = first + 1
        p = torch.zeros(HEADS, SHARE, 1, count)
        p[:, 1, 0, 3], p[:, 2, 0, 6], p[:, 0, 0, 9] = 0.4, 0.4, 0.5
        policy.observe(Memory(0, memory.cache, memory.pages, count, 10, count, 7, memory.notes), p, first)
    alike = r_kv.redundancy(memory.keys(), 0.5, 1)
    unit = torch.nn.functional.normalize(k, dim=-1)
    like = unit @ unit.transpose(1, 2)
    for head in range(HEADS):
        rows = []
        for i in range(20):
            line = [0.0 if i == j else float(like[head, i, j]) for j in range(20)]
            far = [j for j in range(20) if line[j] > 0.5]
            for j in far[-1:]:
                line[j] = 0.0
            rows.append(sum(line) / 20)
        torch.testing.assert_close(alike[head], torch.tensor(rows).softmax(0), atol=1e-5, rtol=1e-4)
    kept = policy.keep(memory, 10)
    assert all({3, 9, 18, 19} <= set(places) or {6, 9, 18, 19} <= set(places) for places in kept.tolist())


# ----------------------------------------------------------------------------------------------------------------- when


SPECS = [
    "sink_window:sinks=2,window=20,slack=5",
    "snapkv:budget=20,window=4",
    "h2o:heavy=0.1,recent=0.1,slack=7,least=4",
    "lazy_eviction:budget=25,window=6",
    "r_kv:budget=20,buffer=8,rows=4",
    "snapkv:budget=20,window=4+lazy_eviction:budget=25,window=6",
    "snapkv:budget=20,window=4+r_kv:budget=30,buffer=8,rows=4",
]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("num_prompt", [1, 3, 19, 20, 21, 64, 200])
def test_due_positions_rise_and_bound_the_cache(spec, num_prompt):
    stack, since, dues, most = load(spec), (0, 0), [], 0
    total = num_prompt + 300
    while (due := stack.next_due(num_prompt, *since)) <= total:
        assert due > since[0]
        dues.append(due)
        count = since[1] + due - since[0]
        policy = next(p for p in stack.policies if p.next_due(num_prompt, *since) == due)
        left = policy.left(num_prompt, due, count)
        assert 0 < left <= count and (policy.evidence != "last_rows" or left >= policy.rows)
        most = max(most, count)
        since = due, left
    most = max(most, since[1] + total - since[0])
    assert stack.most(num_prompt, total) == most
    assert "snapkv" in spec and "+" not in spec or max(num_prompt, 0) + 300 > most - num_prompt
    plan = stack.plan(num_prompt, total)
    assert plan.first_due == (dues[0] if dues else plan.first_due) and 0 <= plan.own_from <= plan.first_due


def test_a_short_prompt_is_never_forgotten():
    assert one("snapkv:budget=100").next_due(100, 0, 0) == NEVER
    assert one("snapkv:budget=100").next_due(101, 0, 0) == 101


def test_a_request_changes_numbers_of_the_server_s_policies():
    stack = load("snapkv:budget=200,window=8+r_kv")
    other = stack.changed("budget=100", 64)
    assert [p.config.budget for p in other.policies] == [100, 100] and other.rows == 8
    assert other.policies[1].config.buffer == 128 and stack.policies[0].config.budget == 200
    assert stack.changed("off", 64) is None
    for text in ("window=9000", "buffer=1", "budget=1", "budget=x", "budget", "sinks=2", "=,=", "budget=100,rows=5"):
        with pytest.raises(ConfigError):  # what makes work, or means nothing
            stack.changed(text, 64)


@pytest.mark.parametrize("spec", [*SPECS, "sink_window:sinks=1,window=3,slack=1"])
def test_the_most_tokens_are_found_without_walking_a_long_prompt(spec):
    stack, calls = load(spec), []
    for policy in stack.policies:
        due = policy.next_due
        policy.next_due = lambda *at, due=due: calls.append(at) or due(*at)
    assert stack.most(1_000_000, 2_000_000) >= 4 and len(calls) < 100
