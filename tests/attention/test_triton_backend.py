"""The Triton backend refuses what it cannot serve, and accepts a capable site."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch

from kvasir.attention import paged
from kvasir.attention.backend import AttentionBackend, AttentionSpec, Site
from kvasir.kernels import _triton, decode_attention
from kvasir.kernels.dense_attention import Shape, plan_long
from kvasir.technique import load
from kvasir.types import StepBatch

GOOD = Site(
    "cuda", torch.bfloat16, "plain", 16, (AttentionSpec(32, 8, 128, 0.1), AttentionSpec(32, 8, 128, 0.1, window=64))
)
BAD = {
    "device": "cpu",
    "dtype": torch.float64,
    "codec_kernel": "nvfp4",
    "page_slots": 24,
    "specs": (AttentionSpec(4, 4, 1024, 0.1),),
}


def reasons(site: Site) -> list[str]:
    return load("kvasir.attention.backends", "triton", AttentionBackend).why_not(site)


@pytest.mark.skipif(not _triton.AVAILABLE, reason="Triton is not installed")
def test_a_gpu_with_plain_pages_is_accepted():
    assert reasons(GOOD) == []


@pytest.mark.skipif(_triton.INTERPRETED, reason="the interpreter runs kernels on the CPU")
@pytest.mark.parametrize("field", BAD)
def test_each_lack_is_named(field):
    assert len(reasons(dataclasses.replace(GOOD, **{field: BAD[field]}))) == 1


@pytest.mark.skipif(_triton.INTERPRETED, reason="the interpreter runs kernels on the CPU")
def test_every_reason_is_given_at_once():
    assert len(reasons(dataclasses.replace(GOOD, **BAD))) == len(BAD)


@pytest.mark.parametrize("name, package", [("flash_attn", "flash_attn_interface"), ("flashinfer", "flashinfer")])
def test_a_missing_package_is_a_reason(name, package, monkeypatch):
    chosen, find = load("kvasir.attention.backends", name, AttentionBackend), importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda x, *rest: None if x == package else find(x, *rest))
    assert any(f"{package}" in reason and "not installed" in reason for reason in chosen.why_not(GOOD))


def test_a_missing_triton_is_a_reason(monkeypatch):
    monkeypatch.setattr(_triton, "AVAILABLE", False)
    assert reasons(GOOD) == ["Triton is not installed"]


@pytest.mark.parametrize("codec", ["plain", "int8"])
@pytest.mark.parametrize(
    "dtype, share", [(torch.bfloat16, 4), (torch.bfloat16, 1), (torch.bfloat16, 16), (torch.float32, 2)]
)
def test_kinds_meet_every_kernel(dtype, share, codec, monkeypatch):
    """Tiles of every size and long spans, each near its beginning and far into its keys, where tiles are cut into
    parts."""
    monkeypatch.setattr(paged, "multiprocessors", lambda device: 132)
    spec = AttentionSpec(8 * share, 8, 128, 0.1)
    backend = load("kvasir.attention.backends", "triton", AttentionBackend)
    backend.prepare(Site("cpu", dtype, codec, 16, (spec,)))

    def planned(spans):
        starts, lengths = map(list, zip(*spans))
        rows = torch.arange(sum(lengths))
        batch = StepBatch(
            input_ids=rows,
            positions=rows,
            row_start=rows,
            context=rows,
            tables=(),
            slots=(),
            logit_rows=rows,
            starts=starts,
            lengths=lengths,
        )
        backend.plan(batch)
        return batch.scratch[paged.key_of(spec)]

    def ways(step):
        return {("tiles", tiles.block_m) for tiles in step.tiles} | {
            way for way in ("long", "short") if getattr(step, way)
        }

    met, singles = set(), set()
    for spans in backend.kinds(spec, 100):
        step = planned(spans)
        singles |= set() if step.rows is None else {len(spans)}
        met |= {(way, spans[0][0]) for way in ways(step)}
    of_any_length = set().union(*(ways(planned([(0, length)])) for length in range(2, 1100)))
    large = {("tiles", 32 if dtype == torch.float32 else 128)}
    assert (
        large < of_any_length
        and ("short" in of_any_length) == (codec == "int8")
        and ("long" in of_any_length) == (dtype == torch.bfloat16)
    )
    assert codec == "int8" or len(of_any_length) == {4: 4, 1: 4, 16: 3, 2: 2}[share], (
        "one row of sixteen heads fills a small tile"
    )
    assert met == {(way, start) for way in of_any_length for start in backend.depths}
    fuller = {100} if share == 1 else set()  # rounds, of four programs instead of five
    assert singles == ({1, 17, 33, 65} if dtype == torch.float32 else {1, 17, 32, 33, 65} | fuller), (
        "blocks are other ones from 32 rows on"
    )


@pytest.mark.parametrize(
    "rows, share, at_once, block",
    [
        (64, 2, 4, 64),
        (128, 2, 4, 64),
        (160, 2, 4, 64),
        (192, 2, 4, 32),
        (224, 2, 4, 64),
        (240, 2, 4, 64),
        (256, 2, 4, 32),
        (256, 4, 4, 64),
    ],
)
def test_blocks_of_many_rows(rows, share, at_once, block):
    """The blocks are those that were fastest on an H200, with 8 KV heads."""
    shape = decode_attention.Shape.of(128, torch.bfloat16, rows, share, rows * 8 / 132)
    assert (shape.block_n, shape.at_once) == (block, at_once)
    assert decode_attention.Shape.of(64, torch.bfloat16, rows, share, rows * 8 / 132).block_n == 64, (
        "of other widths as many fit as nobody counted"
    )


def test_what_goes_to_the_device_together_is_aligned():
    for count in range(1, 9):
        long = plan_long([0] * count, [300] * count, list(range(count)), 4, "cpu", Shape.of(128))
        assert (long.spans.data_ptr() - long.items.data_ptr()) % 16 == 0, (
            "a kernel would be compiled for each kind of address"
        )
        assert long.spans[:, 0].tolist() == list(range(count)) and len(long.items) == count * 19
