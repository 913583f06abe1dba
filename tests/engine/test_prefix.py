"""The prefix index: keys, walks, collisions, and that unused nodes are forgotten."""

from __future__ import annotations

import pytest

from kvasir.engine.pages.prefix import PrefixIndex
from tests.engine.fake import manager, sequence


def index(root=b"root", slots=4) -> PrefixIndex:
    return PrefixIndex(root, slots, 1)


def test_keys_are_chained_and_kept():
    x = index()
    a, b = sequence(range(12)), sequence([9, *range(1, 12)])
    assert x.key(a, 2) == a.page_keys[2] and len(a.page_keys) == 3
    assert x.key(b, 0) != a.page_keys[0]
    assert x.key(b, 1) != a.page_keys[1], "equal tokens after another prefix must have another key"
    assert len(set(a.page_keys + b.page_keys)) == 5 and all(len(k) == 16 for k in a.page_keys)


def test_keys_depend_on_root_tenant_and_process():
    same = index()
    keys = {same.key(sequence(8, tenant=t), 1) for t in ("", "a", "b")}
    other_root = index(b"other")
    other_root._secret = same._secret
    keys.add(other_root.key(sequence(8), 1))
    keys.add(index().key(sequence(8), 1))  # another process: another secret
    assert len(keys) == 5


def test_a_key_of_a_page_that_is_not_full_is_our_bug():
    with pytest.raises(AssertionError, match="not full"):
        index().key(sequence(7), 1)


def enlist(x: PrefixIndex, seq, count: int):
    node = x.tenant(seq)
    for i in range(count):
        child = x.child(node, seq, i)
        if child is None:
            return None
        child.pages[0] = i + 1
        node = child
    return node


def test_walk_finds_the_common_part():
    x = index()
    enlist(x, sequence(16), 4)
    assert [n.pages[0] for n in x.walk(sequence(16), 4)] == [1, 2, 3, 4]
    assert len(list(x.walk(sequence(16), 2))) == 2
    assert len(list(x.walk(sequence([*range(8), 77, 78, 79, 80]), 3))) == 2
    assert not list(x.walk(sequence([5, *range(15)]), 4))
    assert not list(x.walk(sequence(16, tenant="other"), 4))


@pytest.mark.parametrize("equal_for", ["every page", "the second page"])
def test_a_collision_never_gives_a_hit(equal_for):
    x = index()
    whole = x.digest
    x.digest = (
        (lambda data: b"same")
        if equal_for == "every page"
        else (lambda data: whole(data)[:8] * 2 if len(data) < 40 else b"same")
    )
    a, b = sequence([1] * 8), sequence([2] * 8)
    enlist(x, a, 2)
    assert not list(x.walk(b, 2)), "an equal hash alone is no match"


def test_equal_tokens_below_another_prefix_are_no_hit_even_when_keys_collide():
    x = index()
    a, b = sequence([1, 1, 1, 1, 5, 5, 5, 5]), sequence([2, 2, 2, 2, 5, 5, 5, 5])
    secrets = {}
    x.digest = lambda data: secrets.setdefault(
        bytes(data[-32:]) if data[-32:] == a_tail else bytes(data), len(secrets).to_bytes(16, "big")
    )
    a_tail = b"".join(t.to_bytes(8, "little") for t in [5, 5, 5, 5])
    enlist(x, a, 2)
    enlist(x, b, 1)
    assert x.key(a, 1) == x.key(b, 1), "the stub is meant to collide"
    assert len(list(x.walk(a, 2))) == 2
    assert len(list(x.walk(b, 2))) == 1


def test_the_first_of_two_colliding_prefixes_is_kept_and_the_other_not_indexed():
    pages = manager(20, 4)
    pages.index.digest = lambda data: bytes([len(data) % 251]) * 16  # every page of a chain collides
    first, second = sequence([1] * 8), sequence([2] * 8)
    for seq in (first, second):
        pages.admit(seq, pages.match(seq))
        assert pages.grow(seq, 8, [])
        seq.num_computed = 8
        pages.commit(seq)
        pages.check([s for s in (first, second) if s.tables])
    assert pages.match(sequence([2] * 9)) == 0
    pages.release(second)
    pages.release(first)
    pages.check([])
    assert pages.num_free == pages.num_total


def test_unused_nodes_are_forgotten():
    x = index()
    tail = enlist(x, sequence(16), 4)
    for node in list(x.nodes.values()):
        node.pages[0] = 0
    x.prune(tail)
    assert not x.nodes


def test_a_node_in_use_stays_until_it_is_dropped():
    x = index()
    node = enlist(x, sequence(8), 2)
    node.users += 1
    for n in (node, node.parent):
        n.pages[0] = 0
    x.prune(node)
    assert len(x.nodes) == 3
    x.drop(node)
    assert not x.nodes
