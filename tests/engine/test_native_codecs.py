"""Quantised caches through the native step of a CPU: the round-trip rule bit by bit, and the tokens of the plain path.

A row's bits depend on itself and on the way its products are made. With one way for all steps (no matrix tiles) chunks,
batches, prefix hits, preemption, drafts and restarts change nothing, not one bit, as in exact mode. Poison and
invariant checks are on.
"""

from __future__ import annotations

import random

import pytest

from kvasir.kernels.native.library import native
from kvasir.models.native_decoder import Decoder, NativeDecoder
from tests.engine.driver import Driver
from tests.engine.test_codec_equality import FACTORS, references, run_case
from tests.pairwise import label, pairwise, product
from tests.speculation import helpers

pytestmark = pytest.mark.skipif(
    native().library is None or native().library.kvasir_lanes() < 8, reason="steps of any size need wide vectors"
)
CODECS = ["fp8", "int8", "int4", "int4_bdr", "int4_bdr:order=16,rotate_v=true", "int4_bdr:signs=false"]
CASES = FACTORS | {"codec": CODECS}


@pytest.fixture
def one_way(monkeypatch):
    """Every step is native, and makes products in the same way."""
    build = NativeDecoder._build

    def untiled(self, library):
        program = build(self, library)
        program.tiles = 0
        return program

    monkeypatch.setattr(NativeDecoder, "_build", untiled)
    monkeypatch.setattr(Decoder, "forward", lambda *args, **options: pytest.fail("a step of the plain path"))


@pytest.fixture(scope="module")
def reference():
    return references(batch_invariant=False)


@pytest.mark.parametrize("case", pairwise(CASES), ids=label)
def test_same_tokens(case, reference, one_way):
    run_case(case, reference, batch_invariant=False)


@pytest.mark.slow
@pytest.mark.parametrize("case", product(CASES), ids=label)
def test_same_tokens_full_product(case, reference, one_way):
    run_case(case, reference, batch_invariant=False)


@pytest.mark.parametrize("codec", ["fp8", "int8", "int4_bdr:rotate_v=true"])
def test_draft_trees(codec, one_way):
    """Decoys before, beside and below the right tokens: accepted slots move, codes and scales, within a page and
    across."""
    native_steps = dict(batch_invariant=False, kv_codec=codec, page_slots=None, num_pages=24)
    alone = helpers.driver(max_num_batched_tokens=512, enable_prefix_caching=False, **native_steps)
    for request in helpers.requests(alone, 1.0, 2, max_tokens=24):
        alone.run([request])
    expected = helpers.outputs(alone)
    drafted = helpers.driver("replay", max_num_batched_tokens=40, max_num_seqs=4, **native_steps)
    helpers.install(drafted, helpers.Hostile({key: tokens for key, (tokens, _) in expected.items()}))
    drafted.run(helpers.requests(drafted, 1.0, 2, max_tokens=24), preempt_every=5)
    assert helpers.outputs(drafted) == expected and drafted.engine.stats().accepted_tokens > 20
    for driver in (alone, drafted):
        driver.close()


@pytest.mark.parametrize("seed", range(3))
def test_random_loads_under_pressure(seed, one_way):
    """Requests of random lengths at random times, with tokens for a third of them: every output is that of the request
    alone."""
    rng = random.Random(seed)
    codec, rows = rng.choice(CODECS), rng.choice([5, 24, 200])
    given = [
        (
            [300 + (13 * i + 5 * rng.randint(0, 2)) % 1500 for i in range(rng.randint(1, 90))],
            dict(max_tokens=rng.randint(1, 20), seed=k, temperature=k % 2, ignore_eos=True, logprobs=0),
        )
        for k in range(12)
    ]

    def run(together, **options):
        driver = Driver(batch_invariant=False, kv_codec=codec, max_model_len=112, **options)
        requests = [driver.request(f"r{k}", prompt, **params) for k, (prompt, params) in enumerate(given)]
        if together:
            driver.run(requests, gap=1, preempt_every=rng.choice([0, 5]))
        else:
            for request in requests:
                driver.run([request])
        found, preempted = helpers.outputs(driver), driver.engine.scheduler.preemptions
        driver.close()
        return found, preempted

    expected, _ = run(False, enable_prefix_caching=False)
    # With eviction by recency nobody waits for the sake of the cache, so pages run out.
    found, preempted = run(True, max_num_batched_tokens=rows, max_num_seqs=6, num_pages=9, prefix_eviction="lru")
    assert found == expected and preempted


def test_a_changed_code_shows(reference, one_way, monkeypatch):
    """Negative control: rows whose rotation depends on the step that writes them are not those of the request alone."""
    case = {name: values[0] for name, values in CASES.items()} | {"codec": "int4_bdr", "chunk": 7}
    logits = NativeDecoder.logits

    def unsteady(self, batch):
        if len(batch.positions) > 1:
            self._caches[0].codec.rotation("k", 64).factors_D.mul_(1 + 1e-3 * len(batch.positions))
        return logits(self, batch)

    reference("int4_bdr", 0.0, 1)
    monkeypatch.setattr(NativeDecoder, "logits", unsteady)
    with pytest.raises(AssertionError):
        run_case(case, reference, batch_invariant=False)
