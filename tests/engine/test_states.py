"""Models with recurrent layers in the engine: tokens do not depend on chunks, company, preemption, snapshots, drafts or
failed steps. Planted mistakes must be seen.

CPU exact mode, poison and invariant checks on. The reference runs every request alone in one chunk, without a cache.
"""

from __future__ import annotations

from functools import partial
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from kvasir.errors import ConfigError
from kvasir.kernels import gated_delta
from kvasir.kv.pool import KVPool
from kvasir.layers.mixers import gated_delta as own_mixer
from kvasir.layers.spec import LOOK_AHEAD
from kvasir.speculation.drafter import Ask, Drafter
from kvasir.speculation.tree import DraftTree
from tests import checkpoints, own_hybrids
from tests.engine.driver import Driver
from tests.speculation.helpers import install

PAGE, OUTPUT = 8, 10
LENGTHS = [5, 24, 41, 60]
SHARED = [1 + (7 * i) % (checkpoints.VOCAB - 1) for i in range(80)]
PROMPTS = [SHARED[: length - 3] + [1 + k, 2 + 2 * k, 3] for k, length in enumerate(LENGTHS)]


OTHERS = "kimi_linear", "siso", "m2rnn"  # the last two: Mamba-3 and M2RNN, folders of our own


@pytest.fixture(scope="module", params=["qwen3_5_text", *(pytest.param(n, marks=pytest.mark.slow) for n in OTHERS)])
def folder(request, tmp_path_factory):
    """Three recurrent layers and one that attends."""
    path = tmp_path_factory.mktemp("model")
    if request.param in own_hybrids.CONFIGS:
        own_hybrids.write(path, request.param)
        return str(path)
    return str(checkpoints.write(path, request.param))


def engine(folder: str, **options) -> Driver:
    given = dict(page_slots=PAGE, max_num_batched_tokens=256, max_num_seqs=8, max_model_len=96, num_pages=128)
    return Driver(folder, **{**given, "state_interval": 16, **options})


def fleet(driver: Driver, tag: str = "", n: int = 1, **params):
    return [
        driver.request(
            f"r{tag}{i}",
            p,
            **{"temperature": 1.0, "seed": i, "max_tokens": OUTPUT, "ignore_eos": True, "n": n, **params},
        )
        for i, p in enumerate(PROMPTS)
    ]


def answers(driver: Driver, tag: str = "") -> dict:
    assert not driver.errors
    return {
        (name.removeprefix("r" + tag), branch): out.tokens
        for (name, branch), out in driver.outputs.items()
        if name[1:-1] == tag
    }


@pytest.fixture(scope="module")
def alone(folder):
    driver = engine(folder, enable_prefix_caching=False, overlap=False)
    for request in fleet(driver, n=4):
        driver.run([request])
    driver.close()
    return answers(driver)


def first(alone: dict) -> dict:
    """The answers of the first branches."""
    return {key: tokens for key, tokens in alone.items() if not key[1]}


CROWDS = {
    "small chunks": (dict(max_num_batched_tokens=7), dict(gap=2)),
    "preempted": (dict(max_num_batched_tokens=33), dict(preempt_every=3)),
    "tight": (dict(num_pages=24, max_num_seqs=4, max_num_batched_tokens=40), dict()),
    "no cache": (dict(enable_prefix_caching=False, max_num_batched_tokens=50), dict(gap=1, preempt_every=5)),
}


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True], ids=["depth0", "depth1"])
@pytest.mark.parametrize("crowd", CROWDS)
def test_tokens_in_a_crowd(folder, alone, overlap, crowd):
    options, run = CROWDS[crowd]
    driver = engine(folder, overlap=overlap, **options)
    driver.run(fleet(driver), **run)
    driver.run(fleet(driver, "again"), **run)
    driver.close()
    assert answers(driver) == answers(driver, "again") == first(alone)


