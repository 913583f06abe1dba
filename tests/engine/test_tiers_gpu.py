"""Tiers on a GPU: streams of their own change no bit, and what comes back is what left. Exact mode, bf16."""

from __future__ import annotations

import pytest
import torch

from tests.engine.driver import Driver
from tests.engine.test_tiers import ALL, PLAIN, converse, told

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def driver(codec: str, **options) -> Driver:
    given = dict(device="cuda", dtype="bfloat16", page_slots=16, max_num_seqs=4, max_model_len=160, kv_codec=codec)
    made = Driver("base", poison=True, max_num_batched_tokens=64, **given | {"overlap": True} | options)
    while made.engine.tiers is not None and not all(tier.ready for tier in made.engine.tiers.tiers):
        pass
    return made


@pytest.mark.parametrize("codec", ["plain", "int8", "int4_bdr"])
@pytest.mark.parametrize("tiers", ["host", "host+disk"])
def test_same_bits_as_an_unlimited_cache(codec, tiers, tmp_path):
    case = PLAIN | {"n": 2}
    room = driver(codec, num_pages=400, kv_host_bytes=0)
    expected = told(converse(room, case))
    room.close()
    disk = {"kv_disk": f"{tmp_path},bytes={ALL}"} if tiers == "host+disk" else {}
    small = driver(codec, num_pages=14, kv_host_bytes=ALL, **disk)
    assert told(converse(small, case | {"preempt_every": 5})) == expected
    counts = small.engine.stats().tiers
    assert sum(found["hit_tokens"] for name, found in counts.items() if name != "device"), "nothing came back"
    assert not sum(found["broken_pages"] + found["failed_pages"] for name, found in counts.items() if name != "device")
    small.close()


def test_a_restart_finds_the_pages(tmp_path):
    options = dict(num_pages=400, kv_host_bytes=ALL, kv_disk=f"{tmp_path},bytes={ALL}")
    first = driver("plain", **options)
    expected = told(converse(first, PLAIN, range(1)))
    while first.engine.idle():  # down to the disk
        pass
    first.close()
    second = driver("plain", **options)
    assert told(converse(second, PLAIN, range(1))) == expected
    assert second.engine.stats().tiers["disk"]["hit_tokens"] > 0
    second.close()


def test_a_host_tier_is_there_by_default():
    made = driver("plain", num_pages=100)
    assert [tier.name for tier in made.engine.tiers.tiers] == ["host"]
    made.close()
