"""KV policies in the engine: what a sequence keeps depends on its tokens alone, and whoever forgets harms nobody."""

from __future__ import annotations

import random
from contextlib import contextmanager

import pytest
import torch

from kvasir.engine import forgetting
from kvasir.engine.forgetting import Forgetter
from kvasir.engine.schedule import spans
from kvasir.engine.ways import watched_steps
from kvasir.errors import ConfigError
from kvasir.kv.policy import load
from tests.engine.driver import Driver, Output

WINDOW = "sink_window:sinks=4,window=24,slack=8"
SNAP = "snapkv:budget=40,window=16"
H2O = "h2o:heavy=0.2,recent=0.2,slack=8,least=8"
LAZY = "lazy_eviction:budget=60,window=8,alpha=0.01"
R_KV = "r_kv:budget=60,buffer=8,rows=4"
POLICIES = [
    WINDOW,
    SNAP,
    H2O,
    f"{H2O},noise=true",
    f"{SNAP}+{LAZY}",
    R_KV,
    "pyramidkv:budget=40,window=16",
    "cake:budget=40,window=16",
]
OPEN = [
    "sink_window:window=4096",
    "snapkv:budget=4096+r_kv:budget=4096",
    "h2o:heavy=1,recent=1,slack=4096",
    "lazy_eviction:budget=4096",
    "pyramidkv:budget=4096",
    "cake:budget=4096",
]


def prompts(count: int = 4, seed: int = 1) -> list[list[int]]:
    draw = random.Random(seed)
    shared = [draw.randrange(3, 90) for _ in range(50)]
    lengths = [130, 70, 95, 33, 160, 88]
    return [
        (shared if i % 2 else []) + [draw.randrange(3, 90) for _ in range(n)] for i, n in enumerate(lengths[:count])
    ]


def requests(driver: Driver, count: int = 4, **params) -> list:
    params = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True} | params
    return [driver.request(f"r{i}", ids, seed=i, **params) for i, ids in enumerate(prompts(count))]


def tokens_of(outputs) -> dict:
    return {key: out.tokens for key, out in outputs.items()}


@contextmanager
def kept_sets(monkeypatch):
    """Collect what is kept: by request, branch, and length, the places that stay in each layer."""
    found: dict[tuple[str, int, int], list] = {}
    kept = Forgetter._kept

    def noting(self, policy, seq, left):
        groups = kept(self, policy, seq, left)
        key = seq.request.id, seq.branch, seq.num_computed
        now = sorted((layer, at.tolist()) for _, places in groups.values() for layer, at in places.items())
        assert found.setdefault(key, now) == now, f"{key} keeps other tokens than before"
        return groups

    with monkeypatch.context() as patch:
        patch.setattr(Forgetter, "_kept", noting)
        yield found


def outcome(monkeypatch, spec, *, runs=({},), **options):
    """Tokens and kept sets of the requests, run with these ``Driver.run`` options."""
    driver = Driver(kv_policy=spec, **options)
    with kept_sets(monkeypatch) as sets:
        out = driver.run(requests(driver), **runs[0])
    driver.close()
    return tokens_of(out), sets


@pytest.mark.parametrize("spec", OPEN)
def test_a_wide_budget_is_the_whole_cache(spec):
    plain, open_ = Driver(), Driver(kv_policy=spec)
    assert tokens_of(plain.run(requests(plain))) == tokens_of(open_.run(requests(open_)))
    assert open_.engine.stats().forgotten_tokens == 0


@pytest.mark.parametrize("spec", POLICIES)
def test_kept_sets_do_not_depend_on_what_else_runs(spec, monkeypatch):
    """Alone, in a crowd, for any cut of prompts, after preemptions, and with a prefix hit: the same tokens stay, and
    the same tokens are drawn."""
    tokens, sets = outcome(monkeypatch, spec)
    assert sets and len({key[0] for key in sets}) > 1
    ways = [
        dict(max_num_seqs=1),
        dict(max_num_batched_tokens=48),
        dict(max_num_batched_tokens=37, max_num_seqs=3),
        dict(runs=[dict(preempt_every=7)]),
        dict(runs=[dict(gap=9)]),
        dict(enable_prefix_caching=False),
        dict(overlap=True),
        dict(page_slots=8, num_pages=512),
    ]
    few = spec not in (WINDOW, SNAP, H2O)  # the others forget by the same code: the ways that cut most
    for options in ways[2:4] if few else ways:
        assert outcome(monkeypatch, spec, **options) == (tokens, sets), options


