"""Packed trees, the proposals of the simplest drafters, and slots that move."""

from __future__ import annotations

import pytest
import torch

from kvasir import technique
from kvasir.errors import ConfigError
from kvasir.kv.codec import Codec
from kvasir.kv.pool import KVPool
from kvasir.speculation.drafter import DRAFTERS, Ask, Drafter
from kvasir.speculation.tree import DraftTree
from kvasir.types import CacheGroup, CacheRow, Request, SamplingParams, Sequence


def sequence(tokens: list[int]) -> Sequence:
    return Sequence(Request(id="r", prompt_ids=tokens, params=SamplingParams(), seed=0, max_tokens=99))


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


# --------------------------------------------------------------------------------------------------------------- ngram


@pytest.mark.parametrize(
    "tokens, expected",
    [
        ([1, 2, 3, 4, 1, 2], [3, 4, 1]),
        ([7, 8, 7, 8], [7, 8, 7]),
        ([1, 2, 3], []),
        ([5], []),
        ([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], [9, 2, 3]),
    ],
)
def test_ngram_copies_what_followed_the_longest_match(tokens, expected):
    drafter = technique.load(DRAFTERS, "ngram", Drafter)
    seq = sequence(tokens)
    assert drafter.propose([Ask(seq, 3, 3)])[0].tokens == expected
    seq.tokens += [1, 2]
    fresh = sequence(seq.tokens)
    assert drafter.propose([Ask(seq, 3, 3)])[0].tokens == drafter.propose([Ask(fresh, 3, 3)])[0].tokens, (
        "as read at once"
    )


def test_a_draft_model_needs_a_model():
    with pytest.raises(ConfigError, match="model=FOLDER"):
        technique.load(DRAFTERS, "draft_model", Drafter)


# ---------------------------------------------------------------------------------------------------------------- slots


# Without a calibration `lowrank` holds nothing; tests/kv/test_lowrank.py has one.
@pytest.mark.parametrize("codec", [name for name in technique.names("kvasir.kv.codecs") if name != "lowrank"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_moved_slot_reads_the_same(codec, dtype):
    built = technique.load("kvasir.kv.codecs", codec, Codec)
    slots = built.page_slots
    pool = KVPool([CacheGroup("full", (0, 1), (CacheRow(2, 64, 64),) * 2)], built, [5], slots, "cpu", dtype)
    generator = torch.Generator().manual_seed(0)
    at = torch.arange(slots, 4 * slots)
    for layer in (0, 1):
        k, v = (torch.randn(len(at), 2, 64, generator=generator, dtype=torch.float32).to(dtype) for _ in range(2))
        built.write(pool.layer(layer), k, v, at)

    def read(layer: int) -> torch.Tensor:
        return torch.stack(built.read(pool.layer(layer), torch.arange(1, 4)))  # [2, G, 3 * P, D], from slot P on

    before = [read(layer).clone() for layer in (0, 1)]
    moves = {
        slots + 1: slots,
        slots + 3: slots + 1,
        2 * slots + 2: slots + 2,
        3 * slots: 2 * slots,
    }  # a target may be a later source
    pool.move_slots(0, list(moves), list(moves.values()))
    for layer in (0, 1):
        expected = before[layer].clone()
        for source, target in moves.items():
            expected[:, :, target - slots] = before[layer][:, :, source - slots]
        assert torch.equal(read(layer), expected) and not torch.equal(expected, before[layer])
