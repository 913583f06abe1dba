"""Token rounding (SonicMoE): the published choice of rows, whole tiles, rows that keep their experts, the switch."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from kvasir.engine.start import build
from kvasir.engine.ways.mixed_steps import MixedSteps
from kvasir.errors import ConfigError
from kvasir.kernels.moe_rounding import DIRECTIONS, Rounding, round_reference
from kvasir.kernels.moe_routing import route_reference
from kvasir.layers.ffn.moe import FFN
from kvasir.layers.rounded_rows import rounded_rows
from kvasir.layers.spec import MoESpec
from kvasir.layers.weights import Placement
from kvasir.models import token_rounding
from kvasir.models.families import build_spec
from kvasir.types import StepBatch
from tests.composition import MODELS
from tests.engine.driver import Driver

T, X, K, TILE = 120, 6, 2, 16


def logits(rows: int = T, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, X, generator=torch.Generator().manual_seed(seed))


def rounded(direction: str, renormalize: bool = True, fixed_T: torch.Tensor | None = None):
    given = logits()
    routed = route_reference(given, K, renormalize)
    return routed, *round_reference(given, *routed, renormalize, Rounding(direction, TILE), fixed_T)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_published_choice(direction):
    """Row by row as the paper says it: who chose the expert comes first, the count is a multiple of the tile."""
    (weights, ids), kept, found = rounded(direction)
    probabilities = logits().softmax(-1)
    for expert in range(X):
        own = {t: float(weights[t, ids[t].tolist().index(expert)]) for t in range(T) if expert in ids[t]}
        rank = sorted(own, key=lambda t: -own[t])
        rank += sorted(set(range(T)) - set(own), key=lambda t: -float(probabilities[t, expert]))
        tiles = {"nearest": round(len(own) / TILE), "up": -(-len(own) // TILE), "down": len(own) // TILE}[direction]
        assert kept[:, expert].nonzero().flatten().tolist() == sorted(rank[: tiles * TILE])
        for t in rank[: tiles * TILE]:
            added = float(probabilities[t, expert] / probabilities[t, ids[t]].sum())
            assert float(found[t, expert]) == pytest.approx(own.get(t, added), rel=1e-5)
    assert bool((found[~kept] == 0).all())


def test_rows_keep_their_experts_where_nothing_is_to_be_rounded():
    """The control: without fixed rows the same logits lose or gain pairs."""
    (_, ids), kept, found = rounded("nearest", fixed_T=torch.ones(T))
    chosen = torch.zeros(T, X, dtype=torch.bool).scatter_(1, ids, True)
    assert torch.equal(kept, chosen) and torch.allclose(found.sum(1), torch.ones(T))
    assert not torch.equal(rounded("nearest")[1], chosen)


def test_fixed_rows_count_for_the_tile():
    fixed = torch.arange(T) % 5 == 0
    for direction in DIRECTIONS:
        (_, ids), kept, _ = rounded(direction, fixed_T=fixed)
        chosen = torch.zeros(T, X, dtype=torch.bool).scatter_(1, ids, True)
        assert torch.equal(kept[fixed], chosen[fixed]) and bool((kept.sum(0) % TILE == 0).all())


def test_rounding_up_cannot_take_more_rows_than_there_are():
    given = logits(9)
    kept, _ = round_reference(given, *route_reference(given, K, True), True, Rounding("up", 64))
    assert bool(kept.all())


def block(rounding: Rounding | None) -> FFN:
    ffn = FFN(MoESpec(X, K, 8, True), 16, Placement(torch.device("cpu"), torch.float32, rounding=rounding))
    draw = torch.Generator().manual_seed(3)
    for slot in ffn.slots().values():
        slot.target.copy_(torch.randn(slot.shape, generator=draw) * 0.3)
    return ffn


def step(lengths: list[int], prompts: list[bool]) -> StepBatch:
    rows = torch.zeros(sum(lengths), dtype=torch.int64)
    return StepBatch(rows, rows, rows, rows, (), (), rows, [0] * len(lengths), lengths, prompts=prompts)


@torch.inference_mode()
def test_a_block_rounds_prompts_alone_and_large_steps_alone():
    plain, ffn = block(None), block(Rounding("nearest", TILE))
    assert plain.rounds_from == 0 and ffn.rounds_from == X * TILE // K == 48
    x = torch.randn(T, 16, generator=torch.Generator().manual_seed(5))
    want = plain.forward(x)
    for few in (None, step([T], [False]), step([40, 80], [True, False]), step([60, 100], [True, True])):
        assert torch.equal(ffn.forward(x, batch=few), want)  # a decode, too few rows of prompts, other rows
    mixed = ffn.forward(x, batch=step([1, 110, 9], [False, True, False]))
    torch.testing.assert_close(mixed[[0, *range(111, T)]], want[[0, *range(111, T)]])
    assert (mixed[1:111] - want[1:111]).abs().amax(1).gt(1e-3).sum() > 3
    kept, weights = round_reference(
        ffn.router(x), *ffn.route(x), True, ffn.rounding, rounded_rows(step([T], [True]), T, 48).fixed_T
    )
    slots = {name: slot.target for name, slot in ffn.slots().items()}

    def expert(n: int) -> torch.Tensor:
        gate, up, down = (slots[f"experts.{n}.{part}.weight"] for part in ("gate", "up", "down"))
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    by_hand = sum(weights[:, n : n + 1] * kept[:, n : n + 1] * expert(n) for n in range(X))
    torch.testing.assert_close(ffn.forward(x, batch=step([T], [True])), by_hand, atol=1e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("experts")
    (found / "config.json").write_text(json.dumps(MODELS["experts"]))
    return str(found)


def test_the_engine_rounds_large_steps_with_prompts(folder, monkeypatch):
    """A long prompt's log-probabilities under rounding differ from the plain ones (the control). One with fewer rows
    than a tile an expert keeps them."""
    monkeypatch.setattr(token_rounding, "Rounding", partial(Rounding, tile=16))
    options = dict(batch_invariant=False, max_num_batched_tokens=128, max_model_len=256, enable_prefix_caching=False)
    found = {}
    for direction in ("off", "nearest"):
        d = Driver(folder, load_format="dummy", **options, token_rounding=direction)
        for name, length in (("short", 20), ("long", 90)):
            prompt = [(11 * i) % 60 + 3 for i in range(length)]
            d.run([d.request(name, prompt, temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=1)])
        found[direction] = [[at.logprob for at in d.outputs[n, 0].prompt_logprobs[1:]] for n in ("short", "long")]
        d.close()
    assert found["off"][0] == found["nearest"][0] and found["off"][1] != found["nearest"][1]


def test_captured_steps_end_below_the_rows_that_are_rounded(folder, monkeypatch):
    """The control: without rounding they hold as many rows as a step may have."""
    monkeypatch.setattr(token_rounding, "Rounding", partial(Rounding, tile=64))
    last = {}
    for direction in ("off", "nearest"):
        options = dict(max_model_len=256, batch_invariant=False, max_num_batched_tokens=256, token_rounding=direction)
        d = Driver(folder, pieces=True, load_format="dummy", **options)
        last[direction] = next(way.sizes[-1] for way in d.engine.runner.ways if isinstance(way, MixedSteps))
        d.close()
    assert last == {"off": 256, "nearest": 128} and d.engine.runner.model.rounds_from == 160


def test_the_prefix_key_knows_it(folder, monkeypatch):
    found, keep = [], build._prefix_root
    monkeypatch.setattr(build, "_prefix_root", lambda *args: found.append(keep(*args)) or found[-1])
    for direction in ("off", "nearest", "up"):
        options = dict(max_model_len=256, batch_invariant=False, token_rounding=direction)
        Driver(folder, load_format="dummy", **options).close()
    assert len({*found}) == 3


def test_models_and_modes_that_cannot_have_it(folder):
    experts, dense = (build_spec(MODELS[name]) for name in ("experts", "full attention"))
    sigmoid = [replace(layer, ffn=replace(layer.ffn, scoring="sigmoid")) for layer in experts.layers]
    for spec, exact, reason in (
        (experts, True, "Leave out one of the two"),
        (dense, False, "no experts. Leave out --token-rounding"),
        (replace(experts, layers=tuple(sigmoid)), False, "softmax of the router"),
    ):
        with pytest.raises(ConfigError, match=reason):
            token_rounding.choose_rounding("nearest", spec, exact)
        assert token_rounding.choose_rounding("off", spec, exact) is None
    assert token_rounding.choose_rounding("up", experts, False) == Rounding("up", 128)
