"""The pool's layout, copies and poison, and the plain codec on it."""

from __future__ import annotations

import pytest
import torch

from kvasir.kv.codec import Codec, Plane
from kvasir.kv.codecs.plain import PlainCodec
from kvasir.kv.pool import KVPool
from kvasir.technique import load
from kvasir.types import CacheGroup, CacheRow, PageCopy

GROUPS = [
    CacheGroup("full", (0, 2, 5), (CacheRow(2, 24, 24),) * 3),
    CacheGroup("window", (1, 3), (CacheRow(3, 8, 8),) * 2, window=32),
]

# Layers of one lifetime that differ in heads and widths, as Gemma 4's do, and keys wider than values.
MIXED = [
    CacheGroup("full", (0, 2, 5), (CacheRow(2, 24, 24), CacheRow(1, 40, 40), CacheRow(3, 16, 4))),
    CacheGroup("window", (1, 3), (CacheRow(3, 8, 8), CacheRow(5, 2, 2)), window=32),
]


class Ragged(Codec):
    """Planes whose sizes are no multiple of 16 bytes."""

    def planes(self, row, dtype):
        return [Plane("k", row.key_dim, torch.int8), Plane("scale", 1, torch.float16), Plane("v", 3, dtype)]


def pool_of(codec=None, page_slots=16, dtype=torch.float32, groups=GROUPS) -> KVPool:
    return KVPool(groups, codec or PlainCodec(), [6, 9], page_slots, "cpu", dtype)


@pytest.mark.parametrize("groups", [GROUPS, MIXED], ids=["alike", "mixed"])
def test_sizes_are_what_is_allocated(groups):
    pool = pool_of(groups=groups)
    for i, group in enumerate(groups):
        size = sum(row.width for row in group.rows) * 16 * 4
        assert pool.page_bytes(i) == size == KVPool.page_bytes_of(group, PlainCodec(), 16, torch.float32)
        assert pool.pages[i].nbytes == size * pool.num_pages[i]
    assert pool.bytes_per_token() == sum(row.width for g in groups for row in g.rows) * 4
    assert pool_of(dtype=torch.bfloat16, groups=groups).bytes_per_token() == pool.bytes_per_token() / 2


@pytest.mark.parametrize("page_slots", [1, 3, 16])
@pytest.mark.parametrize("codec", [PlainCodec(), Ragged()], ids=["plain", "ragged"])
@pytest.mark.parametrize("groups", [GROUPS, MIXED], ids=["alike", "mixed"])
def test_planes_are_aligned_disjoint_and_where_the_contract_says(groups, codec, page_slots):
    pool = pool_of(codec, page_slots, torch.bfloat16, groups)
    for i, group in enumerate(groups):
        owner = torch.zeros(pool.page_bytes(i), dtype=torch.int64)
        begin = 0
        for layer, row in zip(group.layers, group.rows):
            cache = pool.layer(layer)
            assert (cache.group, cache.page_slots, cache.codec) == (i, page_slots, codec)
            end = begin + KVPool.page_bytes_of(CacheGroup("", (0,), (row,)), codec, page_slots, torch.bfloat16)
            for side in ("k", "v", "scale"):
                plane = next((p for p in codec.planes(row, torch.bfloat16) if p.name == side), None)
                if plane is None:
                    continue
                view = cache.planes[plane.name]
                assert view.shape == (pool.num_pages[i], row.heads, page_slots, plane.width)
                assert view.dtype == plane.dtype
                at = view.data_ptr() - pool.pages[i].data_ptr()
                assert at % 16 == 0 and begin <= at < end
                assert view.stride(0) * plane.dtype.itemsize == pool.page_bytes(i)
                owner[at : at + view[0].numel() * plane.dtype.itemsize] += 1
            begin = end
        assert int(owner.max()) == 1


def test_copies_move_whole_pages_of_one_group():
    pool = pool_of()
    for pages in pool.pages:
        pages.copy_(torch.randint(0, 256, pages.shape, dtype=torch.uint8))
    before = [p.clone() for p in pool.pages]
    pool.copy([PageCopy(1, 2, 7), PageCopy(0, 1, 3), PageCopy(1, 7, 4), PageCopy(1, 2, 5)])
    assert torch.equal(pool.pages[0][3], before[0][1])
    for source, target in ((2, 7), (7, 4), (2, 5)):
        assert torch.equal(pool.pages[1][target], before[1][source]), "sources are read before targets are written"
    untouched = [0, 1, 2, 4, 5]
    assert torch.equal(pool.pages[0][untouched], before[0][untouched])
    pool.copy([])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_poison_is_nan_in_the_given_pages_only(dtype):
    pool = pool_of(dtype=dtype)
    pool.poison(0, [1, 4])
    for layer in GROUPS[0].layers:
        for plane in pool.layer(layer).planes.values():
            assert plane[[1, 4]].isnan().all() and not plane[[0, 2, 3, 5]].any()
    assert not pool.pages[1].any()
    pool.poison(1, [])
    assert not pool.pages[1].any()


@pytest.mark.parametrize("page_slots", [1, 3, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_plain_reads_back_what_was_written(page_slots, dtype):
    odd = [
        CacheGroup("odd", (0, 1), (CacheRow(1, 6, 6),) * 2),
        GROUPS[1].__class__("b", (2, 3), (CacheRow(3, 8, 8),) * 2),
    ]
    for groups, layer in ((GROUPS, 2), (GROUPS, 3), (odd, 1), (odd, 3), (MIXED, 2), (MIXED, 3)):
        pool = pool_of(load("kvasir.kv.codecs", "plain", Codec), page_slots, dtype, groups)
        cache = pool.layer(layer)
        count, heads, _, dim = cache.planes["k"].shape
        k, v = torch.randn(2, count * page_slots, heads, dim).to(dtype)
        slots = torch.randperm(count * page_slots)
        pool.codec.write(cache, k, v, slots)
        narrow = torch.tensor([[1, 0], [5, 5]], dtype=torch.int32)
        for pages in (torch.tensor([3]), narrow, torch.zeros(0, dtype=torch.int64), torch.arange(4).view(1, 2, 2)):
            got = pool.codec.read(cache, pages)
            for rows, read in zip((k, v), got):
                want = torch.empty_like(rows)
                want[slots] = rows
                want = want.view(count, page_slots, heads, dim)[pages.long()].flatten(-4, -3).transpose(-3, -2)
                assert read.dtype == dtype and torch.equal(read, want)
        others = [i for g in groups for i in g.layers if i != layer]
        assert not any(plane.any() for i in others for plane in pool.layer(i).planes.values())


def test_plain_read_is_the_readers_own_copy():
    pool = pool_of()
    k, _ = pool.codec.read(pool.layer(0), torch.tensor([1, 2]))
    k.fill_(3.0)
    assert not pool.pages[0].any()


def test_plain_skips_slot_minus_one():
    pool = pool_of()
    pool.codec.write(pool.layer(0), torch.ones(2, 2, 24), torch.ones(2, 2, 24), torch.tensor([-1, 17]))
    assert pool.layer(0).planes["k"].count_nonzero() == 2 * 24


def test_plain_is_exact_and_part_of_the_prefix_key():
    codec = load("kvasir.kv.codecs", "plain", Codec)
    assert codec.exact and codec.affects_kv and codec.kernel == "plain" and codec.fingerprint() == ("plain",)