@pytest.mark.parametrize("cache", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_branches_of_a_prompt(folder, alone, cache):
    driver = engine(folder, max_num_batched_tokens=40, enable_prefix_caching=cache)
    driver.run(fleet(driver, n=4))
    driver.close()
    assert answers(driver) == alone
    found = driver.engine.pages.cached_tokens > 0
    assert found == cache, "prompts that begin alike find each other's snapshots"


def test_a_hit_ends_where_a_snapshot_is(folder, alone):
    """Snapshots are at multiples of the interval, at the last page of a prompt, and where one left another."""
    driver = engine(folder, state_interval=32, num_pages=900)
    cached = []
    for tag in ("", "again"):
        for request in fleet(driver, tag):
            driver.run([request])
            cached.append(driver.outputs[request.id, 0].num_cached)
    driver.close()
    assert answers(driver) == answers(driver, "again") == first(alone)
    assert cached == [0, 0, 16, 32, 0, 16, 40, 56]


class Scripted(Drafter):
    """Propose chains, or trees whose first path is one, of which ``right`` tokens are right."""

    def __init__(self, outputs: dict, right: int, tree: bool = False) -> None:
        super().__init__()
        self.outputs, self.right, self.tree = outputs, right, tree

    def propose(self, asks: list[Ask]) -> list[DraftTree]:
        return [self._chain(ask) for ask in asks]

    def _chain(self, ask: Ask) -> DraftTree:
        seq, tree, node = ask.seq, DraftTree(), -1
        for i, token in enumerate(self.outputs[seq.request.id[1:], seq.branch][seq.num_output :][: ask.max_depth // 2]):
            wrong = 1 + token % (checkpoints.VOCAB - 1)
            parent, node = node, tree.add(node, token if i < self.right else wrong, 0.9)
            if self.tree:
                tree.add(parent, 1 + wrong % (checkpoints.VOCAB - 1), 0.1)
        return tree


def drafted(folder: str, alone: dict, right: int, tree: bool = False, **options) -> dict:
    driver = engine(folder, max_num_batched_tokens=60, drafter="ngram", draft_control="fixed", **options)
    install(driver, Scripted(alone, right, tree))
    driver.run(fleet(driver), preempt_every=7)
    driver.close()
    stats = driver.engine.stats()
    assert stats.drafted_tokens and (stats.accepted_tokens > 0) == (right > 0)
    return answers(driver)


@pytest.mark.parametrize("right, tree", [(0, False), (1, False), (99, False), (1, True)])
def test_drafts_leave_no_trace(folder, alone, right, tree):
    assert drafted(folder, alone, right, tree) == first(alone)


# ------------------------------------------------------------------------------------------------------ steps that fail


def failing(driver: Driver, monkeypatch, every: int = 4, layer: int = 2) -> list[int]:
    """Let every fourth step with company fail in a recurrent layer, by default the third one. Returns a list that gets
    the failures."""
    mixer, calls, failed = driver.engine.runner.model.blocks[layer].mixer, count(), []
    real = mixer.forward

    def forward(x_TE, angles, cache, backend, batch, *rest, **more):
        if len(batch.starts) > 1 and next(calls) % every == every - 1:
            failed.append(len(batch.starts))
            raise RuntimeError("injected")
        return real(x_TE, angles, cache, backend, batch, *rest, **more)

    monkeypatch.setattr(mixer, "forward", forward)
    return failed


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True], ids=["depth0", "depth1"])
def test_a_failed_step_changes_nothing(folder, alone, overlap, monkeypatch):
    driver = engine(folder, overlap=overlap, max_num_batched_tokens=40)
    failed = failing(driver, monkeypatch)
    driver.run(fleet(driver), preempt_every=6)
    driver.close()
    assert len(failed) > 2 and answers(driver) == first(alone)


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["qwen3_next"], indirect=True)
@pytest.mark.parametrize("overlap", [False, True], ids=["depth0", "depth1"])
def test_a_step_that_fails_in_layer_5_changes_nothing(folder, alone, overlap, monkeypatch):
    """Its first and third layers have moved on by then, and its second and fourth have written keys; experts."""
    driver = engine(folder, overlap=overlap, max_num_batched_tokens=40)
    assert driver.engine.runner.model.blocks[4].mixer in driver.engine.runner.parts.recurrent()
    failed = failing(driver, monkeypatch, layer=4)
    driver.run(fleet(driver), preempt_every=6)
    driver.close()
    assert len(failed) > 2 and answers(driver) == first(alone)


def test_a_step_fails_after_the_next_was_launched(folder, alone, monkeypatch):
    """The states of its decodes have moved on, so that their sequences start again."""
    driver = engine(folder, overlap=True)
    launch, calls, failed = driver.engine.runner.launch, count(), []

    def launched(plan, late=False):
        handle = launch(plan, late)
        if next(calls) % 6 != 5 or plan.num_rows > len(plan.spans) or len(plan.spans) == 1:
            return handle

        def read():
            failed.append(driver.engine.num_in_flight)
            raise RuntimeError("injected")

        return SimpleNamespace(read=read)

    monkeypatch.setattr(driver.engine.runner, "launch", launched)
    driver.run(fleet(driver))
    driver.close()
    assert failed and max(failed) == 1 and answers(driver) == first(alone)


@pytest.mark.parametrize("folder", ["qwen3_5_text"], indirect=True)
@pytest.mark.parametrize("waiting", [2, 4, LOOK_AHEAD])
def test_states_may_be_written_once_in_several_steps(folder, alone, waiting, monkeypatch):
    """As a GPU does with many sequences: until then rows wait in their pages, through copies, drafts and failures."""
    monkeypatch.setattr(own_mixer, "step", partial(gated_delta.step, waiting=waiting))
    test_tokens_in_a_crowd(folder, alone, True, "tight")
    test_branches_of_a_prompt(folder, alone, True)
    test_a_hit_ends_where_a_snapshot_is(folder, alone)
    for right in (0, 1, 99):
        test_drafts_leave_no_trace(folder, alone, right, False)
    test_a_failed_step_changes_nothing(folder, alone, True, monkeypatch)
    test_a_step_fails_after_the_next_was_launched(folder, alone, monkeypatch)


