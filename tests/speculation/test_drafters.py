"""Token recycling, and the choice among several drafters."""

from __future__ import annotations

import itertools
from functools import partial

import pytest

from kvasir import technique
from kvasir.config import SpeculationConfig
from kvasir.errors import ConfigError
from kvasir.speculation.drafter import DRAFTERS, Ask, Drafter
from kvasir.speculation.router import EXPLORE, Router, load_drafter
from kvasir.speculation.tree import DraftTree
from kvasir.types import Request, SamplingParams, Sequence
from tests.speculation import trained


def sequence(tokens: list[int], tenant: str = "", **params) -> Sequence:
    return Sequence(
        Request(id="r", prompt_ids=tokens, params=SamplingParams(**params), seed=0, max_tokens=99, tenant=tenant)
    )


# ----------------------------------------------------------------------------------------------------- token recycling


def test_the_likeliest_successors_become_a_tree():
    drafter = technique.load(DRAFTERS, "token_recycling", Drafter)
    seq = sequence([1, 2])
    drafter.recycle(
        seq, [2, 5, 2], [[9] * 8, [7, 8, 0, 3, 4, 6, 9, 10], [5, 6, 0, 3, 4, 7, 8, 9]]
    )  # the later row of 2 counts
    tree = drafter.propose([Ask(seq, 5, 3)])[0]
    assert tree.tokens[:2] == [5, 7] and tree.parents[:2] == [-1, 0], "the likeliest path first"
    assert sorted(t for t, p in zip(tree.tokens, tree.parents) if p == -1) == [0, 5, 6]
    assert len(tree) == 5 and max(tree.depths) < 3


def test_rows_come_from_the_text_where_nothing_was_verified():
    drafter = technique.load(DRAFTERS, "token_recycling", Drafter)
    assert drafter.propose([Ask(sequence([1, 2, 3, 1], "a"), 3, 3)])[0].tokens == [2, 3, 1]
    assert drafter.propose([Ask(sequence([1], "a"), 1, 1)])[0].tokens == [2], "from another text of the tenant"
    assert not len(drafter.propose([Ask(sequence([1], "b"), 1, 1)])[0])
    alone = technique.load(DRAFTERS, "token_recycling:scope=request", Drafter)
    alone.propose([Ask(sequence([1, 2, 3, 1]), 3, 3)])
    assert not len(alone.propose([Ask(sequence([1]), 1, 1)])[0])


def test_without_the_drafter_no_step_reports_what_it_read():
    d = trained.driver("token_recycling")
    sampler = d.engine.runner.sampler
    d.run(trained.requests(d, 0.0))
    assert sampler.num_top
    d.engine.draft_with(SpeculationConfig())
    assert not sampler.num_top
    d.close()


def full_tree(spec: str, nodes: int = 80) -> DraftTree:
    """The tree of this drafter where every token has eight successors, which tell the ranks of their path."""
    drafter = technique.load(DRAFTERS, spec, Drafter)
    seq, tokens = sequence([0]), range(8**5)
    drafter.recycle(seq, list(tokens), [[token * 8 + rank + 1 for rank in range(8)] for token in tokens])
    return drafter.propose([Ask(seq, nodes, 6)])[0]


def test_the_published_tree_has_eighty_nodes_six_deep():
    tree, ours = full_tree("token_recycling:tree=published", 200), full_tree("token_recycling")
    assert [tree.depths.count(depth) for depth in range(6)] == [8, 21, 25, 15, 8, 3]
    below = {p: tree.parents.count(p) for p in range(-1, len(tree))}
    first = [node for node, parent in enumerate(tree.parents) if parent == -1]
    by_rank = sorted(first, key=lambda node: tree.tokens[node])
    assert [below[node] for node in by_rank] == [8, 4, 3, 2, 1, 1, 1, 1]
    assert [ours.depths.count(depth) for depth in range(6)] != [8, 21, 25, 15, 8, 3], "the learnt tree is another one"


