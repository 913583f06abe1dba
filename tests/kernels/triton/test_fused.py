"""The fused kernels over their grids, and a decoder that runs on them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvasir.attention.backend import Site
from kvasir.attention.backends.torch import TorchBackend
from kvasir.engine.ways.batch import pack
from kvasir.kernels import _triton, activation, gemv, moe, norm
from kvasir.kernels.activation import ACTIVATIONS, gated_triton
from kvasir.kv.codecs.plain import PlainCodec
from kvasir.kv.pool import KVPool
from kvasir.layers import linear
from kvasir.layers.formats import plain
from kvasir.layers.mixers import gqa
from kvasir.layers.spec import (
    DenseAndExpertsSpec,
    DenseSpec,
    GQASpec,
    LayerEmbeddingSpec,
    MoESpec,
    NormSpec,
    QueryScale,
    RopeSpec,
)
from kvasir.layers.weights import Placement
from kvasir.models.decoder import Decoder
from kvasir.models.loader import fill_random
from kvasir.models.spec import LayerSpec, ModelSpec
from kvasir.types import Request, SamplingParams, Sequence, Span
from tests.kernels.check_fused import CHECKS, Draw

CASES = [(op, case) for op, (grid, _) in CHECKS.items() for case in grid()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op, case", CASES, ids=str)
def test_against_the_reference(op, case, dtype, device):
    if op == "gemv" and dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter multiplies bf16 matrices as if they were integers; the GPU runs this")
    CHECKS[op][1](case, dtype, device)


MIXER = GQASpec(4, 2, 16, 0.25, qk_norm=NormSpec(), qkv_bias=True)
LAYER = LayerSpec(MIXER, DenseSpec(40), RopeSpec(100.0, 16), NormSpec())
GEMMA = LayerSpec(
    replace(MIXER, qkv_bias=False),
    DenseSpec(40, "gelu_tanh", bias=True),
    RopeSpec(100.0, 16),
    NormSpec(offset=1.0),
    norms="sandwich",
)
EXPERTS = replace(LAYER, ffn=MoESpec(4, 2, 24, True))
SANDWICHED = replace(GEMMA, ffn=EXPERTS.ffn)
MODELS = {
    "pre-norm": (LAYER,) * 2,
    "sandwich": (GEMMA,) * 2,
    "experts": (EXPERTS,) * 2,
    "mixed": (EXPERTS, LAYER, GEMMA, SANDWICHED, LAYER),
    "parts of a head": (replace(LAYER, rope=RopeSpec(100.0, 6)), replace(GEMMA, rope=None)),
    "gates, scales": (
        replace(LAYER, mixer=replace(MIXER, gated=True, value_norm=NormSpec(), query_scale=QueryScale(0.5, 8))),
        replace(LAYER, mixer=replace(MIXER, keys_are_values=True, value_norm=NormSpec()), rope=RopeSpec(100.0, 6)),
    ),
    "sigmoid, shared": (
        replace(LAYER, ffn=replace(EXPERTS.ffn, scoring="sigmoid", correction=True, weight_scale=2.0, shared_size=24)),
        replace(GEMMA, ffn=replace(EXPERTS.ffn, groups=2, shared_size=24, shared_gate=True, bias=True)),
    ),
    "softmax, shared": (
        replace(EXPERTS, ffn=replace(EXPERTS.ffn, shared_size=24)),
        replace(EXPERTS, ffn=replace(EXPERTS.ffn, shared_size=24, shared_gate=True)),
    ),
    "shared cache": (LAYER, LAYER, replace(LAYER, cache_of=1)),
    "norms after": (
        replace(LAYER, norms="post"),
        replace(LAYER, norms="post", mixer=replace(LAYER.mixer, qk_norm=NormSpec(), flat_norm=True)),
    ),
    "scaled": (replace(LAYER, residual_scale=0.5), replace(EXPERTS, residual_scale=0.5)),
    "gemma 4": (
        replace(GEMMA, embedding=LayerEmbeddingSpec(12, "gelu_tanh", NormSpec()), scaled=True),
        replace(
            GEMMA,
            ffn=DenseAndExpertsSpec(DenseSpec(56), replace(EXPERTS.ffn, expert_scale=True), NormSpec()),
            embedding=LayerEmbeddingSpec(12, "gelu_tanh", NormSpec()),
            scaled=True,
        ),
    ),
}


def tap_logits(model: Decoder, device: str, sizes: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of every position of one sequence computed in steps of these sizes, and the output of layer 0."""
    spec = model.spec
    pool = KVPool(spec.cache_groups(), PlainCodec(), [4], 16, device, torch.float32)
    caches = [pool.layer(i if layer.cache_of is None else layer.cache_of) for i, layer in enumerate(spec.layers)]
    backend = TorchBackend()
    backend.prepare(Site(device, torch.float32, "plain", 16, tuple({layer.mixer.attention() for layer in spec.layers})))
    seq = Sequence(
        Request(id="a", prompt_ids=list(range(1, 1 + sum(sizes))), params=SamplingParams(), seed=0, max_tokens=1)
    )
    seq.tables = [[1, 2]]
    logits, taps, start = [], [], 0
    for size in sizes:
        batch = pack([Span(seq, start, size)], 16, device, 1)
        backend.plan(batch)
        tap = torch.empty(size, spec.hidden_size, device=device)
        logits.append(model.logits(model.forward(batch, caches, backend, {0: tap})))
        taps.append(tap)
        start += size
    return torch.cat(logits), torch.cat(taps)


