"""Drafts where only chains may run: trees are cut to their trunk, and guests to one chain behind its last node."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvasir.engine.drafts.chained_drafts import check_exact, in_one_chain
from kvasir.engine.schedule.spans import ends_in_one_chain
from kvasir.errors import ConfigError
from kvasir.speculation.tree import DraftTree
from tests.speculation.helpers import Hostile, WithGuests, driver, install, requests

TAIL = (1, 2)


def forked() -> DraftTree:
    tree = DraftTree()
    first = tree.add(-1, 5, 0.9)
    tree.add(first, 6, 0.8)
    tree.add(-1, 7, 0.1)
    return tree


def test_a_tree_becomes_its_trunk():
    cut = in_one_chain(forked(), ())
    assert (cut.tokens, cut.parents, cut.guests) == ([5, 6], [-1, 0], {})


@pytest.mark.parametrize("node", [-1, 0, 1, 2])
def test_guests_move_behind_the_last_node(node):
    tree = forked()
    tree.guests = {node: ((3,), (4, 0))}
    assert in_one_chain(tree, TAIL).guests == {1: (TAIL,)}
    assert tree.guests == {node: ((3,), (4, 0))}, "the drafter's own tree stays as it is"


def test_a_chain_stays():
    chain = DraftTree.chain([5, 6])
    assert in_one_chain(chain, TAIL) is chain
    chain.guests = {1: ((3,),)}
    assert in_one_chain(chain, TAIL) is chain


def test_several_chains_behind_the_last_node_become_one():
    chain = DraftTree.chain([5, 6])
    chain.guests = {1: ((3,), (4,))}
    assert in_one_chain(chain, TAIL).guests == {1: (TAIL,)}


def test_a_drafter_without_a_tail_has_no_place_in_exact_mode():
    check_exact(SimpleNamespace(name="ppd", guests=object(), tail=TAIL))
    check_exact(SimpleNamespace(name="medusa", guests=None, tail=()))
    with pytest.raises(ConfigError, match="Leave out --batch-invariant"):
        check_exact(SimpleNamespace(name="ppd", guests=object(), tail=()))


@pytest.mark.parametrize("guests", [False, True])
def test_the_engine_runs_chains_alone(guests):
    """As in exact mode on a GPU. The control: without the rule, trees and scattered guests run."""
    plain = driver("")
    plain.run(requests(plain, 1.0, 2, logprobs=None))
    right = {key: out.tokens for key, out in plain.outputs.items()}
    plain.close()
    seen = {}
    for cut in (True, False):
        d = driver("replay")
        wild = WithGuests(right, d.engine.runner.model.spec.hidden_size) if guests else Hostile(right)
        wild.tail = TAIL if guests else ()
        install(d, wild)
        drafting = d.engine.proposals.drafting
        drafting._chains, commit, found = cut, drafting.committing, []

        def look(span, result, kept, commit=commit, found=found):
            guests = span.seq.guests
            found.append(span.parents is None and (not guests or ends_in_one_chain(guests, len(span.seq.draft) - 1)))
            commit(span, result, kept)

        drafting.committing = look
        d.engine.bind_parts(drafting)
        d.run(requests(d, 1.0, 2, logprobs=None))
        assert {key: out.tokens for key, out in d.outputs.items()} == right and not d.errors
        assert d.engine.stats().accepted_tokens
        seen[cut] = all(found)
        d.close()
    assert seen == {True: True, False: False}