@pytest.mark.parametrize("spec", POLICIES)
def test_it_forgets(spec):
    """What is drawn differs from the whole cache's tokens, and the pages behind what stays are free again."""
    plain, driver = Driver(), Driver(kv_policy=spec, enable_prefix_caching=False)
    want = plain.run(requests(plain))
    waiting, most = requests(driver), 0
    for request in waiting:
        driver.submit(request)
    while driver.engine.has_work():
        driver.step()
        for seq in driver.engine.scheduler.running:
            if seq.forgotten and seq.num_output > 1:
                for group, table in enumerate(seq.tables):
                    count = seq.place(group, seq.num_computed)
                    assert len(table) <= -(-(count + 2) // 16)
                    most = max(most, seq.num_computed - count)
    driver.assert_clean()
    assert most > 40 and driver.engine.stats().forgotten_tokens >= most
    assert tokens_of(driver.outputs) != tokens_of(want)


def dense_after_forgetting(driver: Driver):
    """What a dense request gets after one with the same beginning has forgotten most of it."""
    driver.run([driver.request("b", prompts()[0], temperature=0.0, max_tokens=30, ignore_eos=True)])
    driver.engine.requests.follow([])  # nothing is forgotten of the next
    again = driver.request("a", prompts()[0] + [5, 6], temperature=0.0, max_tokens=3, logprobs=3)
    out = driver.run([again])["a", 0]
    assert out.num_cached > 30
    return out.tokens, out.logprobs


class Masked:
    """A backend whose rows see what was not forgotten when they were computed. ``alive``: by layer, the position from
    which rows see so, and the positions [G][C] that were left then, in ascending order of the former."""

    def __init__(self, backend, layers, alive) -> None:
        self.backend, self.layers, self.alive = backend, layers, alive

    def __getattr__(self, name):
        return getattr(self.backend, name)

    def run(self, q, cache, spec, batch, *, sinks_H=None, out_THD=None):
        length, groups = len(q), spec.num_kv_heads
        k, v = (x[0, :, :length].float() for x in cache.codec.read(cache, batch.tables[cache.group][:1].long()))
        seen = torch.ones(groups, length, length, dtype=torch.bool).tril()
        for start, left in self.alive[self.layers[id(cache)]]:
            seen[:, start:, :start] = False
            for g in range(groups):
                seen[g, start:, left[g % len(left)]] = True
        rows = q.view(length, groups, -1, spec.head_dim).permute(1, 2, 0, 3).float()
        scores = (rows @ k[:, None].transpose(2, 3) * spec.scale).masked_fill(~seen[:, None], -torch.inf)
        return (scores.softmax(-1) @ v[:, None]).permute(2, 0, 1, 3).reshape(q.shape)


def alive_positions(sets, name: str) -> dict[int, list]:
    """By layer, what was left at each due position, as positions."""
    alive: dict[int, list] = {}
    for (request, _, length), layers in sorted(sets.items(), key=lambda item: item[0][2]):
        for layer, places in layers if request == name else ():
            known = alive.setdefault(layer, [])
            start, before = known[-1] if known else (0, [[]])
            now = [[*held, *range(start, length)] for held in before]
            now = [now[g % len(now)] for g in range(max(len(now), len(places)))]
            known.append((length, [[held[p] for p in places[g % len(places)]] for g, held in enumerate(now)]))
    return alive


@pytest.mark.parametrize("spec", POLICIES)
def test_what_is_left_is_dense_attention_without_what_was_forgotten(spec, monkeypatch):
    """One dense forward over all tokens, in which each row and head sees what was left at its time."""
    driver = Driver(kv_policy=spec)
    with kept_sets(monkeypatch) as sets:
        mine = driver.run(requests(driver, logprobs=0))["r0", 0]
    dense, alive = Driver(max_num_batched_tokens=512), alive_positions(sets, "r0")
    parts = dense.engine.runner.parts
    layers = {id(parts.pool.layer(i)): i for i in range(len(parts.caches))}
    monkeypatch.setattr(parts, "backend", Masked(parts.backend, layers, alive))
    prompt = prompts()[0] + mine.tokens
    found = dense.run([dense.request("all", prompt, max_tokens=1, prompt_logprobs=0)])["all", 0].prompt_logprobs
    want = torch.tensor([entry.logprob for entry in found[-len(mine.tokens) :]])
    got = torch.tensor([entry.logprob for entry in mine.logprobs])
    assert all(alive.values())
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    monkeypatch.setattr(parts, "backend", Masked(parts.backend.backend, layers, {i: [] for i in alive}))
    dense.outputs.clear()
    found = dense.run([dense.request("whole", prompt, max_tokens=1, prompt_logprobs=0)])["whole", 0].prompt_logprobs
    whole = torch.tensor([entry.logprob for entry in found[-len(mine.tokens) :]])
    assert (got - whole).abs().max() > 1e-2, "what was forgotten must matter here"


def test_a_dense_request_after_one_that_forgot_gets_what_a_fresh_server_gives():
    """Pages that were given up are poisoned, and those in the prefix index still hold what they held."""
    fresh = Driver()
    want = fresh.run([fresh.request("a", prompts()[0] + [5, 6], temperature=0.0, max_tokens=3, logprobs=3)])["a", 0]
    assert dense_after_forgetting(Driver(kv_policy=SNAP)) == (want.tokens, want.logprobs)


def test_moving_tokens_inside_an_indexed_page_would_be_noticed(monkeypatch):
    """Where the index keeps a page that was moved over, another prompt reads other tokens' keys."""
    want, driver = dense_after_forgetting(Driver(kv_policy=SNAP)), Driver(kv_policy=SNAP)
    monkeypatch.setattr(forgetting, "to_keep", lambda pages, seq, group, left: seq.tables[group][: -(-left // 16)])
    assert dense_after_forgetting(driver)[1] != want[1]


@pytest.mark.parametrize("static, pieces", [(True, False), (False, True)])
def test_captured_steps_count_places(static, pieces, monkeypatch):
    tokens, sets = outcome(monkeypatch, WINDOW)
    assert outcome(monkeypatch, WINDOW, static=static, pieces=pieces) == (tokens, sets)


def test_native_steps_and_tapes_count_places():
    """Outside exact mode the ways of a CPU draw what layer-by-layer steps draw (fp32, no ties in these requests)."""
    found = []
    for fused in (True, False):
        driver = Driver(kv_policy=WINDOW, batch_invariant=False, fused_kernels=fused)
        found.append(tokens_of(driver.run(requests(driver))))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "spec, drafter", [(WINDOW, "token_recycling"), (WINDOW, "ngram"), (SNAP, "token_recycling"), (R_KV, "ngram")]
)
def test_drafts_change_nothing(spec, drafter, monkeypatch):
    tokens, sets = outcome(monkeypatch, spec)
    assert outcome(monkeypatch, spec, drafter=drafter, draft_control="fixed") == (tokens, sets)


def test_rows_are_shown_in_parts(monkeypatch):
    """Long prompts would need too much memory at once: what is kept does not depend on the parts."""
    for spec in (H2O, f"{SNAP}+{LAZY}"):
        whole = outcome(monkeypatch, spec)
        with monkeypatch.context() as patch:
            patch.setattr(watched_steps, "BLOCK", 3000)
            assert outcome(monkeypatch, spec) == whole


def test_branches_of_a_request_forget_apart(monkeypatch):
    def run(**options):
        driver = Driver(kv_policy=SNAP, **options)
        with kept_sets(monkeypatch) as sets:
            out = driver.run(requests(driver, n=3, temperature=1.0))
        return tokens_of(out), sets

    assert run() == run(max_num_batched_tokens=40, max_num_seqs=2)


# ---------------------------------------------------------------------------------------------------- must be noticed


def test_a_span_that_crosses_a_due_position_is_noticed(monkeypatch):
    monkeypatch.setattr(spans, "rows_until_stop", lambda seq, start: 1 << 30)
    driver = Driver(kv_policy=WINDOW)
    with pytest.raises(AssertionError, match="crosses a due position"):
        driver.run(requests(driver))


# ------------------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    "spec, words",
    [
        ("snapkv+snapkv:budget=90", "both snapkv and snapkv"),
        ("sink_window+snapkv", "both sink_window and snapkv forget tokens of the prompt"),
        ("snapkv:budget=10,window=16", "budget is larger"),
        ("snapvk", "snapkv"),
        ("sink_window:window=0", "at least 1"),
    ],
)
def test_what_cannot_work_is_refused(spec, words):
    with pytest.raises(ConfigError, match=words):
        load(spec)


def test_a_window_of_rows_needs_a_step_that_holds_it():
    with pytest.raises(ConfigError, match="--max-num-batched-tokens 64"):
        Driver(kv_policy="snapkv:budget=100,window=64", max_num_batched_tokens=32)


def test_keys_in_another_basis_are_refused():
    with pytest.raises(ConfigError, match="another basis"):
        Driver(kv_policy=SNAP, kv_codec="int4_bdr")


def test_scores_by_row_of_the_batch_would_be_noticed(monkeypatch):
    """A policy that mixes up requests keeps other tokens in a crowd than alone."""
    from kvasir.kv.policies.snapkv import SnapKV

    tokens = outcome(monkeypatch, SNAP, max_num_seqs=1)
    shared: dict = {}
    observe, keep = SnapKV.observe, SnapKV.keep

    def mixed(self, memory, attention, first):
        memory.notes = shared
        observe(self, memory, attention, first)

    def mixed_keep(self, memory, left):
        scores = shared[memory.layer]
        short = memory.count - self.rows - scores.shape[1]
        scores = torch.nn.functional.pad(scores, (0, max(0, short)))[:, : memory.count - self.rows]
        memory.notes = {memory.layer: scores}
        return keep(self, memory, left)

    monkeypatch.setattr(SnapKV, "observe", mixed)
    monkeypatch.setattr(SnapKV, "keep", mixed_keep)
    assert outcome(monkeypatch, SNAP) != tokens


# ------------------------------------------------------------------------------------------------- everything at once


def test_a_killed_engine_goes_on_with_the_same_tokens(monkeypatch):
    """Another engine gets the request with the tokens that were delivered, and repeats every decision before them."""
    for spec in (WINDOW, H2O, f"{SNAP}+{LAZY}"):
        whole = Driver(kv_policy=spec)
        with kept_sets(monkeypatch) as sets:
            want = tokens_of(whole.run(requests(whole)))
        again = Driver(kv_policy=spec)
        given = requests(again)
        for i, request in enumerate(given):
            request.emitted, request.epoch = [want[request.id, 0][: 7 * i + 3]], 1
            again.outputs[request.id, 0] = Output(tokens=list(request.emitted[0]))
        with kept_sets(monkeypatch) as replayed:
            assert tokens_of(again.run(given)) == want, spec
        assert replayed == sets


def test_a_request_keeps_its_whole_cache_or_other_numbers():
    plain, driver = Driver(), Driver(kv_policy=SNAP)
    want = tokens_of(plain.run(requests(plain)))
    assert tokens_of(driver.run(requests(driver, kv_policy="off"))) == want
    driver.outputs.clear()
    tight = tokens_of(driver.run(requests(driver)))
    driver.outputs.clear()
    wide = tokens_of(driver.run(requests(driver, kv_policy="budget=400")))
    assert wide == want != tight
    driver.submit(driver.request("bad", prompts()[0], kv_policy="bugdet=400"))
    plain.submit(plain.request("none", prompts()[0], kv_policy="budget=400"))
    assert driver.errors["bad"].status == 400 and "'bugdet'" in driver.errors["bad"].message
    assert plain.errors["none"].status == 400 and "--kv-policy" in plain.errors["none"].message


def random_work(spec: str, steps: int, seed: int, **options) -> None:
    """Requests come, end, are cancelled and preempted at random, with branches and the prefix cache, in a pool that is
    too small. Each that ends has the tokens that it gets alone; nothing is lost, and no freed page is read."""
    draw, driver = random.Random(seed), Driver(kv_policy=spec, num_pages=40, max_num_seqs=6, **options)
    kinds = [(ids, n, 5 + 7 * i) for i, ids in enumerate(prompts(6)) for n in (1, 2)]
    want: dict[int, dict] = {}
    alone = Driver(kv_policy=spec, enable_prefix_caching=False)
    live: dict[str, int] = {}
    for step in range(steps):
        if draw.random() < 0.12 and len(live) < 10:
            kind = draw.randrange(len(kinds))
            ids, n, length = kinds[kind]
            name = f"{step}"
            live[name] = kind
            driver.submit(
                driver.request(name, ids, n=n, max_tokens=length, seed=kind, temperature=1.0, ignore_eos=True)
            )
        if live and draw.random() < 0.02:
            name = draw.choice(sorted(live))
            driver._take(driver.engine.cancel(name))
            del live[name]
        driver.step(preempt=draw.random() < 0.05)
        for name in [n for n in live if n not in driver.engine.requests.live]:
            kind = live.pop(name)
            ids, n, length = kinds[kind]
            if kind not in want:
                alone.outputs.clear()
                given = alone.request("x", ids, n=n, max_tokens=length, seed=kind, temperature=1.0, ignore_eos=True)
                want[kind] = {branch: out.tokens for (_, branch), out in alone.run([given]).items()}
            assert not driver.errors
            assert {b: driver.outputs[name, b].tokens for b in range(n)} == want[kind]
    for name in list(live):
        driver._take(driver.engine.cancel(name))
    driver.assert_clean()
    assert driver.engine.stats().forgotten_tokens > 100


def test_a_context_that_the_pool_cannot_hold_runs_where_it_is_forgotten():
    """A pool of 160 tokens serves prompts of 400, one after the other and at once."""
    with pytest.raises(ConfigError, match="does not fit"):
        Driver(num_pages=11)
    wide, tight = Driver(kv_policy=WINDOW), Driver(kv_policy=WINDOW, num_pages=11)
    text = [ids + ids[:90] + ids[::-1] for ids in prompts()]
    found = []
    for driver in (wide, tight):
        given = [driver.request(f"r{i}", ids, max_tokens=20, ignore_eos=True, seed=i) for i, ids in enumerate(text)]
        found.append(tokens_of(driver.run(given)))
        assert not driver.errors
    assert found[0] == found[1]
    tight.submit(tight.request("dense", text[0], kv_policy="off", max_tokens=5))
    assert tight.errors["dense"].status == 400 and "the pool holds" in tight.errors["dense"].message


@pytest.mark.parametrize("spec", [SNAP, "cake:budget=40,window=16"])
def test_a_pool_that_just_holds_a_prompt_forgets_it_in_place(spec):
    """There are no pages to move to: its own leave the index."""
    driver, roomy = Driver(kv_policy=spec, num_pages=12, max_model_len=170), Driver(kv_policy=spec)
    ids = [prompts()[i % 2][:165] for i in range(3)]
    found = []
    for d in (driver, roomy):
        given = [d.request(f"r{i}", p, max_tokens=5, ignore_eos=True, seed=i) for i, p in enumerate(ids)]
        found.append(tokens_of(d.run(given, limit=3000)))
    assert found[0] == found[1]


@pytest.mark.parametrize("spec", [WINDOW, f"{SNAP}+{R_KV}", "cake:budget=40,window=16"])
def test_random_work(spec):
    random_work(spec, 250, 1)


@pytest.mark.slow
@pytest.mark.parametrize("spec", POLICIES)
def test_10_000_random_steps(spec):
    random_work(spec, 10_000, 2)
