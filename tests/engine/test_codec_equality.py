"""Lossy codecs lose precision at the write and nowhere else: they give the same tokens for any chunk size, batch,
prefix hit, preemption and pool, since a token's K/V is what the codec returns from the step that produces it (the
round-trip rule).

CPU exact mode on nano; poison and invariant checks are on. The reference runs every request alone, in one
chunk, in a roomy pool.
"""

from __future__ import annotations

import pytest

from kvasir.kv.codec import Codec
from kvasir.technique import load
from tests.engine.driver import Driver
from tests.engine.test_equality import requests
from tests.pairwise import label, pairwise, product

CODECS = ["fp8", "int8", "int4", "int4_bdr", "int4_bdr:order=16,rotate_v=true", "nvfp4", "nvfp4:search=false"]
FACTORS = {
    "codec": CODECS,
    "page": [16, None],  # None: the codec's own size
    "chunk": [1, 7, 64],
    "cache": [True, False],
    "preempt_every": [0, 3],
    "pool": ["roomy", "tight"],
    "temperature": [0.0, 1.0],
    "n": [1, 3],
}
# Values of the pairs. Each codec occurs once; the product has their variants, too, and steps of a single row, which
# take three times as long as those of three (the plain codec's pairs have them: ``test_equality.py``).
ONCE = {"codec": ["fp8", "int8", "int4", "int4_bdr:order=16,rotate_v=true", "nvfp4"], "chunk": [3, 7, 64]}
# Most tokens of a sequence: the longest prompt and its output, and two more.
LENGTH = 80


def references(**options):
    """Tokens of every request run alone, by (codec, temperature, n); computed when first asked for."""
    found = {}

    def get(codec: str, temperature: float, n: int) -> dict:
        key = codec, temperature, n
        if key not in found:
            driver = Driver(
                max_num_batched_tokens=512, max_num_seqs=32, enable_prefix_caching=False, kv_codec=codec, **options
            )
            for request in requests(driver, temperature, n):
                driver.run([request])
            found[key] = {k: (out.tokens, [p.logprob for p in out.logprobs]) for k, out in driver.outputs.items()}
            driver.close()
        return found[key]

    return get


@pytest.fixture(scope="module")
def reference():
    return references()


def run_case(case: dict, reference, **options) -> None:
    # A tight pool holds the longest of six requests and one more page, so nearly every page is used again.
    size = case["page"] or load("kvasir.kv.codecs", case["codec"], Codec).page_slots
    num_pages = 256 if case["pool"] == "roomy" else -(-LENGTH // size) + 2
    driver = Driver(
        max_num_batched_tokens=case["chunk"],
        max_num_seqs=4,
        enable_prefix_caching=case["cache"],
        num_pages=num_pages,
        max_model_len=LENGTH,
        kv_codec=case["codec"],
        page_slots=case["page"],
        **options,
    )
    assert driver.engine.runner.pool.page_slots == size
    if case["cache"]:
        driver.run(requests(driver, 0.0, 1, tag="warm"))
    driver.run(requests(driver, case["temperature"], case["n"]), preempt_every=case["preempt_every"])
    assert not driver.errors
    for key, (tokens, logprobs) in reference(case["codec"], case["temperature"], case["n"]).items():
        assert driver.outputs[key].tokens == tokens, (key, case)
        assert [p.logprob for p in driver.outputs[key].logprobs] == logprobs, "not one bit may differ"
    driver.close()


@pytest.mark.parametrize("case", pairwise(FACTORS | ONCE), ids=label)
def test_same_tokens(case, reference):
    run_case(case, reference)


@pytest.mark.slow
@pytest.mark.parametrize("case", product(FACTORS), ids=label)
def test_same_tokens_full_product(case, reference):
    run_case(case, reference)


def test_codecs_differ_and_so_do_their_prefix_keys(reference):
    """Negative control: what a codec loses shows in the log-probabilities, so no codec reads the pages of another."""
    seen = {codec: str(reference(codec, 0.0, 1)) for codec in ("plain", *CODECS)}
    assert len(set(seen.values())) == len(seen)
    drivers = [Driver(kv_codec=codec) for codec in ("plain", *CODECS)]
    assert len({d.engine.pages.index.root for d in drivers}) == len(drivers)
    for driver in drivers:
        driver.close()
