"""The quantising kernels over their grids."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvasir.attention.backend import AttentionBackend, Site
from kvasir.attention.paged import key_of
from kvasir.engine.ways.batch import pack
from kvasir.kernels import quantized_attention, quantized_decode, quantized_qkv
from kvasir.kernels.fused_qkv import HeadOps
from kvasir.kernels.quantize import quantize
from kvasir.kv.codec import Codec
from kvasir.kv.pool import KVPool
from kvasir.layers.spec import DenseSpec, GQASpec, NormSpec, RopeSpec
from kvasir.layers.weights import Placement
from kvasir.models.decoder import Decoder
from kvasir.models.loader import fill_random
from kvasir.models.spec import LayerSpec, ModelSpec
from kvasir.technique import load
from kvasir.types import CacheGroup, CacheRow, Request, SamplingParams, Sequence, Span
from tests.kernels.check import reference
from tests.kernels.check_quantized import (
    check_gather,
    check_quantized_attention,
    check_quantized_decode,
    check_quantized_qkv,
    codec_of,
    quantized_world,
    written,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", list(quantized_qkv.grid()), ids=str)
def test_write(case, dtype, device):
    if case.format == "fp8" and device == "cpu":
        pytest.skip("the interpreter loses a carry when it rounds to fp8: 127.8 becomes 64; the GPU runs this")
    if dtype == torch.bfloat16 and device == "cpu" and case.order:
        pytest.skip("the interpreter multiplies bf16 matrices as if they were integers; the GPU runs this")
    check_quantized_qkv(case, dtype, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("order", [0, 64])
def test_the_grid_is_made_of_rows_in_their_own_dtype(order, dtype, device):
    """The scale and bias of nearly every row are those of the reference's grid, whose rows have the heads' dtype after
    the rotation. Mutations that this kills: keys are rounded to bf16 before they are quantised (fp32 rows); a rotated
    key is not rounded to the rows' dtype (fp16 rows)."""
    heads = torch.randn(48, 4, 64, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    table = torch.cat((torch.ones(48, 32), torch.zeros(48, 32)), 1).to(device)  # no angle: a key stays as it is
    ops = HeadOps(2, table, torch.arange(48, device=device))
    codec, slots = codec_of("int4", order, False), torch.arange(48, device=device)
    cache = KVPool([CacheGroup("full", (0,), (CacheRow(1, 64, 64),))], codec, [2], 32, device, dtype).layer(0)
    basis = codec.rotation("k", 64).basis(dtype, torch.device(device), False) if order else None
    quantized_qkv.quantized_qkv(heads, ops, cache.planes, slots, "int4", basis)
    stored = cache.planes["k_meta"][slots // 32, 0, slots % 32]
    turned = heads[:, 2].double() if basis is None else quantized_qkv.turn(heads[:, 2].double(), basis)
    mutant = turned.bfloat16() if dtype == torch.float32 else turned.float()
    meta, mutated = (quantize(row, 4)[1] for row in (turned.to(dtype), mutant))
    assert (stored == meta).float().mean() > 0.9
    if dtype == torch.float32 or order:
        assert (mutated == meta).float().mean() < 0.75, "or nothing is shown"


@pytest.mark.parametrize("format", ["int4", "int8", "fp8"])
def test_an_exact_row_does_not_look_at_its_company(format, device):
    """A row's bits are the same in any batch. Without exact mode few rows are written by smaller programs, whose sums
    run in another order."""
    if format == "fp8" and device == "cpu":
        pytest.skip("the interpreter loses a carry when it rounds to fp8; the GPU runs this")
    rows = 1000 if device == "cuda" else quantized_qkv.FEW + 4
    together = written(rows, range(rows), True, format, device)
    for at in (range(0, 1), range(3, 3 + quantized_qkv.FEW)):
        for alone, all_rows in zip(written(rows, at, True, format, device), together):
            assert torch.equal(alone, all_rows[at.start : at.stop])


def test_few_rows_are_written_otherwise_where_nothing_has_to_be_exact(device):
    """This shows that the test above can fail."""
    if device == "cpu":
        pytest.skip("the interpreter sums in one order")
    few, step = [], quantized_qkv.FEW
    for start in range(0, 1000 - step, step):
        few.append(written(1000, range(start, start + step), False, "int4", device)[0])
    found = torch.cat(few)
    assert not torch.equal(found, written(1000, range(1000), False, "int4", device)[0][: len(found)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", list(quantized_decode.grid()), ids=str)
def test_decode(case, dtype, device):
    if dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter multiplies bf16 matrices as if they were integers; the GPU runs this")
    check_quantized_decode(case, dtype, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place, case", list(enumerate(quantized_attention.grid())), ids=str)
def test_rows_and_trees(place, case, dtype, device):
    """In the interpreter the precisions take turns, except for cases that differ by format."""
    if (
        device == "cpu"
        and place >= 2 * len(quantized_qkv.FORMATS)
        and dtype != (torch.float32, torch.float16)[place % 2]
    ):
        pytest.skip("the other precision's turn")
    if dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter multiplies bf16 matrices as if they were integers; the GPU runs this")
    check_quantized_attention(case, dtype, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place, case", list(enumerate(quantized_attention.together_grid())), ids=str)
def test_rows_known_on_the_device_alone(place, case, dtype, device):
    """Chains and trees as a captured step has them. In the interpreter each case has one precision."""
    if device == "cpu" and dtype != (torch.float32, torch.float16)[place % 2]:
        pytest.skip("the other precision's turn")
    check_quantized_attention(case, dtype, device, together=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format, dim", [("int4", 64), ("int4", 80), ("int8", 96), ("fp8", 128)])
def test_gather(format, dim, dtype, device):
    check_gather(format, dim, dtype, device)


@pytest.mark.parametrize("format, window", [("int4", None), ("int4", 50), ("fp8", None)])
def test_the_backend_takes_every_kind_of_span(format, window, device, monkeypatch):
    """A decode, a chain, a tree and a chunk over codes, in one step and in fp64."""
    monkeypatch.setattr(quantized_attention, "MAX_COLUMNS", 16)  # the last span is made numbers
    spans = ((70, 1), (33, 4), (61, 7), (40, 20))
    case = quantized_attention.Case(spans=spans, format=format, window=window, trees=((2, (-1, 0, 0, 1, 1, 2, 5)),))
    world, pool = quantized_world(case, torch.float32, device)
    backend = load("kvasir.attention.backends", "triton", AttentionBackend)
    site = Site(device, torch.float32, format, 64, (world.spec,))
    assert not backend.why_not(site)
    backend.prepare(site)
    backend.plan(world.batch)
    step = world.batch.scratch[key_of(world.spec)]
    assert (
        step.rows.spans.tolist() == [0] and sorted(set(step.short.items[:, 0].tolist())) == [1, 2] and step.rest == [3]
    )
    out, lse = backend.run(world.q, pool.layer(1), world.spec, world.batch, return_lse=True)
    want, want_lse = reference(world, torch.float64)
    torch.testing.assert_close(out.double(), want, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-4, rtol=1e-5)


DEEP = LayerSpec(GQASpec(8, 2, 64, 0.125, qk_norm=NormSpec()), DenseSpec(96), RopeSpec(1000.0, 64), NormSpec())
WINDOWED = replace(DEEP, mixer=replace(DEEP.mixer, window=20, qk_norm=None))


def logits_of(
    model: Decoder, codec_spec: str, backend_name: str, device: str, plan: list[list[tuple[int, int]]]
) -> torch.Tensor:
    """Logits of all rows of two sequences computed in steps of (sequence, rows)."""
    spec, codec = model.spec, load("kvasir.kv.codecs", codec_spec, Codec)
    pool = KVPool(spec.cache_groups(), codec, [12] * len(spec.cache_groups()), 16, device, torch.float32)
    for group in range(len(pool.groups)):
        pool.poison(group, range(12))
    backend = load("kvasir.attention.backends", backend_name, AttentionBackend)
    site = Site(
        device, torch.float32, codec.kernel, 16, tuple(dict.fromkeys(layer.mixer.attention() for layer in spec.layers))
    )
    assert not backend.why_not(site)
    backend.prepare(site)
    prompts = [[(7 * i + s) % 50 for i in range(70)] for s in (0, 1)]
    seqs = [
        Sequence(Request(id="", prompt_ids=prompt, params=SamplingParams(), seed=0, max_tokens=1)) for prompt in prompts
    ]
    for s, seq in enumerate(seqs):
        seq.tables = [list(range(1 + 5 * s, 6 + 5 * s)) for _ in pool.groups]
    done, rows = [0, 0], []
    for step in plan:
        batch = pack([Span(seqs[s], done[s], length) for s, length in step], 16, device, len(pool.groups))
        backend.plan(batch)
        caches = [pool.layer(i if layer.cache_of is None else layer.cache_of) for i, layer in enumerate(spec.layers)]
        rows.append(model.logits(model.forward(batch, caches, backend)))
        for s, length in step:
            done[s] += length
    return torch.cat(rows)


def test_queries_are_turned_into_the_caches_basis_where_nothing_fuses(device):
    codec, plan = "int4_bdr:order=16,rotate_v=true", [[(0, 5), (1, 3)], [(0, 1), (1, 1)]]
    model = Decoder(
        ModelSpec(family="none", hidden_size=48, vocab_size=56, max_position=90, layers=(DEEP,), final_norm=NormSpec()),
        Placement(torch.device(device), torch.float32, fused=False),
    )
    fill_random(model, 0)
    want, plain = (logits_of(model, c, "torch", device, plan) for c in (codec, "plain"))
    lost = (want - plain).abs().max()
    assert lost > 0 and (logits_of(model, codec, "triton", device, plan) - want).abs().max() < 0.1 * lost + 1e-4


@pytest.mark.parametrize("codec", ["int4_bdr", "int4_bdr:order=16,rotate_v=true"])
def test_a_decoder_over_codes_is_the_one_over_what_they_stand_for(codec, device, monkeypatch):
    """Fused write, decode over codes, gathered chunks, windows and a shared cache, against the plain path of the same
    codec."""
    layers = (DEEP, WINDOWED, replace(DEEP, cache_of=0))
    model = Decoder(
        ModelSpec(family="none", hidden_size=48, vocab_size=56, max_position=90, layers=layers, final_norm=NormSpec()),
        Placement(torch.device(device), torch.float32),
    )
    fill_random(model, 0)
    plan = [[(0, 33), (1, 5)], [(0, 1), (1, 20)], [(0, 1), (1, 1)], [(0, 3), (1, 1)], [(0, 1), (1, 1)]]
    want = logits_of(model, codec, "torch", device, plan)
    got = logits_of(model, codec, "triton", device, plan)
    plain = logits_of(model, "plain", "torch", device, plan)
    lost = (want - plain).abs().max()
    assert lost > 0 and (got - want).abs().max() < 0.1 * lost + 1e-4, (
        "much nearer to its own codec than that is to the plain cache"
    )
