"""Routers compared with those of transformers, each field on and off."""

from types import SimpleNamespace

import pytest
import torch

from kvasir.layers.ffn.moe import FFN
from kvasir.layers.spec import MoESpec
from kvasir.layers.weights import Placement

X, E, K = 8, 16, 3
CASES = {
    "plain": {},
    "scaled": dict(routed_scaling_factor=2.5),
    "not renormalised": dict(norm_topk_prob=False, routed_scaling_factor=0.5),
    "groups": dict(n_group=4, topk_group=2),
    "pairs": dict(n_group=2, topk_group=1),
}


def router(seed=0, correction=True, **changes):
    """The router of GLM 4.5 (the same as that of DeepSeek-V3) and ours, with the same weights."""
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

    plain = dict(num_experts_per_tok=K, num_local_experts=X, hidden_size=E, routed_scaling_factor=1.0)
    config = SimpleNamespace(**{**plain, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, **changes})
    theirs, generator = Glm4MoeTopkRouter(config), torch.Generator().manual_seed(seed)
    spec = MoESpec(
        X,
        K,
        4,
        config.norm_topk_prob,
        scoring="sigmoid",
        weight_scale=config.routed_scaling_factor,
        correction=True,
        groups=config.n_group,
        top_groups=config.topk_group,
    )
    ours = FFN(spec, E, Placement(torch.device("cpu"), torch.float32))
    with torch.no_grad():
        theirs.weight.copy_(torch.randn(X, E, generator=generator) * E**-0.5)
        theirs.e_score_correction_bias.copy_(torch.randn(X, generator=generator) * (0.3 if correction else 0.0))
    ours.router.weight.tensor.copy_(theirs.weight.detach())
    ours.correction_X.copy_(theirs.e_score_correction_bias)
    return theirs, ours


def by_expert(weights, ids):
    """The weight of every expert, [T, X]: the order of the choices is anybody's."""
    return torch.zeros(len(ids), X).scatter_(1, ids, weights)


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_sigmoid_routers(case):
    theirs, ours = router(**CASES[case])
    x = torch.randn(64, E, generator=torch.Generator().manual_seed(1))
    _, weights, ids = theirs(x)
    torch.testing.assert_close(by_expert(*ours.route(x)), by_expert(weights, ids), atol=1e-6, rtol=1e-5)


@torch.inference_mode()
def test_the_correction_is_for_the_choice_alone():
    """Control: with the correction added to the weights the same comparison fails; without it the choice differs."""
    theirs, ours = router()
    x = torch.randn(64, E, generator=torch.Generator().manual_seed(1))
    _, weights, ids = theirs(x)
    want = by_expert(weights, ids)
    found, chosen = ours.route(x)
    assert (by_expert(found + ours.correction_X[chosen], chosen) - want).abs().max() > 0.05
    ours.correction_X.zero_()
    assert not torch.equal(by_expert(*ours.route(x)) > 0, want > 0)


@torch.inference_mode()
def test_groups_hide_experts():
    _, ours = router(n_group=4, topk_group=2)
    _, ids = ours.route(torch.randn(50, E))
    assert all(len(set((row // 2).tolist())) <= 2 for row in ids)


@torch.inference_mode()
def test_a_softmax_over_the_chosen_logits_is_a_renormalised_softmax():
    """As gpt-oss and Mixtral route."""
    ffn = FFN(MoESpec(X, K, 4, True, router_bias=True), E, Placement(torch.device("cpu"), torch.float32))
    ffn.router.weight.tensor.normal_()
    ffn.router.bias_N.normal_()
    x = torch.randn(20, E)
    best, ids = (x @ ffn.router.weight.tensor.t() + ffn.router.bias_N).topk(K, -1)
    torch.testing.assert_close(by_expert(*ffn.route(x)), by_expert(best.softmax(-1), ids), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("gate", [False, True])
@torch.inference_mode()
def test_a_shared_expert_joins_the_others(gate):
    """Each row's result is that of its experts plus, perhaps gated, that of the shared one."""
    place, generator = Placement(torch.device("cpu"), torch.float32), torch.Generator().manual_seed(0)
    ffn = FFN(MoESpec(X, K, 4, True, shared_size=6, shared_gate=gate), E, place)
    for slot in ffn.slots().values():
        slot.target.copy_(torch.randn(slot.shape, generator=generator) * 0.3)
    x, residual = torch.randn(5, E, generator=generator), torch.randn(5, E, generator=generator)
    weights, ids = ffn.route(x)
    slots = {name: slot.target for name, slot in ffn.slots().items()}

    def block(name, row):
        gate, up, down = (slots[f"{name}.{part}.weight"] for part in ("gate", "up", "down"))
        return down @ (torch.nn.functional.silu(gate @ row) * (up @ row))

    want = []
    for row, mine, chosen, old in zip(x, weights, ids.tolist(), residual):
        factor = torch.sigmoid(slots["shared_gate.weight"] @ row) if gate else 1.0
        out = old + factor * block("shared", row)
        want.append(out + sum(w * block(f"experts.{e}", row) for w, e in zip(mine, chosen)))
    found = ffn.forward(x, residual_TE=residual.clone())
    torch.testing.assert_close(found, torch.stack(want), atol=1e-5, rtol=1e-5)
