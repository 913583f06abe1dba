"""All trees of a step in one native call: the same decisions and evidence, to the bit, as tree by tree in Python."""

from __future__ import annotations

import random

import pytest

from kvasir.config import SpeculationConfig
from kvasir.engine.drafts.drafting import Drafting
from kvasir.speculation.controller import PACKED, Controller
from kvasir.speculation.forest import Forest, native
from kvasir.speculation.tree import DraftTree

needs_native = pytest.mark.skipif(native().library is None, reason=native().reason)


def drawn(rng: random.Random, size: int) -> DraftTree:
    """Draw chains, bushes and trees in between; estimates tie, and may be above 1."""
    tree, straight = DraftTree(source="s"), rng.random()
    for _ in range(size):
        parent = len(tree) - 1 if rng.random() < straight else rng.randrange(-1, len(tree))
        tree.add(parent, rng.randrange(50), rng.choice([rng.random(), 0.5, 0.9, 1.0, 0.3, 1.2]))
    return tree


def walked(rng: random.Random, tree: DraftTree) -> list[int]:
    path: list[int] = []
    while rng.random() < 0.7 and (
        children := [n for n, parent in enumerate(tree.parents) if parent == (path[-1] if path else -1)]
    ):
        path.append(rng.choice(children))
    return path


def history(rng: random.Random, steps: int) -> None:
    row, sync = rng.random() * 0.05, rng.random()

    def seconds(seqs: int, context: int, drafts: int, drafted: bool) -> float:
        return 1.0 + row * (seqs + drafts) + sync * drafted

    packed, plain = Controller(seconds), Controller(seconds, plain=True)
    for _ in range(steps):
        trees = [drawn(rng, rng.randrange(0, 12)) for _ in range(rng.randrange(PACKED, 50))]
        budget, seqs = rng.choice([0, 5, 40, 1000]), rng.choice([None, len(trees) + 3, 5 * len(trees)])
        found = packed.allocate(Forest.of(trees) if rng.random() < 0.5 else trees, 100, budget, seqs)
        expected = plain.allocate(trees, 100, budget, seqs)
        assert isinstance(found, Forest) and list(found) == expected and packed.most_nodes == plain.most_nodes
        assert found.chains == [tree.is_chain for tree in expected] and list(found.sizes) == [
            len(tree) for tree in expected
        ]
        which, paths = [i for i in rng.sample(range(len(expected)), len(expected)) if len(expected[i])], []
        for i in which:
            path, anchor = walked(rng, expected[i]), rng.randrange(3)
            plain.observe(expected[i], path)
            paths.append([anchor, *(anchor + 1 + node for node in path)])
        packed.observe_all(found, which, paths)
        assert packed.survival._bins == plain.survival._bins and packed._recent == plain._recent
        assert (packed.stats, packed._accepted, packed._tried) == (plain.stats, plain._accepted, plain._tried)
        if rng.random() < 0.1:
            packed.survival.fade()
            plain.survival.fade()


@needs_native
def test_the_same_decisions_and_evidence_to_the_bit():
    for seed in range(24):
        history(random.Random(seed), 20)


@needs_native
def test_a_difference_would_be_seen():
    """The comparison above is not blind: evidence added in another order gives other bits."""
    trees = [DraftTree.chain([1, 2], 0.5) for _ in range(PACKED)]
    one, other = Controller(lambda *_: 1.0), Controller(lambda *_: 1.0)
    paths = [[0, 1] if i < 5 else [0] for i in range(len(trees))]
    one.observe_all(Forest.of(trees), list(range(len(trees))), paths)
    other.observe_all(Forest.of(trees), list(range(len(trees))), paths[::-1])
    assert one.stats == other.stats and one.survival._bins != other.survival._bins


def test_trees_come_back_as_they_were():
    trees = [drawn(random.Random(seed), seed % 7) for seed in range(20)]
    forest = Forest.of(trees)
    assert (
        list(forest) == trees
        and forest[3:9:2] == trees[3:9:2]
        and forest[-1] == trees[-1]
        and Forest.of(forest) is forest
    )
    with pytest.raises(IndexError):
        forest[20]
    assert len(Forest.of([])) == 0 and Forest.of([DraftTree(), DraftTree()]).chains == [True, True]
    trees[4].source = "another"
    assert Forest.of(trees) is None, "of several drafters"
    assert Forest.of([DraftTree(guests={-1: ((0,),)})]) is None


@needs_native
def test_the_engine_tells_the_controller_of_all_trees_at_once(monkeypatch):
    """``Drafting`` learns the same from a forest as tree by tree, and moves slots off the leftmost path."""
    from kvasir.speculation.router import load_drafter
    from kvasir_lab.bench import drafting_host

    found = []
    made = Drafting.__init__

    def kept(self: Drafting, *args: object, **options: object) -> None:
        made(self, *args, **options)
        found.append(self.controller)
        assert isinstance(self._config, SpeculationConfig)

    monkeypatch.setattr(Drafting, "__init__", kept)
    for drafter in (load_drafter("suffix:max_tokens=2000"), load_drafter("suffix:max_tokens=2000").reference()):
        drafting_host.measure(drafter, "nano", drafting_host.documents("nano", ["chain"]), 20, 6000)
    at_once, one_by_one = found
    assert (
        at_once.stats.accepted > 0
        and at_once.stats == one_by_one.stats
        and at_once.survival._bins == one_by_one.survival._bins
    )
