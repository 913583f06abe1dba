"""A request with a seed gives the same tokens whatever the chunk size, cache, pool, batch or arrivals.

CPU exact mode on nano, at T = 0 and T = 1. The reference runs every request alone, in one chunk, in a
large pool, without a cache. Poison and invariant checks are on in every run.
"""

from __future__ import annotations

import pytest

from tests.engine.driver import Driver
from tests.pairwise import label, pairwise, product

FACTORS = {
    "chunk": [1, 7, 64],
    "cache": [True, False],
    "warm": [False, True],
    "preempt_every": [0, 3],
    "pool": ["roomy", "tight"],
    "gap": [0, 2, 9],
    "seqs": [1, 4, 32],
    "temperature": [0.0, 1.0],
    "n": [1, 3],
    "overlap": [True, False],
    "static": [True, False],  # decode steps over the static buffers that a GPU captures
    "logprobs": [None, 0],  # with them, the sampler draws; without, the step itself
}
LENGTHS = [5, 16, 33, 48, 68]
OUTPUT = 10


def prompts(vocab: int) -> list[list[int]]:
    """Prompts with shared beginnings, some at page borders, of ordinary token ids."""
    shared = [300 + (7 * i) % (vocab - 400) for i in range(100)]
    return [shared[: length - 2] + [300 + k, 301 + 2 * k] for k, length in enumerate(LENGTHS)]


def requests(driver: Driver, temperature: float, n: int, tag: str = "r", logprobs: int | None = 0):
    return [
        driver.request(
            f"{tag}{k}",
            p,
            temperature=temperature,
            max_tokens=OUTPUT,
            ignore_eos=True,
            seed=100 + k,
            n=n,
            logprobs=logprobs,
        )
        for k, p in enumerate(prompts(driver.engine.info.tokenizer_size))
    ]


@pytest.fixture(scope="module")
def reference():
    """(temperature, n) -> the tokens of every request run alone."""
    found = {}
    for temperature in (0.0, 1.0):
        for n in (1, 3):
            driver = Driver(max_num_batched_tokens=512, max_num_seqs=32, enable_prefix_caching=False, overlap=False)
            for request in requests(driver, temperature, n):
                driver.run([request])
            found[temperature, n] = {
                key: (out.tokens, [p.logprob for p in out.logprobs]) for key, out in driver.outputs.items()
            }
            driver.close()
    return found


def run_case(case: dict, reference) -> None:
    # A tight pool holds the longest request and little more: pages are evicted at nearly every step.
    num_pages = 256 if case["pool"] == "roomy" else (max(LENGTHS) + OUTPUT) // 16 + 4
    driver = Driver(
        max_num_batched_tokens=case["chunk"],
        max_num_seqs=case["seqs"],
        enable_prefix_caching=case["cache"],
        num_pages=num_pages,
        max_model_len=112,
        overlap=case["overlap"],
        static=case["static"],
    )
    if case["warm"]:
        driver.run(requests(driver, 0.0, 1, tag="warm"))
    before = len(driver.outputs)
    driver.run(
        requests(driver, case["temperature"], case["n"], logprobs=case["logprobs"]),
        gap=case["gap"],
        preempt_every=case["preempt_every"],
    )
    assert not driver.errors
    assert len(driver.outputs) - before == len(LENGTHS) * case["n"]
    for key, (tokens, logprobs) in reference[case["temperature"], case["n"]].items():
        out = driver.outputs[key]
        assert out.tokens == tokens, (key, case)
        assert [p.logprob for p in out.logprobs] == (logprobs if case["logprobs"] == 0 else []), (
            "not one bit may differ"
        )
    if case["warm"] and case["cache"] and case["pool"] == "roomy":
        assert any(out.num_cached for key, out in driver.outputs.items() if not key[0].startswith("warm"))
    driver.close()


@pytest.mark.parametrize("case", pairwise(FACTORS), ids=label)
def test_same_tokens(case, reference):
    run_case(case, reference)


CORE = ("chunk", "cache", "preempt_every", "pool", "temperature", "n")


@pytest.mark.slow
@pytest.mark.parametrize("place, case", list(enumerate(product({name: FACTORS[name] for name in CORE}))), ids=str)
def test_same_tokens_full_product(place, case, reference):
    """All combinations of the factors that touch the cache; the other factors take turns."""
    run_case(
        case | {name: values[place % len(values)] for name, values in FACTORS.items() if name not in CORE}, reference
    )


def test_batch_of_32_equals_one_by_one():
    def tokens(gap: int) -> dict:
        driver = Driver(max_num_seqs=32)
        reqs = [
            driver.request(
                f"b{i}",
                [300 + (i * 13 + j * 5) % 900 for j in range(3 + i)],
                temperature=1.0,
                seed=i,
                max_tokens=8,
                ignore_eos=True,
            )
            for i in range(32)
        ]
        driver.run(reqs, gap=gap)
        driver.close()
        return {key: out.tokens for key, out in driver.outputs.items()}

    assert tokens(0) == tokens(3) == tokens(1000)


def test_the_seed_and_the_branch_matter():
    """Negative control: with another seed, or for another branch, the tokens do differ."""
    driver = Driver()
    prompt = prompts(driver.engine.info.tokenizer_size)[3]
    driver.run(
        [
            driver.request("a", prompt, temperature=1.0, seed=1, max_tokens=24, n=2, ignore_eos=True),
            driver.request("b", prompt, temperature=1.0, seed=2, max_tokens=24, ignore_eos=True),
        ]
    )
    a0, a1, b0 = (driver.outputs[key].tokens for key in (("a", 0), ("a", 1), ("b", 0)))
    assert a0 != a1 and a0 != b0
    driver.close()