@pytest.mark.parametrize("layers", MODELS.values(), ids=MODELS)
def test_a_decoder_on_the_kernels_is_the_plain_decoder(layers, device, monkeypatch):
    """The decoder in fp32, with every product of up to 16 rows on the GEMV kernels, agrees with the same weights
    without any kernel."""
    spec = ModelSpec(
        family="none", hidden_size=32, vocab_size=56, max_position=64, layers=layers, final_norm=NormSpec()
    )
    model = Decoder(spec, Placement(torch.device(device), torch.float32))
    fill_random(model, 0)
    draw = Draw(1, torch.float32, device)
    for slot in model.slots().values():
        if slot.target.dim() == 1 or slot.repeat:  # scales and biases, which are ones and zeros so far
            slot.target.copy_(1 + draw(*slot.target.shape, scale=0.2))
    sizes = (1, 17, 3, 1, 10)
    with monkeypatch.context() as patch:
        patch.setattr(_triton, "triton", None)
        want = tap_logits(model, device, sizes)
    calls, experts = [], []

    def count(*arguments, **options):
        calls.append(options)
        return gemv.gemv(*arguments, **options)

    def count_experts(*arguments, **options):
        experts.append(options["norm"] is not None and options["residual_1E"] is not None)
        return moe.moe_row_triton(*arguments, **options)

    monkeypatch.setattr("kvasir.layers.ffn.moe.moe_row_triton", count_experts)
    monkeypatch.setattr(plain, "gemv", count)
    monkeypatch.setattr(
        plain,
        "choose",
        lambda rows, n, k: (
            None if rows > 16 else gemv.Config(4, 16, 1) if rows == 1 else gemv.Config(16, 32, 1, splits=2)
        ),
    )
    parts = [part for block in model.blocks for part in (block.mixer.qkv, block.mixer.o, *vars(block.ffn).values())]
    products = [
        p for p in parts if isinstance(p, linear.Linear) and p.widths.keys() & {"router", "shared_gate"} == set()
    ]
    for weight in (model.head, *(product.weight for product in products)):
        weight.streams, weight.planes = True, {"weight": weight.tensor.contiguous()}
        weight.forget()
    for got, wanted in zip(tap_logits(model, device, sizes), want):
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)
    few = sum(size <= 16 for size in sizes)
    assert len(calls) == few * (1 + len(products)), "every product of a few rows, and the head"
    mixtures = [
        layer.norms == "sandwich" or layer.residual_scale != 1
        for layer in layers
        if layer.ffn.kind == "moe" and layers != MODELS["sigmoid, shared"]
    ]
    assert (len(experts), sum(experts)) == (2 * len(mixtures), 2 * mixtures.count(False)), (
        "of both single rows; the norm and the add within"
    )
    assert any(c.get("norm") for c in calls) and (
        any(c.get("residual_TO") is not None for c in calls)
        or all(layer.norms != "pre" or layer.residual_scale != 1 for layer in layers)
    )


@pytest.mark.parametrize("layers", [MODELS["mixed"], MODELS["shared cache"]], ids=["mixed", "shared cache"])
def test_a_decoder_that_may_not_fuse_is_the_plain_decoder(layers, device, monkeypatch):
    """The form that the bench's ladder compares with: torch's own norms, RoPE, activations and products."""
    spec = ModelSpec(
        family="none", hidden_size=32, vocab_size=56, max_position=64, layers=layers, final_norm=NormSpec()
    )
    model = Decoder(spec, Placement(torch.device(device), torch.float32, fused=False))
    fill_random(model, 0)
    with monkeypatch.context() as patch:
        patch.setattr(_triton, "triton", None)
        want = tap_logits(model, device, (17, 3, 1))

    def never(*arguments, **options):
        raise AssertionError("a fused kernel ran")

    for module, name in (
        (norm, "_launch"),
        (activation, "gated_triton"),
        (gqa, "fused_qkv"),
        (plain, "gemv"),
        (PlainCodec, "write_fused"),
    ):
        monkeypatch.setattr(module, name, never)
    for got, wanted in zip(tap_logits(model, device, (17, 3, 1)), want):
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)


def test_kernels_do_not_mix_rows(device):
    """A row's bits do not depend on its batch: what exact mode may use."""
    draw = Draw(0, torch.float32, device)
    x, h, weight = draw(9, 96), draw(9, 96), draw(96)
    whole = [
        *norm.add_rms_norm(x, h.clone(), weight, 1e-6),
        norm.rms_norm(x, weight, 1e-6),
        gated_triton(x, ACTIVATIONS["silu"]),
    ]
    for i in range(9):
        row = slice(i, i + 1)
        alone = [
            *norm.add_rms_norm(x[row], h[row].clone(), weight, 1e-6),
            norm.rms_norm(x[row], weight, 1e-6),
            gated_triton(x[row], ACTIVATIONS["silu"]),
        ]
        assert all(torch.equal(a[row], b) for a, b in zip(whole, alone))