def test_a_small_budget_keeps_the_likeliest_paths_of_the_published_tree():
    part, whole = full_tree("token_recycling:tree=published", 24), full_tree("token_recycling:tree=published")
    assert len(part) == 24 and set(part.tokens) < set(whole.tokens)


def test_rows_are_bounded_by_tenant():
    drafter = technique.load(DRAFTERS, "token_recycling", Drafter)
    for tenant in range(200):
        drafter.propose([Ask(sequence(list(range(50)), str(tenant)), 4, 4)])
    assert 0 < drafter.state_bytes() <= 64 * 50 * 260


# ------------------------------------------------------------------------------------------------------------- routing


class Fixed(Drafter):
    """Propose ``count`` tokens, of which ``right`` are accepted."""

    def __init__(self, name: str, place: str, count: int) -> None:
        super().__init__()
        self.name, self.place, self.count, self.asked = name, place, count, 0

    def propose(self, asks):
        self.asked += 1
        return [DraftTree.chain(range(min(self.count, ask.max_nodes)), 0.5) for ask in asks]


def ticking():
    """A clock by which a call of a drafter and the rest of a step take a second each."""
    return partial(next, itertools.count(1.0))


def drive(router: Router, right: dict[str, int], steps: int, seq: Sequence | None = None) -> list[str]:
    seq, chosen = seq or sequence([1, 2, 3]), []
    for _ in range(steps):
        tree = router.propose([Ask(seq, 8, 8)])[0]
        chosen.append(tree.source)
        router.observe(seq, tree, list(range(right[tree.source])))
    return chosen


def test_the_better_drafter_gets_the_request():
    a, b = Fixed("a", "cpu", 4), Fixed("b", "same_device", 4)
    chosen = drive(Router([a, b], ticking()), {"a": 0, "b": 4}, 200)
    assert chosen[-EXPLORE:].count("b") >= EXPLORE - 2
    chosen = drive(Router([a, b], ticking()), {"a": 4, "b": 0}, 200)
    assert chosen[-EXPLORE:].count("a") >= EXPLORE - 2 and "b" in chosen, "and the other one is tried again"


def test_a_model_is_not_run_for_requests_that_others_serve():
    a, b = Fixed("a", "cpu", 4), Fixed("b", "same_device", 4)
    drive(Router([a, b], ticking()), {"a": 4, "b": 1}, 10 * EXPLORE)
    assert b.asked < 30


def test_a_request_may_pin_its_drafter():
    router = Router([Fixed("a", "cpu", 4), Fixed("b", "cpu", 4)])
    assert set(drive(router, {"a": 4, "b": 0}, 50, sequence([1, 2], drafter="b"))) == {"b"}


def test_trained_heads_and_copies_together(tmp_path):
    """Each head gets the layers that it reads out of all tapped ones, and no token changes."""
    heads = [f"{kind}:model={trained.random_head(kind, tmp_path / kind)}" for kind in ("medusa", "eagle")]
    expected = trained.plain(0.7)
    d = trained.driver("+".join(["suffix:min_match=1", *heads]))
    router = d.engine.proposals.drafting.drafter
    assert set(router._columns) == {"medusa", "eagle"} and len(router.hidden_layers) > len(router._columns["medusa"])
    for name in ("suffix", "medusa", "eagle"):
        d.outputs.clear()
        d.run(trained.requests(d, 0.7, drafter=name))
        assert trained.tokens(d) == expected
    assert set(d.engine.stats().drafted_by) >= {"medusa", "eagle"}
    d.close()


def test_several_are_joined_by_a_plus():
    router = load_drafter("suffix:min_match=3+layer_skip:exits=1+2+token-recycling")
    assert list(router.drafters) == ["suffix", "layer_skip", "token_recycling"] and router.top_tokens == 8
    assert router.drafters["layer_skip"].config.exits == "1+2" and router.place == "same_device"
    assert load_drafter("ngram").name == "ngram"
    with pytest.raises(ConfigError, match="twice"):
        load_drafter("ngram+suffix+ngram:min_match=3")
    with pytest.raises(ConfigError, match="no drafters named 'ngrams'"):
        load_drafter("ngrams")
