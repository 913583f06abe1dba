"""Recurrent layers by the chunk kernels of another package, for which a plain stand-in runs here: results and gradients
of packed documents, inside a compiled layer, and what must stay as it was."""

from __future__ import annotations

import threading

import pytest
import torch

from kvasir_lab import delta_chunks, delta_products, fused, train
from kvasir_lab.model import PLAIN, compiled, losses
from kvasir_lab.sample import complete
from kvasir_lab.training.recipe import BASE_HYBRID
from tests.lab.test_hybrid import SHAPE, drawn, lively

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTH = 150
PACKED = torch.tensor([[0] * 40 + [1] * 3 + [2] * 67 + [3] * 40, [0] * 64 + [1] * 85 + [2]]).to(torch.int16)


def rule(q, k, v, g, beta, scale, cu_seqlens):
    """Token by token; documents follow one after the other in one row."""
    repeats, dtype = v.shape[2] // q.shape[2], v.dtype
    q, k, v = (x.float() for x in (q.repeat_interleave(repeats, 2), k.repeat_interleave(repeats, 2), v))
    ends, out = cu_seqlens.tolist(), []
    for t in range(v.shape[1]):
        if t in ends:
            state = torch.zeros(v.shape[2], q.shape[3], v.shape[3])
        state = state * g[0, t].exp()[:, None, None]
        new = (v[0, t] - torch.einsum("hd,hdv->hv", k[0, t], state)) * beta[0, t][:, None]
        state = state + k[0, t][:, :, None] * new[:, None]
        out.append(scale * torch.einsum("hd,hdv->hv", q[0, t], state))
    return torch.stack(out)[None].to(dtype)


