"""A step that verifies drafts, whole, over static buffers and with the kernels: what the eager step computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvasir.attention.backend import AttentionBackend, Site
from kvasir.decoding.sampler import Sampler
from kvasir.engine.ways.capture import CudaCapture, call_through
from kvasir.engine.ways.graphs import DecodeGraphs
from kvasir.engine.ways.step_way import StepParts
from kvasir.kernels import paged_attention, quantized_attention
from kvasir.kv.codec import Codec
from kvasir.kv.pool import KVPool
from kvasir.layers.spec import DenseSpec, GQASpec, NormSpec, RopeSpec
from kvasir.layers.weights import Placement
from kvasir.models.decoder import Decoder
from kvasir.models.loader import fill_random
from kvasir.models.spec import LayerSpec, ModelSpec
from kvasir.technique import load
from kvasir.types import Request, SamplingParams, Sequence, Span, Status

DEEP = LayerSpec(GQASpec(4, 2, 64, 0.125), DenseSpec(96), RopeSpec(1000.0, 64), NormSpec())
SHORT = replace(DEEP, mixer=replace(DEEP.mixer, window=11))
TREE = [-1, 0, 0, 1, 1, 2, 5]


@pytest.mark.parametrize("codec_name", ["plain", "int4_bdr", "int8", "fp8"])
def test_the_step_is_the_eager_one(codec_name, device, monkeypatch):
    """A decode, a chain and a tree with a guest, twice with other lengths in the same buffers. The interpreter rounds
    to fp8 wrongly."""
    if device == "cpu" and codec_name not in ("plain", "int4_bdr"):
        pytest.skip("the GPU runs this")
    if device == "cpu":  # in the interpreter idle programs take time
        for module in (paged_attention, quantized_attention):
            monkeypatch.setattr(module, "chunks_of", lambda *_: (2, 2))
    spec = ModelSpec(
        family="none", hidden_size=48, vocab_size=56, max_position=90, layers=(DEEP, SHORT), final_norm=NormSpec()
    )
    model = Decoder(spec, Placement(torch.device(device), torch.float32))
    fill_random(model, 0)
    codec, groups = load("kvasir.kv.codecs", codec_name, Codec), spec.cache_groups()
    size = codec.page_slots
    pool = KVPool(groups, codec, [1 + 3 * (90 // size + 1)] * len(groups), size, device, torch.float32)
    for cache in (pool.layer(i) for i in range(2)):
        for plane in cache.planes.values():
            plane.uniform_(0.01, 0.02) if plane.dtype.is_floating_point and plane.dtype.itemsize > 1 else plane.view(
                torch.uint8
            ).random_(0, 120)
    backend = load("kvasir.attention.backends", "triton", AttentionBackend)
    backend.prepare(
        Site(
            device,
            torch.float32,
            codec.kernel,
            size,
            tuple(dict.fromkeys(layer.mixer.attention() for layer in spec.layers)),
        )
    )
    parts = StepParts(
        model, pool, backend, Sampler(56, 56, 3, torch.device(device), ()), torch.device(device), max_model_len=90
    )
    parts.guest_inputs = torch.randn(2, 48, generator=torch.Generator().manual_seed(2)).to(device)
    graphs = DecodeGraphs(parts, CudaCapture(torch.device(device)) if device == "cuda" else call_through, 8)
    seqs = []
    for i in range(3):
        seq = Sequence(
            Request(
                id=str(i),
                prompt_ids=[(7 * j + i) % 50 for j in range(20 + 17 * i)],
                params=SamplingParams(),
                seed=i,
                max_tokens=1,
            )
        )
        pages = 90 // size + 1
        seq.tables, seq.seat, seq.status = (
            [list(range(1 + i * pages, 1 + (i + 1) * pages)) for _ in groups],
            i,
            Status.RUNNING,
        )
        parts.open(seq)
        seqs.append(seq)

    def spans(chain: int, tree: list[int], guests: list[int]) -> list[Span]:
        found = []
        for seq, length, parents in zip(seqs, (1, chain, len(tree)), (None, None, tree)):
            mine = guests if parents else []
            seq.draft = [(3 * j) % 50 for j in range(length - 1 - len(mine))]
            want = {"sample": range(length - len(mine))}
            found.append(Span(seq, len(seq.tokens) - 1, length, want=want, parents=parents, seat=seq.seat, guests=mine))
        return found

    steps = [spans(4, TREE, [1])] + ([spans(9, [*TREE, 3, 0], [])] if device == "cuda" else [])
    for _ in range(8 if device == "cuda" else 1):  # so often that it is captured
        for step in steps:
            for span in step:  # spans share their sequences' drafts: set them anew
                span.seq.draft = [(3 * j) % 50 for j in range(span.length - 1 - len(span.guests))]
            assert graphs.takes(step)
            got = graphs.forward(step).clone()
            batch = parts.packer.pack(step)
            batch.inputs = None if batch.guests is None else parts.guest_inputs.index_select(0, batch.guests[1])
            with torch.inference_mode():
                backend.plan(batch)
                want = model.forward(batch, parts.caches, backend)
            torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-4)
    assert device == "cpu" or all(form > 1 for _, _, form in graphs._ready) and graphs._ready
