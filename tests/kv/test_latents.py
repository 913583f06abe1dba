"""Cache rows with a latent: one plane of keys whose first elements are the values, and the codecs that store them."""

import pytest
import torch

from kvasir.errors import ConfigError
from kvasir.kv.codec import CODECS, Codec
from kvasir.kv.pool import KVPool
from kvasir.technique import load
from kvasir.types import CacheGroup, CacheRow

# (rank, width of the rotary key): DeepSeek's, Mistral 4's, one that is no multiple of a block, tiny, without RoPE.
SHAPES = [(512, 64), (256, 64), (320, 32), (96, 16), (32, 0)]
WORST = {"plain": 0.0, "int8": 0.01, "fp8": 0.07}  # of a row's largest element


def cache_of(codec: str, rank: int, rope: int, dtype=torch.float32, slots: int = 16):
    group = CacheGroup("full", (0, 1), (CacheRow(1, rank + rope, 0, latent=rank), CacheRow(1, 48, 0, latent=32)))
    return KVPool([group], load(CODECS, codec, Codec), [5], slots, "cpu", dtype)


@pytest.mark.parametrize("rank, rope", SHAPES)
@pytest.mark.parametrize("codec", list(WORST))
def test_what_is_written_is_read(codec, rank, rope):
    """Whole pages, and one by one: a row's bytes do not depend on the rows written with it."""
    pool = cache_of(codec, rank, rope)
    cache, rows = pool.layer(0), torch.randn(20, rank + rope)
    rows[3, rank // 2] = 40.0  # an outlier
    slots = torch.randperm(5 * 16)[:20]
    slots[7] = -1
    cache.codec.write_row(cache, rows, slots)
    k, v = cache.codec.read(cache, torch.arange(5))
    assert k.shape == (1, 80, rank + rope) and torch.equal(v, k[..., :rank])
    kept = slots >= 0
    found = k[0, slots[kept]]
    assert ((found - rows[kept]).abs().amax(-1) <= WORST[codec] * rows[kept].abs().amax(-1)).all()
    assert torch.equal(found[:, rank:], rows[kept, rank:]), "rotary elements stay as they are"
    again = cache_of(codec, rank, rope).layer(0)
    for row, slot in zip(rows, slots):
        again.codec.write_row(again, row[None], slot[None])
    assert torch.equal(again.codec.read(again, torch.arange(5))[0], k)


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_a_scale_for_every_block(codec):
    """An outlier costs precision in its own block of 128 elements only."""
    cache = cache_of(codec, 512, 64).layer(0)
    assert cache.planes["k"].shape[3] == 512 and cache.planes["k_rope"].shape[3] == 64
    assert cache.planes["k_meta"][0, 0, 0].nbytes == 4 * 4
    row = torch.randn(1, 576)
    row[0, 5] = 1e5
    cache.codec.write_row(cache, row, torch.tensor([17]))
    wrong = (cache.codec.read(cache, torch.tensor([1]))[0][0, 1] - row[0]).abs()
    assert wrong[128:].max() < 0.15 < wrong[:128].max()


def test_the_bytes_of_a_token():
    """One plane: 1,152 bytes of bf16 for 512 + 64, where 8 heads of 128 take 4,096."""
    for codec, size in (("plain", 1152), ("int8", 656), ("fp8", 656)):
        group = CacheGroup("full", (0,), (CacheRow(1, 576, 0, latent=512),))
        assert KVPool.page_bytes_of(group, load(CODECS, codec, Codec), 64, torch.bfloat16) == 64 * size


@pytest.mark.parametrize("codec", ["int4", "int4_bdr", "nvfp4"])
def test_unmeasured_codecs_are_refused(codec):
    with pytest.raises(ConfigError, match=f"'{codec}' is for heads .* Use --kv-codec plain, int8 or fp8"):
        cache_of(codec, 512, 64)


@pytest.mark.parametrize("codec", list(WORST))
def test_slots_move_and_poison_shows(codec):
    pool = cache_of(codec, 96, 16)
    cache, rows = pool.layer(0), torch.randn(2, 112)
    cache.codec.write_row(cache, rows, torch.tensor([16, 17]))
    before = cache.codec.read(cache, torch.tensor([1]))[0][0, :2].clone()
    pool.move_slots(0, [16, 17], [33, 32])
    assert torch.equal(cache.codec.read(cache, torch.tensor([2]))[0][0, :2], before.flip(0))
    pool.poison(0, [3])
    assert not torch.isfinite(cache.codec.read(cache, torch.tensor([3]))[0]).all(-1).any()
