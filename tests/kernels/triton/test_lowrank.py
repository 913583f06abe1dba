"""Low-rank keys and values: the kernels on their grid, a control that must fail, and the Triton backend, which computes
every kind of span as the torch backend does."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from kvasir import LLM, SamplingParams
from kvasir.attention.backend import Site
from kvasir.attention.backends.torch import TorchBackend
from kvasir.attention.backends.triton import TritonBackend
from kvasir.kernels import lowrank_decode
from kvasir.kernels.lowrank_decode import Case
from kvasir.kv.latents import LatentLayer, Maps
from kvasir.kv.pool import KVPool
from kvasir.models import checkpoint
from kvasir.types import CacheGroup, CacheRow, Together
from tests.kernels.check import rows_of
from tests.kernels.check_lowrank import check_gather, check_rows, world_of
from tests.latents import write_latents

CASES = list(enumerate(lowrank_decode.grid()))
# Llama 8B's heads, at 512 and 1,024 values a token and layer.
LLAMA = dict(heads=32, kv_heads=8, dim=128, turned=128, page_slots=64)
HEADS, GROUPS, DIM, RANKS = 4, 2, 64, (40, 24)
SMALL = (-1, 0, 0, 1, 1, 2, 5)
STEPS = {
    "single rows": (((40, 1), (0, 1), (70, 1)), ()),
    "drafts and a prompt": (((33, 4), (0, 1), (5, 150), (61, 7), (3, 20)), ()),
    "trees": (((61, 7), (20, 3), (0, 18), (9, 1)), ((0, SMALL),)),
}


@pytest.mark.parametrize("place, case", CASES, ids=str)
def test_rows(place, case, device):
    for dtype in (torch.float32, torch.float16):
        if device == "cuda" or dtype == (torch.float32, torch.float16)[place % 3 == 2]:
            check_rows(case, dtype, device)


@pytest.mark.parametrize("case", [case for _, case in CASES if case.window is None][1::3], ids=str)
def test_gather(case, device):
    for dtype in (torch.float32, torch.bfloat16) if device == "cuda" else (torch.float32,):
        check_gather(case, dtype, device)


def test_keys_of_another_position_fail(device):
    """The control: keys that are not turned at their positions."""
    case = Case(spans=((40, 1),))
    first = lowrank_decode.Latents.turned
    half = mock.patch.object(lowrank_decode.Latents, "turned", property(lambda self: first.fget(self) // 2))
    with half, pytest.raises(AssertionError):
        check_rows(case, torch.float32, device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("ranks", [(512, 512), (256, 256), (320, 192)])
@pytest.mark.parametrize("spans", [((4000, 1), (70, 1), (333, 1)), ((2000, 16), (130, 3))])
def test_llama(ranks, spans, device):
    for dtype in (torch.bfloat16, torch.float16):
        check_rows(Case(spans=spans, ranks=ranks, **LLAMA), dtype, device, min_keys=256)
    check_gather(Case(spans=spans, ranks=ranks, **LLAMA), torch.bfloat16, device)


def world_with_cache(name: str, device: str, exact: bool = False):
    """A step in fp16, and a cache that the codec has written. The drawn latents make its matrices."""
    spans, trees = STEPS[name]
    case = Case(spans=spans, trees=trees, ranks=RANKS, heads=HEADS, kv_heads=GROUPS, dim=DIM, turned=DIM)
    world, drawn = world_of(case, torch.float16, device)
    codec = LatentLayer(*RANKS)
    group = CacheGroup("g", (0,), (CacheRow(GROUPS, DIM, DIM),))
    pool = KVPool([group], codec, world.pool.num_pages, 16, device, torch.float16)
    pool.poison(0, range(world.pool.num_pages[0]))
    down = [torch.randn(rank, GROUPS * DIM, generator=torch.Generator().manual_seed(rank)) * 0.1 for rank in RANKS]
    k_down, v_down = (x.half().to(device) for x in down)
    codec.fill(Maps(k_down, drawn.k_up, v_down, drawn.v_up), drawn.angles, exact)
    cache, row, drawing = pool.layer(0), 0, torch.Generator().manual_seed(3)
    for s, (start, length) in enumerate(spans):
        at = torch.arange(start + length, device=device)
        slots = world.batch.tables[0][s, at // 16].long() * 16 + at % 16
        at[start:] = world.batch.positions[row : row + length]
        k, v = torch.randn(2, len(at), GROUPS, DIM, generator=drawing).half().to(device)
        codec.write(cache, k, v, slots, positions_T=at)
        row += length
    return world, cache


def backends(world, cache, device: str, exact: bool = False):
    found = []
    for backend in (TritonBackend(), TorchBackend()):
        backend.prepare(Site(device, torch.float16, cache.codec.kernel, 16, (world.spec,), exact))
        found.append(backend)
    assert not found[0].why_not(found[0].site)
    return found


@pytest.mark.parametrize("name", list(STEPS))
def test_steps(name, device):
    world, cache = world_with_cache(name, device)
    mine, torchs = backends(world, cache, device)
    mine.plan(world.batch)
    (got, lse), (want, want_lse) = (
        b.run(world.q, cache, world.spec, world.batch, return_lse=True) for b in (mine, torchs)
    )
    torch.testing.assert_close(got, want, atol=5e-3, rtol=5e-3)
    torch.testing.assert_close(lse, want_lse, atol=2e-2, rtol=2e-2)


def test_rows_of_a_captured_step(device):
    """Chains and trees whose spans only the device knows."""
    world, cache = world_with_cache("trees", device)
    mine, torchs = backends(world, cache, device)
    table, at, place, length, bits, _ = rows_of(world)
    step = replace(world.batch, tables=(table,), context=at, ancestors=bits, together=Together(place, length, 64),
                   scratch={})  # fmt: skip
    mine.plan(step)
    got, want = mine.run(world.q, cache, world.spec, step), torchs.run(world.q, cache, world.spec, world.batch)
    torch.testing.assert_close(got, want, atol=5e-3, rtol=5e-3)


def test_exact_rows_do_not_depend_on_the_batch(device):
    """The bits of a row among others are those of a row alone."""
    world, cache = world_with_cache("drafts and a prompt", device, exact=True)
    mine, _ = backends(world, cache, device, exact=True)
    mine.plan(world.batch)
    out, first = mine.run(world.q, cache, world.spec, world.batch), 0
    for s, length in enumerate(world.batch.lengths[:2]):
        rows = slice(first, first + length)
        first += length
        alone = replace(
            world.batch, input_ids=world.batch.input_ids[rows], positions=world.batch.positions[rows],
            tables=(world.batch.tables[0][s : s + 1],), context=world.batch.context[s : s + 1],
            row_start=torch.tensor([0, length], dtype=torch.int32, device=device), starts=[world.batch.starts[s]],
            lengths=[length], scratch={},
        )  # fmt: skip
        mine.plan(alone)
        assert torch.equal(mine.run(world.q[rows], cache, world.spec, alone), out[rows])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_engine_gives_the_tokens_of_plain_torch(device, tmp_path):
    """Prompts, decodes in CUDA graphs and drafts, in fp32."""
    fields = checkpoint.read_config(checkpoint.resolve("nano"))
    heads, dim = fields["num_key_value_heads"], fields["head_dim"]
    ranks = [(heads * dim - 8, heads * dim - 8)] * fields["num_hidden_layers"]
    spec = f"lowrank:folder={write_latents(tmp_path / 'latents', ranks, heads, dim)}"
    prompts = ["Once upon a time, a cat and a dog and a cat and a dog", "The king", "One, two, three. " * 20]
    found = []
    for backend, drafter in (("torch", ""), ("triton", ""), ("triton", "ngram")):
        how = {"attention_backend": backend, "dtype": "float32", "device": device, "max_model_len": 512}
        with LLM("nano", kv_codec=spec, drafter=drafter, gpu_memory_utilization=0.2, **how) as llm:
            results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=48))
            found.append([result.outputs[0].token_ids for result in results])
    assert found[1] == found[0] and found[2] == found[0]
