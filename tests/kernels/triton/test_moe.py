"""The mixture of experts over its grid: routing, products, sum."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from kvasir.kernels import moe, moe_rounding, moe_routing
from kvasir.layers.ffn.moe import FFN
from kvasir.layers.norm import RMSNorm
from kvasir.layers.spec import MoESpec, NormSpec
from kvasir.layers.weights import Placement
from tests.kernels.check_moe import check_moe, check_rounding, check_routing, draw_case


@pytest.mark.parametrize("case", list(moe.grid()), ids=str)
def test_fp32(case, device):
    check_moe(case, torch.float32, device)


@pytest.mark.parametrize("case", [c for c in moe.grid() if c.rows < 40][::4], ids=str)
def test_fp16(case, device):
    check_moe(case, torch.float16, device)


@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize(
    "rows,experts,top_k",
    [(1, 5, 2), (3, 128, 8), (32, 128, 8), (33, 128, 8), (300, 96, 5), (1000, 6, 6), (90, 512, 10), (520, 96, 8)],
)
def test_routing(rows, experts, top_k, block_m, device):
    draw = torch.Generator().manual_seed(rows)
    check_routing(torch.randn(rows, experts, generator=draw).to(device), top_k, True, block_m)


def test_equal_logits_take_the_lower_expert(device):
    check_routing(torch.zeros(9, 12, device=device), 4, False, 16)
    check_routing(torch.tensor([[-0.0, 0.0, -1.0] * 4] * 3, device=device), 5, False, 16)
    check_routing((torch.arange(40, device=device) % 3).float().expand(70, -1).contiguous(), 7, True, 16)


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("rows,experts,top_k", [(0, 5, 2), (1, 5, 2), (3, 128, 8), (33, 96, 5), (7, 4, 4)])
def test_choices_by_sigmoid(rows, experts, top_k, corrected, device):
    draw = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, experts, generator=draw).to(device)
    correction = torch.randn(experts, generator=draw).to(device) * 0.3 if corrected else None
    for renormalize, scale in ((True, 1.0), (True, 2.5), (False, 1.0)):
        arguments = correction, top_k, renormalize, scale
        weights, ids = moe_routing.choose_sigmoid_triton(logits, *arguments)
        want, best = moe_routing.choose_reference(logits.double().sigmoid(), *arguments)
        assert torch.equal(ids.long(), best)
        torch.testing.assert_close(weights.double(), want, atol=1e-6, rtol=1e-5)


def test_equal_scores_take_the_lower_expert_and_nan_stays_in_its_row(device):
    logits = torch.zeros(3, 40, device=device)
    logits[1], logits[2] = float("nan"), -200.0  # sigmoids that sum to zero
    weights, ids = moe_routing.choose_sigmoid_triton(logits, None, 4, True, 1.0)
    assert ids[0].tolist() == [0, 1, 2, 3] and len(set(ids[1].tolist())) == 4 and int(ids.max()) < 40
    assert weights[0].tolist() == [0.25] * 4 and bool(weights[1].isnan().all()) and bool(weights[2].isfinite().all())


def test_a_row_of_nan_spoils_no_other(device):
    """It still picks K different experts: the sorted order stays a permutation, and the other rows keep their bits."""
    case = moe.Case(rows=6, experts=7, top_k=3)
    x, logits, gate_up, down = draw_case(case, torch.float32, device)
    clean = moe.moe_triton(x, logits, gate_up, down, 3, True)
    for bad in (float("nan"), float("-inf"), float("inf"), torch.tensor(float("nan")).copysign(torch.tensor(-1.0))):
        logits[2], x[2] = bad, float("nan")
        routing = moe_routing.route_triton(logits, 3, True, 16)
        assert sorted(routing.order.tolist()) == list(range(18))
        assert len(set(routing.ids[2].tolist())) == 3 and int(routing.ids.max()) < 7
        out = moe.moe_triton(x, logits, gate_up, down, 3, True)
        keep = [0, 1, 3, 4, 5]
        assert torch.equal(out[keep], clean[keep]) and bool(out[2].isnan().all())


def test_fixed_tiling_keeps_a_rows_bits(device):
    case = moe.Case(rows=50, experts=6, top_k=3)
    x, logits, gate_up, down = draw_case(case, torch.float16, device)
    whole = moe.moe_triton(x, logits, gate_up, down, 3, True, fixed=True)
    for first, stop in ((0, 1), (7, 9), (20, 50)):
        part = moe.moe_triton(x[first:stop], logits[first:stop], gate_up, down, 3, True, fixed=True)
        assert torch.equal(part, whole[first:stop])


def test_weights_stored_transposed(device):
    """A CPU model keeps its weights this way."""
    case = moe.Case(rows=6)
    x, logits, gate_up, down = draw_case(case, torch.float32, device)
    want = moe.moe_triton(x, logits, gate_up, down, 2, True)
    turned = [w.transpose(1, 2).contiguous().transpose(1, 2) for w in (gate_up, down)]
    torch.testing.assert_close(moe.moe_triton(x, logits, *turned, 2, True), want, atol=1e-6, rtol=1e-5)
    router = torch.randn(8, 64, device=device)
    arrived = torch.zeros(1, dtype=torch.int32, device=device)
    row, same = (
        moe.moe_row_triton(x[:1], r, *w, 2, True, arrived)
        for r, w in ((router, (gate_up, down)), (router.t().contiguous().t(), turned))
    )
    torch.testing.assert_close(same, row, atol=1e-6, rtol=1e-5)


def test_experts_past_two_to_the_31_elements(device):
    """Experts 2^30 elements apart (the memory between them is never touched): 32-bit offsets would land elsewhere."""
    apart, dim, width, experts = 1 << 30, 16, 16, 4
    case = moe.Case(rows=5, experts=experts, dim=dim, width=width)
    x, logits, gate_up, down = draw_case(case, torch.float16, device)
    far = []
    for dense in (gate_up, down):
        flat = torch.empty((experts - 1) * apart + dense[0].numel(), dtype=torch.float16, device=device)
        far.append(flat.as_strided(dense.shape, (apart, dense.shape[2], 1)))
        far[-1].copy_(dense)
    assert torch.equal(moe.moe_triton(x, logits, *far, 2, True), moe.moe_triton(x, logits, gate_up, down, 2, True))
    router = torch.zeros(experts, dim, dtype=torch.float16, device=device)
    router[2:] = x[0]  # the last two
    arrived = torch.zeros(1, dtype=torch.int32, device=device)
    near, distant = (moe.moe_row_triton(x[:1], router, *w, 2, True, arrived) for w in ((gate_up, down), far))
    assert torch.equal(near, distant) and bool(near.any())


@pytest.mark.parametrize("rows", [0, 1, 6])
@pytest.mark.parametrize("renormalize", [False, True])
def test_the_layer_takes_the_kernels_and_agrees_with_its_plain_form(rows, renormalize, device):
    torch.manual_seed(rows)
    place = Placement(torch.device(device), torch.float32)
    layer = FFN(MoESpec(6, 3, 20, renormalize), 24, place)
    for slot in layer.slots().values():
        slot.target.normal_()
    norm = RMSNorm(24, NormSpec(eps=0.25, offset=1.0), place)
    norm.weight.normal_()
    x, residual = torch.randn(2, rows, 24, device=device)
    want, normed = (layer._forward_plain(rows, *layer.route(rows)) for rows in (x, norm(x)))
    with mock.patch.object(FFN, "_forward_plain", side_effect=AssertionError("the plain form ran")):
        found = (
            layer.forward(x),
            layer.forward(x, norm),
            layer.forward(x, None, residual.clone()),
            layer.forward(x, norm, x.clone()),
        )
    for got, wanted in zip(found, (want, normed, want + residual, normed + x)):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", list(moe_rounding.grid()), ids=str)
def test_token_rounding(case, device):
    check_rounding(case, torch.float32, device)
