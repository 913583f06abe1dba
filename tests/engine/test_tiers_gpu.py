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


def test_a_disk_tier_brings_a_host_tier_with_it(tmp_path):
    made = driver("plain", num_pages=100)
    assert made.engine.tiers is None
    made.close()
    made = driver("plain", num_pages=100, kv_disk=f"{tmp_path},bytes={ALL}")
    assert [tier.name for tier in made.engine.tiers.tiers] == ["host", "disk"]
    made.close()


def test_copies_end_where_a_pinned_piece_does(monkeypatch):
    """CUDA refuses a copy from one piece into the next. Small tiers are one piece, so pieces are made small here."""
    case = PLAIN | {"n": 2}
    room = driver("plain", num_pages=400, kv_host_bytes=0)
    expected = told(converse(room, case))
    room.close()
    small = driver("plain", num_pages=14, kv_host_bytes=ALL)
    size = small.engine.tiers.tiers[0].rows(0).shape[1]
    small.close()
    monkeypatch.setattr("kvasir.kv.tiers.host.PIECE", 3 * size)
    small = driver("plain", num_pages=14, kv_host_bytes=ALL)
    assert told(converse(small, case | {"preempt_every": 5})) == expected
    host = small.engine.stats().tiers["host"]
    assert host["hit_tokens"] and not host["failed_pages"] and not host["broken_pages"]
    small.close()
