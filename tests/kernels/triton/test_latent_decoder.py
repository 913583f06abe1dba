"""Decoders with latent attention on the kernels: the plain decoder's logits, and in exact mode the same bits in any
company. Layers differ in rank, and one has a writer."""

from __future__ import annotations

import pytest
import torch

from kvasir.attention.backend import Site
from kvasir.attention.backends.torch import TorchBackend
from kvasir.attention.backends.triton import TritonBackend
from kvasir.engine.ways.batch import pack
from kvasir.kernels import _triton, latent_decode
from kvasir.kv.codec import CODECS, Codec
from kvasir.kv.pool import KVPool
from kvasir.layers.spec import DenseSpec, LatentWriter, MLASpec, NormSpec, QueryScale, RopeSpec
from kvasir.layers.weights import Placement
from kvasir.models.decoder import Decoder
from kvasir.models.loader import fill_random
from kvasir.models.spec import LayerSpec, ModelSpec
from kvasir.technique import load
from kvasir.types import Span
from tests.kernels.check_fused import Draw
from tests.kernels.triton.test_exact_decoder import COMPANY, LENGTH, World, sequence

NORM = NormSpec(1e-6)


def layer(**mixer) -> LayerSpec:
    mixer = {"q_rank": None, "norm": NORM} | mixer
    spec = MLASpec(3, nope_dim=16, value_dim=8, scale=0.25, **mixer)
    return LayerSpec(spec, DenseSpec(40), RopeSpec(100.0, spec.rope_dim) if spec.rope_dim else None, NORM)


LAYERS = (
    layer(rank=32, rope_dim=8, q_rank=24, query_scale=QueryScale(0.5, 8), biases=("kv_a", "o")),
    layer(rank=40, rope_dim=0),
    layer(rank=24, rope_dim=8, norm=None, writer=LatentWriter(2, 16, NORM)),
)


def logits(model: Decoder, backend, device: str, codec: str, sizes: tuple[int, ...]) -> torch.Tensor:
    """Logits of one sequence, computed in steps of these sizes."""
    spec, loaded = model.spec, load(CODECS, codec, Codec)
    pool = KVPool(spec.cache_groups(), loaded, [4], 16, device, torch.float32)
    caches = [pool.layer(i) for i in range(len(spec.layers))]
    backend.prepare(Site(device, torch.float32, loaded.kernel, 16, tuple(spec.attentions())))
    seq, found, start = sequence(0, sum(sizes)), [], 0
    for size in sizes:
        batch = pack([Span(seq, start, size)], 16, device, 1)
        backend.plan(batch)
        found.append(model.logits(model.forward(batch, caches, backend)))
        start += size
    return torch.cat(found)


@pytest.mark.parametrize("codec, close", [("plain", 5e-5), ("int8", 3e-2)])
def test_a_decoder_on_the_kernels_is_the_plain_decoder(codec, close, device, monkeypatch):
    spec = ModelSpec(family="none", hidden_size=32, vocab_size=56, max_position=64, layers=LAYERS, final_norm=NORM)
    model = Decoder(spec, Placement(torch.device(device), torch.float32))
    fill_random(model, 0)
    draw = Draw(1, torch.float32, device)
    for slot in model.slots().values():
        if slot.target.dim() == 1:
            slot.target.copy_(1 + draw(*slot.target.shape, scale=0.2))
    sizes = (1, 20, 3, 1, 10)
    with monkeypatch.context() as plain:
        plain.setattr(_triton, "triton", None)
        want = logits(model, TorchBackend(), device, codec, sizes)
    got = logits(model, TritonBackend(), device, codec, sizes)
    assert want.std() > 0.1
    torch.testing.assert_close(got, want, atol=close, rtol=close)


def test_a_rows_logits_have_the_same_bits_in_any_company(device, monkeypatch):
    monkeypatch.setattr(latent_decode, "CHUNK", 16 if device == "cpu" else 64)
    world = World(LAYERS, device, torch.float32 if device == "cpu" else torch.bfloat16)
    whole = world.logits((LENGTH,))
    assert whole.isfinite().all() and whole.std() > 0.1
    for chunks, before, after in (((1, 17, 2, 1), (), ()), ((20, 1), COMPANY[:1], COMPANY[1:])):
        assert torch.equal(world.logits(chunks, before, after), whole), (chunks, before, after)