class StandIn(torch.autograd.Function):
    """An autograd function, as the package's is. Its gradient is computed in a thread: inside of an operator, PyTorch
    records nothing."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta, scale, cu_seqlens):
        ctx.save_for_backward(q, k, v, g, beta)
        ctx.scale, ctx.cu_seqlens = scale, cu_seqlens
        return rule(q, k, v, g, beta, scale, cu_seqlens)

    @staticmethod
    def backward(ctx, grad):
        inputs, found = [x.detach().requires_grad_() for x in ctx.saved_tensors], []

        def work():
            found.extend(torch.autograd.grad(rule(*inputs, ctx.scale, ctx.cu_seqlens), inputs, grad))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return *found, None, None


def stand_in(q, k, v, g, beta, scale=None, cu_seqlens=None):
    return StandIn.apply(q, k, v, g, beta, scale, cu_seqlens), None


def without_documents(q, k, v, g, beta, scale=None, cu_seqlens=None):
    return stand_in(q, k, v, g, beta, scale, cu_seqlens[[0, -1]])


class WithoutDecay(StandIn):
    """Leaves the gradient of the decay out."""

    @staticmethod
    def backward(ctx, grad):
        q, k, v, g, *rest = StandIn.backward(ctx, grad)
        return q, k, v, torch.zeros_like(g), *rest


def without_decays_gradient(q, k, v, g, beta, scale=None, cu_seqlens=None):
    return WithoutDecay.apply(q, k, v, g, beta, scale, cu_seqlens), None


@pytest.fixture
def package(monkeypatch):
    """Takes the place of the package; holds the calls of its function."""
    calls = []

    def use(function):
        def counted(*given, **options):
            calls.append(options.get("cu_seqlens"))
            return function(*given, **options)

        monkeypatch.setattr(delta_chunks, "kernels", lambda: counted)
        monkeypatch.setattr(fused, "kernels", lambda: counted)
        monkeypatch.setattr(delta_chunks, "_last", None)
        return calls

    return use


def trained(documents, *, chunks, compute=PLAIN):
    """Loss and gradients of a model of three recurrent layers."""
    model = lively()
    model.train_by_chunks(torch.float32 if chunks else None)
    ids = torch.randint(3, 2048, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    loss = losses(model, ids, documents, torch.ones_like(ids, dtype=torch.bool), compute)[0] / ids.numel()
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


def assert_same(found, wanted):
    for name, want in wanted.items():
        torch.testing.assert_close(
            found[name], want, atol=1e-4, rtol=1e-4, msg=lambda said, name=name: f"{name}: {said}"
        )


@pytest.mark.parametrize("documents", [PACKED, None], ids=["packed", "whole"])
@pytest.mark.parametrize("compiles", [False, True])
def test_chunks_train_as_the_scan_does(package, documents, compiles):
    calls = package(stand_in)
    compute = compiled(fused=False, backend="aot_eager") if compiles else PLAIN
    assert_same(trained(documents, chunks=True, compute=compute), trained(documents, chunks=False))
    assert len(calls) == 6, "forward and backward of three layers"
    assert len({id(c) for c in calls}) == 1, "all with the same bounds, for which the package keeps its indices"


@pytest.mark.parametrize(
    "broken, part", [(without_documents, "loss"), (without_decays_gradient, "model.layers.3.linear_attn.A_log")]
)
def test_what_is_wrong_is_noticed(package, broken, part):
    package(broken)
    found, wanted = trained(PACKED, chunks=True), trained(PACKED, chunks=False)
    with pytest.raises(AssertionError, match=part):
        assert_same(found, {part: wanted[part]})
    if broken is without_decays_gradient:
        assert_same(found, {"loss": wanted["loss"]})
        assert not found[part].any() and wanted[part].any()


def test_other_documents_need_no_other_graph(package):
    package(stand_in)
    compute = compiled(fused=False, backend="aot_eager")
    model = lively()
    model.train_by_chunks(torch.float32)
    layer, x, rope = model.model.layers[0], drawn(2, LENGTH, SHAPE.dim, seed=3), model.rope(LENGTH)
    first = compute.layer(layer, x, rope, PACKED)
    with torch.compiler.set_stance("fail_on_recompile"):
        one = torch.zeros_like(PACKED)
        second = compute.layer(layer, x, rope, one)
    model.train_by_chunks(None)
    for found, documents in ((first, PACKED), (second, one)):
        torch.testing.assert_close(found, layer(x, rope, documents), atol=1e-4, rtol=1e-4)
    assert (first - second).abs().max() > 1e-2


def test_bounds_follow_what_is_written():
    documents = PACKED.clone()
    found = delta_chunks.bounds(documents)
    assert found.tolist() == [0, 40, 43, 110, 150, 214, 299, 300]
    assert delta_chunks.bounds(documents) is found and delta_chunks.bounds(documents[:]) is found
    assert delta_chunks.bounds(documents[:1]).tolist() == [0, 40, 43, 110, 150]
    documents[0, :] = 0
    assert delta_chunks.bounds(documents).tolist() == [0, 150, 214, 299, 300]
    with torch.inference_mode():
        there = PACKED.clone()
        assert delta_chunks.bounds(there).tolist() == found.tolist()
        there[0, :] = 0
        assert delta_chunks.bounds(there).tolist() == [0, 150, 214, 299, 300]


def test_sampling_and_other_precisions_stay_as_they_were(package):
    calls = package(stand_in)
    prompts = [[5, 9, 200], list(range(3, 73))]
    want = complete(lively(), prompts, 5, [])
    for dtype in (torch.float32, torch.bfloat16):
        model = lively()
        model.train_by_chunks(dtype)
        assert complete(model, prompts, 5, []) == want
    ids = torch.tensor(prompts[1:])
    with torch.no_grad():
        assert torch.equal(model(ids), lively()(ids)) and not calls, "fp32 weights, and kernels for bf16"
        model.train_by_chunks(torch.float32)
        torch.testing.assert_close(model(ids), lively()(ids), atol=1e-4, rtol=1e-4)
    assert len(calls) == 3


def test_the_kernels_are_tried_before_a_run(package, monkeypatch, capsys):
    package(stand_in)
    assert fused.why_no_chunks(SHAPE, "cpu", torch.float32) is None
    package(without_documents)
    assert "its output is off by" in fused.why_no_chunks(SHAPE, "cpu", torch.float32)
    package(without_decays_gradient)
    assert "its decay gradient is off by" in fused.why_no_chunks(SHAPE, "cpu", torch.float32)

    def fails(*given, **options):
        raise RuntimeError("no such kernel\nmore")

    package(fails)
    assert fused.why_no_chunks(SHAPE, "cpu", torch.float32) == "RuntimeError: no such kernel"

    def missing():
        raise ModuleNotFoundError("No module named 'fla'", name="fla")

    monkeypatch.setattr(fused, "kernels", missing)
    assert "pip install fla-core" in fused.why_no_chunks(SHAPE, "cpu", torch.float32)

    for reason, dtype in ((None, torch.bfloat16), ("its output is off by 9.0%", None)):
        monkeypatch.setattr(train, "why_no_chunks", lambda shape, device, reason=reason: reason)
        model = lively()
        train._choose_recurrence(model, "cpu")
        assert not capsys.readouterr().out
        train._choose_recurrence(model, "cuda")
        assert (reason or "recurrence: fla-core") in capsys.readouterr().out
        assert {model.model.layers[i].linear_attn.chunked for i in SHAPE.recurrent} == {dtype}


@pytest.mark.parametrize("swapped", [True, False])
def test_products_are_gradients_of_a_chunk(swapped):
    """Compare the products that replace a kernel of the package's backward with autograd of the rule's formula."""
    length, heads, groups, dim, starts = 150, 4, 2, 8, [0, 40, 43, 150]
    places = [
        (n, a, min(a + 64, e), (a - s) // 64)
        for n, (s, e) in enumerate(zip(starts, starts[1:]))
        for a in range(s, e, 64)
    ]
    index, pieces = torch.tensor([(n, i) for n, _, _, i in places]), [(a, e) for _, a, e, _ in places]
    q, k = (drawn(1, length, groups, dim, seed=s).requires_grad_() for s in (1, 2))
    x, do, dv = (drawn(1, length, heads, dim, seed=s) for s in (3, 4, 5))
    w = drawn(1, length, heads, dim, seed=6).requires_grad_()
    h, dh = (drawn(1, len(pieces), heads, dim, dim, seed=s) for s in (7, 8))
    decays = torch.zeros(1, length, heads)
    for a, e in pieces:
        decays[0, a:e] = -drawn(e - a, heads, seed=9).abs().cumsum(0) * 0.1
    decays.requires_grad_()
    loss = 0.0
    for n, (a, e) in enumerate(pieces):
        qn, kn = (z[0, a:e].repeat_interleave(heads // groups, 1).transpose(0, 1) for z in (q, k))
        xn, don, dvn, wn = (z[0, a:e].transpose(0, 1) for z in (x, do, dv, w))
        g, state = decays[0, a:e].T, h[0, n]
        seen = torch.ones(e - a, e - a, dtype=torch.bool).tril()
        between = (g[:, :, None] - g[:, None, :]).masked_fill(~seen, float("-inf")).exp()
        out = 0.5 * (g.exp()[..., None] * (qn @ state) + ((qn @ kn.mT) * between) @ xn)
        after = g[:, -1:, None].exp() * state + ((g[:, -1:] - g).exp()[..., None] * kn).mT @ xn
        loss = loss + (out * don).sum() + (after * dh[0, n]).sum() - ((wn @ state) * dvn).sum()
    wanted = torch.autograd.grad(loss, (q, k, w, decays))
    if swapped:
        h, dh = h.mT.contiguous(), dh.mT.contiguous()
    with torch.no_grad():
        found = delta_products.chunk_products(
            q=q, k=k, v=x, do=do, h=h, dh=dh, w=w, g=decays / torch.tensor(2.0).log(), dv=dv, scale=0.5,
            cu_seqlens=torch.tensor(starts),
            chunk_indices=index, state_v_first=swapped,
        )  # fmt: skip
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_package_agrees_on_a_gpu(monkeypatch):
    pytest.importorskip("fla")
    monkeypatch.setattr(fused, "TOLERANCE", 0.02)
    assert fused.why_no_chunks(BASE_HYBRID.shape, "cuda") is None
