"""Decodes whose tokens are drawn in the native call give the same tokens, to the bit, as the same steps drawn by the
sampler."""

import pytest
import torch

from kvasir.engine.ways.native_decodes import NativeDecodes
from kvasir.kernels.native import program
from kvasir.kernels.native.library import native
from kvasir.models import native_decoder
from kvasir.types import Grammar
from tests.engine.driver import Driver

pytestmark = pytest.mark.skipif(native().library is None, reason=f"no native kernels: {native().reason}")
DRAWN_HERE = [
    dict(temperature=0.0),
    dict(temperature=1.0),
    dict(temperature=0.7, top_k=20),
    dict(temperature=0.8, top_p=0.9),
    dict(temperature=1.3, top_k=50, top_p=0.95, min_p=0.02),
    dict(temperature=1.0, min_p=0.1),
]
NOT_HERE = [
    dict(temperature=1.0, logprobs=3),
    dict(temperature=0.9, frequency_penalty=0.5, repetition_penalty=1.2),
    dict(temperature=1.0, min_tokens=9),
    dict(temperature=1.0, logit_bias={77: 8.0, 78: -8.0}),
]
GRAMMAR = [
    dict(temperature=1.0, grammar=Grammar("regex", "[a-z ]{60}"))
]  # alone: when it is compiled is a matter of time


def outputs(every, num_pages=256, max_tokens=30, gap=2, n=1, **options):
    """Tokens and reports of requests with these parameters, and how many were preempted."""
    driver = Driver(
        **{"batch_invariant": False, "max_num_batched_tokens": 128, "max_num_seqs": 24, "num_pages": num_pages}
        | options
    )
    assert driver.engine.runner.native is not None
    reqs = [
        driver.request(
            f"r{k}",
            [300 + (13 * i + 5 * k) % 1500 for i in range(20 + 9 * k)],
            max_tokens=max_tokens,
            seed=k,
            n=n,
            **{"ignore_eos": True} | params,
        )
        for k, params in enumerate(every)
    ]
    driver.run(reqs, gap=gap)
    found = {
        key: (out.tokens, [(e.id, e.logprob, e.rank, e.top) for e in out.logprobs], out.finish_reason)
        for key, out in driver.outputs.items()
    }
    errors, preempted = driver.errors, driver.engine.stats().preemptions
    driver.close()
    assert not errors
    return found, preempted


@pytest.fixture
def counted(monkeypatch):
    """Number of spans of each step that is drawn in the call."""
    steps, draw = [], NativeDecodes.draw
    monkeypatch.setattr(NativeDecodes, "draw", lambda self, spans: steps.append(len(spans)) or draw(self, spans))
    return steps


LOADS = {
    "alone": (DRAWN_HERE[4:5], {}),
    "many": (DRAWN_HERE * 3, {}),
    "beside others": (DRAWN_HERE + NOT_HERE, {}),
    "others": (NOT_HERE, {}),
    "a grammar": (GRAMMAR, {}),
    "branches": (DRAWN_HERE[1:3], dict(n=3)),
    "overlapping": (DRAWN_HERE, dict(overlap=True)),
    "short of pages": (DRAWN_HERE * 2, dict(num_pages=26, gap=0, max_model_len=200, prefix_eviction="lru")),
    "drafts": (DRAWN_HERE, dict(drafter="ngram")),
}


@pytest.mark.parametrize("load", LOADS)
def test_tokens_are_those_of_the_sampler(load, counted, monkeypatch):
    every, options = LOADS[load]
    mine, preempted = outputs(every, **options)
    assert preempted or load != "short of pages"
    assert counted or load in ("others", "a grammar")
    counted.clear()
    monkeypatch.setattr(NativeDecodes, "takes", lambda self, spans: False)
    assert mine == outputs(every, **options)[0] and not counted


def test_more_rows_than_a_call_computes_logits_of(counted, monkeypatch):
    """Slices of three rows are drawn in the call, or by the sampler where some rows report."""
    monkeypatch.setattr(native_decoder, "LOGIT_ROWS", 3)
    for every in (DRAWN_HERE, DRAWN_HERE + NOT_HERE[:1]):
        mine, _ = outputs(every, gap=0)
        assert max(counted) > 3
        with monkeypatch.context() as patch:
            patch.setattr(NativeDecodes, "takes", lambda self, spans: False)
            assert mine == outputs(every, gap=0)[0]


def test_the_host_draws_what_the_call_does_not(counted, monkeypatch):
    """Every third row is left to the host."""
    mine, _ = outputs(DRAWN_HERE)
    drawn, calls = program.Decodes.drawn, []

    def some(self, first, stop):
        calls.append(first)
        tokens = drawn(self, first, stop)
        tokens[::3] = [program.UNDRAWN] * len(tokens[::3])
        return tokens

    monkeypatch.setattr(program.Decodes, "drawn", some)
    assert mine == outputs(DRAWN_HERE)[0] and calls


def test_the_comparison_can_fail(monkeypatch):
    """With the noise of another stream the drawn tokens differ, and the greedy ones do not."""
    mine, _ = outputs(DRAWN_HERE)
    keep = native_decoder.NativeDecoder.keep

    def other(self, kept, num_tokens):
        keep(self, kept, num_tokens)
        self._kept = program.Kept(
            kept.token, kept.temperature, kept.top_k, kept.top_p, kept.min_p, kept.stream.clone(), kept.tables
        )

    monkeypatch.setattr(native_decoder.NativeDecoder, "keep", other)
    wrong = outputs(DRAWN_HERE)[0]
    assert wrong["r0", 0] == mine["r0", 0] and all(wrong[f"r{k}", 0] != mine[f"r{k}", 0] for k in range(1, 6))


def test_a_row_of_nan_fails_alone(monkeypatch):
    """Its request gets the error that it gets in other ways to run a step; the others go on."""
    driver = Driver(batch_invariant=False, max_num_seqs=8)
    reqs = [
        driver.request(f"r{k}", [300 + k, 301, 302], max_tokens=20, temperature=k % 2, seed=k, ignore_eos=True)
        for k in range(3)
    ]
    for request in reqs:
        driver.submit(request)
    for _ in range(4):
        driver.step()
    runner = driver.engine.runner
    seq = next(s for s in driver.engine.scheduler.running if s.request.id == "r1")
    for cache in runner.parts.caches:
        cache.planes["v"][seq.tables[0][0]] = torch.nan
    for _ in range(40):
        driver.step()
    assert set(driver.errors) == {"r1"} and driver.errors["r1"].code == "internal_numeric_error"
    assert [len(driver.outputs[f"r{k}", 0].tokens) for k in (0, 2)] == [20, 20]
    driver.close()
