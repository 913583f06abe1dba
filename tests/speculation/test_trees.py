"""Packed trees, the suffix automaton against brute force, the drafters' proposals, slots that move."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from kvasir import technique
from kvasir.errors import ConfigError
from kvasir.kv.codec import Codec
from kvasir.kv.pool import KVPool
from kvasir.speculation.drafter import DRAFTERS, Ask, Drafter
from kvasir.speculation.suffixes import Automaton
from kvasir.speculation.tree import DraftTree
from kvasir.types import CacheGroup, Request, SamplingParams, Sequence


def sequence(tokens: list[int], tenant: str = "") -> Sequence:
    return Sequence(Request(id="r", prompt_ids=tokens, params=SamplingParams(), seed=0, max_tokens=99, tenant=tenant))


# --------------------------------------------------------------------------------------------------------------- trees


def test_a_kept_tree_has_the_likely_path_first():
    tree = DraftTree()
    a, b = tree.add(-1, 5, 0.2), tree.add(-1, 6, 0.7)
    tree.add(a, 7, 0.9)
    c = tree.add(b, 8, 0.4)
    assert tree.add(b, 8, 0.5) == c and len(tree) == 4, "a duplicate sibling is the same node"
    kept = tree.keep(range(4))
    assert (kept.tokens, kept.parents, kept.depths) == ([6, 8, 5, 7], [-1, 0, -1, 2], [0, 1, 0, 1])
    assert kept.path([6, 8, 1]) == [0, 1] and kept.path([5, 9]) == [2] and kept.path([4]) == []
    assert not kept.is_chain and tree.keep([b, c]).is_chain
    with pytest.raises(AssertionError, match="parent"):
        tree.keep([c])


# -------------------------------------------------------------------------------------------------------------- suffix


@pytest.mark.parametrize("seed", range(4))
def test_the_automaton_counts_like_brute_force(seed):
    """Several texts, extended in turns: every substring is found, with the number of its places, and no other string."""
    rng = random.Random(seed)
    texts: list[list[int]] = [[], [], []]
    automaton, last = Automaton(), [0, 0, 0]
    for _ in range(60):
        i = rng.randrange(3)
        token = rng.randrange(3)
        texts[i].append(token)
        last[i] = automaton.extend(last[i], token)
    counts = Counter(tuple(t[a:b]) for t in texts for a in range(len(t)) for b in range(a + 1, len(t) + 1))
    for text in {*counts, *(tuple(rng.randrange(3) for _ in range(6)) for _ in range(50))}:
        state = 0
        for token in text:
            state = automaton.nexts[state].get(token, -1)
            if state < 0:
                break
        assert (automaton.counts[state] if state > 0 else 0) == counts[text], text
    state = length = 0
    foreign: list[int] = []
    for _ in range(60):
        foreign.append(rng.randrange(3))
        state, length = automaton.follow(state, length, foreign[-1])
        longest = next(n for n in range(len(foreign), -1, -1) if n == 0 or tuple(foreign[-n:]) in counts)
        assert length == longest


def test_suffix_learns_from_other_requests_of_its_tenant_only():
    drafter = technique.load(DRAFTERS, "suffix", Drafter)
    first = sequence([1, 2, 3, 4, 5, 6, 7, 8], "a")
    drafter.propose([Ask(first, 4, 4)])
    for tenant, expected in (("a", [4, 5, 6, 7]), ("b", [])):
        assert drafter.propose([Ask(sequence([9, 2, 3], tenant), 4, 4)])[0].tokens == expected


def test_suffix_proposes_what_came_most_often():
    drafter = technique.load(DRAFTERS, "suffix", Drafter)
    tree = drafter.propose([Ask(sequence([1, 2, 3, 0, 1, 2, 4, 0, 1, 2, 3, 0, 9, 1, 2]), 3, 2)])[0]
    assert (tree.tokens, tree.parents) == ([3, 0, 4], [-1, 0, -1]) and tree.est[0] > tree.est[2]


def test_memory_stays_bounded():
    drafter = technique.load(DRAFTERS, "suffix:max_tokens=500", Drafter)
    rng = random.Random(0)
    long = sequence([0])
    most = 0
    for _ in range(60):
        seq = sequence([rng.randrange(50) for _ in range(100)])
        drafter.propose([Ask(seq, 4, 4), Ask(long, 4, 4)])
        long.tokens += seq.tokens[:20]
        drafter.close(seq)
        most = max(most, drafter.state_bytes())
    assert 0 < most < 420 * 2 * 2 * 700, "two generations of at most two states a token"
    assert drafter.propose([Ask(long, 4, 4)]) is not None


# --------------------------------------------------------------------------------------------------------------- ngram


@pytest.mark.parametrize("tokens, expected", [([1, 2, 3, 4, 1, 2], [3, 4, 1]), ([7, 8, 7, 8], [7, 8, 7]), ([1, 2, 3], []), ([5], []),
                                              ([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], [9, 2, 3])])
def test_ngram_copies_what_followed_the_longest_match(tokens, expected):
    drafter = technique.load(DRAFTERS, "ngram", Drafter)
    seq = sequence(tokens)
    assert drafter.propose([Ask(seq, 3, 3)])[0].tokens == expected
    seq.tokens += [1, 2]
    fresh = sequence(seq.tokens)
    assert drafter.propose([Ask(seq, 3, 3)])[0].tokens == drafter.propose([Ask(fresh, 3, 3)])[0].tokens, "as read at once"


def test_a_draft_model_needs_a_model():
    with pytest.raises(ConfigError, match="model=FOLDER"):
        technique.load(DRAFTERS, "draft_model", Drafter)


# ---------------------------------------------------------------------------------------------------------------- slots


@pytest.mark.parametrize("codec", technique.names("kvasir.kv.codecs"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_moved_slot_reads_the_same(codec, dtype):
    built = technique.load("kvasir.kv.codecs", codec, Codec)
    slots = built.page_slots
    pool = KVPool([CacheGroup("full", (0, 1), 2, 64)], built, [5], slots, "cpu", dtype)
    generator = torch.Generator().manual_seed(0)
    at = torch.arange(slots, 4 * slots)
    for layer in (0, 1):
        k, v = (torch.randn(len(at), 2, 64, generator=generator, dtype=torch.float32).to(dtype) for _ in range(2))
        built.write(pool.layer(layer), k, v, at)

    def read(layer: int) -> torch.Tensor:
        return torch.stack(built.read(pool.layer(layer), torch.arange(1, 4)))  # [2, G, 3 * P, D], from slot P on

    before = [read(layer).clone() for layer in (0, 1)]
    moves = {slots + 1: slots, slots + 3: slots + 1, 2 * slots + 2: slots + 2, 3 * slots: 2 * slots}  # a target may be a later source
    pool.move_slots(0, list(moves), list(moves.values()))
    for layer in (0, 1):
        expected = before[layer].clone()
        for source, target in moves.items():
            expected[:, :, target - slots] = before[layer][:, :, source - slots]
        assert torch.equal(read(layer), expected) and not torch.equal(expected, before[layer])