# ----------------------------------------------------------------------------------------------------- planted mistakes


def in_place(monkeypatch) -> None:
    """The state after all rows of a short span is written over the page's own."""
    real = gated_delta.step_reference

    def wrong(rows, planes, pages, starts, lengths, weights, exact=False, **more):
        out = real(rows, planes, pages, starts, lengths, weights, exact, **more)
        for (read, _), start, length in zip(pages, starts, lengths):
            if length <= LOOK_AHEAD:
                given, dims = (planes["matrix"][read], planes["tail"][read]), planes["matrix"].shape[1:]
                state, tail = gated_delta._advance(planes["ahead"][read, :length], *given, weights, tuple(dims))
                planes["matrix"][read], planes["tail"][read], planes["position"][read] = state, tail, start + length
        return out

    monkeypatch.setattr(gated_delta, "step_reference", wrong)


def cleared_tail(monkeypatch) -> None:
    """The convolution of a span does not see the rows before it."""
    real = gated_delta.inputs
    monkeypatch.setattr(gated_delta, "inputs", lambda rows, tail, *rest: real(rows, torch.zeros_like(tail), *rest))


def late_snapshot(monkeypatch) -> None:
    """A snapshot hangs at the end of a page, and holds the token after it, too."""
    copy = KVPool.copy

    def late(self, copies):
        copy(self, copies)
        for one in copies:
            group = self.groups[one.group]
            for layer in group.layers if group.kind == "state" else ():
                planes = self.layer(layer).planes
                if planes["position"][one.target] % PAGE == 0:
                    planes["position"][one.target] -= 1

    monkeypatch.setattr(KVPool, "copy", late)


def without_the_walk(monkeypatch) -> None:
    """One draft more is folded than the walk accepted."""
    real = gated_delta.step_reference

    def wrong(rows, planes, pages, starts, lengths, weights, exact=False, **more):
        for (read, _), start, length in zip(pages, starts, lengths):
            if start and length <= LOOK_AHEAD and 0 < start - planes["position"][read] < LOOK_AHEAD:
                planes["position"][read] -= 1
        return real(rows, planes, pages, starts, lengths, weights, exact, **more)

    monkeypatch.setattr(gated_delta, "step_reference", wrong)


def hits(folder: str, alone: dict) -> dict:
    """Answers after prefix hits."""
    driver = engine(folder)
    driver.run(fleet(driver))
    driver.run(fleet(driver, "again"))
    driver.close()
    assert driver.engine.pages.cached_tokens
    return answers(driver, "again")


# Those that wrong a rule's own code do so to one family; tests/layers/test_recurrence.py has them for the other rules.
@pytest.mark.parametrize("folder", ["qwen3_5_text"], indirect=True)
@pytest.mark.parametrize(
    "plant, run",
    [
        (in_place, lambda folder, alone: drafted(folder, alone, 1)),
        (cleared_tail, hits),
        (late_snapshot, hits),
        (without_the_walk, lambda folder, alone: drafted(folder, alone, 1)),
    ],
    ids=["in place", "cleared tail", "late snapshot", "folded without the walk"],
)
def test_the_comparison_sees(plant, run, folder, alone, monkeypatch):
    plant(monkeypatch)
    try:
        found = run(folder, alone)
    except AssertionError as e:
        # A state is past its span's start, or a row is folded that nobody wrote.
        assert "internal_error" in str(e) or "internal_numeric_error" in str(e)
        return
    assert found != first(alone)


# ------------------------------------------------------------------------------------------------------- rounded states


def test_states_in_bfloat16(folder):
    """Half of the matrices' bytes; answers come, and differ from those of fp32 states only by what is drawn."""
    found = []
    for state_dtype in ("float32", "bfloat16"):
        driver = engine(folder, state_dtype=state_dtype, batch_invariant=False)
        pool = driver.engine.runner.pool
        found.append((pool.layer(0).planes["matrix"].dtype, pool.page_bytes(1)))
        driver.run(fleet(driver, temperature=0.0), gap=1, preempt_every=5)
        assert not driver.errors and len(driver.outputs) == len(PROMPTS)
        driver.close()
    assert [dtype for dtype, _ in found] == [torch.float32, torch.bfloat16] and found[1][1] < found[0][1]


def test_rounded_states_are_refused_where_they_cannot_be(folder):
    with pytest.raises(ConfigError, match="float32 with --batch-invariant"):
        engine(folder, state_dtype="bfloat16")
    with pytest.raises(ConfigError, match="no recurrent layers"):
        Driver("nano", state_dtype="bfloat16", batch_invariant=False)
