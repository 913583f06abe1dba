"""Models with recurrent layers in the engine: tokens do not depend on chunks, company, preemption, snapshots, drafts or
failed steps. Planted mistakes must be seen.

CPU exact mode, poison and invariant checks on. The reference runs every request alone in one chunk, without a cache.
"""

from __future__ import annotations

import pytest

from kvasir.speculation.drafter import Ask, Drafter
from kvasir.speculation.tree import DraftTree
from tests import checkpoints
from tests.engine.driver import Driver
from tests.speculation.helpers import install

PAGE, OUTPUT = 8, 10
LENGTHS = [5, 24, 41, 60]
SHARED = [1 + (7 * i) % (checkpoints.VOCAB - 1) for i in range(80)]
PROMPTS = [SHARED[: length - 3] + [1 + k, 2 + 2 * k, 3] for k, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three recurrent layers and one that attends."""
    return str(checkpoints.write(tmp_path_factory.mktemp("model"), "qwen3_5_text"))


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
