"""Exact mode through the kernels: the logits of a row are a function of its sequence and position, of nothing else."""

from __future__ import annotations

import pytest
import torch

from kvasir.attention.backend import Site
from kvasir.attention.backends.triton import TritonBackend
from kvasir.engine.ways.batch import pack
from kvasir.kernels import matmul, moe, paged_attention
from kvasir.kernels.norm import rms_norm
from kvasir.kv.codecs.plain import PlainCodec
from kvasir.kv.pool import KVPool
from kvasir.layers import products as matrix_products
from kvasir.layers.spec import NormSpec
from kvasir.layers.weights import Placement
from kvasir.models.decoder import Decoder
from kvasir.models.loader import fill_random
from kvasir.models.spec import ModelSpec
from kvasir.types import Request, SamplingParams, Sequence, Span
from tests.kernels.check_fused import Draw
from tests.kernels.triton.test_fused import MODELS

LENGTH, COMPANY = 21, (5, 1)
KINDS = ("pre-norm", "sandwich", "experts", "parts of a head", "gates, scales", "sigmoid, shared")


class World:
    """One decoder, and a pool with room for the text and for other sequences."""

    def __init__(self, layers: tuple, device: str, dtype: torch.dtype) -> None:
        self.spec = ModelSpec(
            family="none", hidden_size=32, vocab_size=56, max_position=64, layers=layers, final_norm=NormSpec()
        )
        self.device, self.dtype = device, dtype
        self.model = Decoder(self.spec, Placement(torch.device(device), dtype, exact=True))
        fill_random(self.model, 0)
        draw = Draw(1, torch.float32, device)
        for slot in self.model.slots().values():
            if slot.target.dim() == 1 or slot.repeat:
                slot.target.copy_(1 + draw(*slot.target.shape, scale=0.2))
        self.backend = TritonBackend()
        self.backend.prepare(
            Site(device, dtype, "plain", 16, tuple({layer.mixer.attention() for layer in layers}), exact=True)
        )

    def logits(
        self, chunks: tuple[int, ...], before: tuple[int, ...] = (), after: tuple[int, ...] = ()
    ) -> torch.Tensor:
        """Logits of every row of the text [LENGTH, V], computed in ``chunks``; steps also hold new prompts."""
        pool = KVPool(
            self.spec.cache_groups(),
            PlainCodec(),
            [3 + 3 * (len(before) + len(after)) + 1],
            16,
            self.device,
            self.dtype,
        )
        caches = [
            pool.layer(i if layer.cache_of is None else layer.cache_of) for i, layer in enumerate(self.spec.layers)
        ]
        text = sequence(0, LENGTH)
        others = [sequence(1 + i, n) for i, n in enumerate(before + after)]
        found, start = [], 0
        for size in chunks:
            spans = [Span(s, 0, s.num_tokens) for s in others]
            spans.insert(len(before), Span(text, start, size))
            batch = pack(spans, 16, self.device, 1)
            self.backend.plan(batch)
            hidden = self.model.forward(batch, caches, self.backend)
            first = sum(before)
            found.append(self.model.logits(hidden)[first : first + size])
            start += size
        return torch.cat(found)


def sequence(number: int, length: int) -> Sequence:
    seq = Sequence(
        Request(
            id=str(number),
            prompt_ids=[1 + (7 * number + 3 * i) % 50 for i in range(length)],
            params=SamplingParams(),
            seed=0,
            max_tokens=1,
        )
    )
    seq.tables = [[1 + 3 * number + i for i in range(3)]]
    return seq


@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_logits_have_the_same_bits_in_any_company(kind, device, monkeypatch):
    layers = MODELS[kind]
    monkeypatch.setattr(paged_attention, "CHUNK", 16 if device == "cpu" else 64)
    products, experts = [], []

    def product(*arguments, **options):
        products.append(arguments[0].shape[0])
        return matmul.matmul_invariant(*arguments, **options)

    def place(*arguments, **options):
        experts.append(options["fixed"])
        return moe.moe_triton(*arguments, **options)

    monkeypatch.setattr(matrix_products, "matmul_invariant", product)
    monkeypatch.setattr("kvasir.layers.ffn.moe.moe_triton", place)
    world = World(layers, device, torch.float32 if device == "cpu" else torch.bfloat16)
    whole = world.logits((LENGTH,))
    assert whole.isfinite().all() and whole.std() > 0.1
    for chunks, before, after in (((1, 17, 2, 1), (), ()), ((20, 1), COMPANY[:1], COMPANY[1:])):
        assert torch.equal(world.logits(chunks, before, after), whole), (chunks, before, after)
    assert len(set(products)) > 5, "every product is the batch-invariant one, at many numbers of rows"
    assert all(experts) and bool(experts) == any(layer.ffn.kind == "moe" for layer in layers)


def test_a_norm_without_a_kernel_of_its_own_shape_mixes_no_rows(device):
    """Heads with a scale each, as where a codec does not fuse."""
    draw = Draw(0, torch.float32, device)
    x, weight = draw(9, 5, 24), draw(5, 24)
    whole = rms_norm(x, weight, 1e-6)
    want = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    torch.testing.assert_close(whole.double(), want, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(rms_norm(x[i : i + 1], weight, 1e-6), whole[i : i + 1]) for i in range(9))
