"""Every family through the whole engine, compared with ``transformers``: greedy tokens, and log-probabilities of prompt
and output.

Prompts run whole, in small chunks, and after a prefix hit, and are long enough that every window has slid.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests import checkpoints
from tests.engine.driver import Driver, Output

PAGE = 4
PROMPT = 41
LONG = 80  # several times every window
OUTPUT = 24  # every window of the checkpoints is shorter than the prompt, and slides on through the output
CLOSE = 1e-3


def prompts() -> list[list[int]]:
    """Three prompts; the last two share all but their last tokens with the first."""
    ids = torch.randint(1, checkpoints.VOCAB, (PROMPT,), generator=torch.Generator().manual_seed(5)).tolist()
    return [ids, ids[:-3] + [7, 8, 9], ids[:23] + [11, 12]]


def greedy(model, prompt: list[int]) -> list[int]:
    out = model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=OUTPUT, eos_token_id=None, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


def log_softmax(model, ids: list[int]) -> torch.Tensor:
    """[len(ids), V]: row i is the distribution of the token after ids[i]."""
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


def assert_logprobs(entries, ids: list[int], table: torch.Tensor) -> None:
    """Assert that each entry holds its token's log-probability and rank and the likeliest alternatives of the table."""
    assert len(entries) == len(ids)
    for entry, token, row in zip(entries, ids, table):
        assert entry.id == token and abs(entry.logprob - row[token].item()) < CLOSE
        assert (row > row[token] + CLOSE).sum() < entry.rank <= (row > row[token] - CLOSE).sum()
        best = row.topk(3).values.tolist()
        assert [p for _, p in entry.top] == pytest.approx(best, abs=CLOSE)
        assert all(abs(row[t].item() - p) < CLOSE for t, p in entry.top)


def serve(driver: Driver, name: str, prompt: list[int], **params) -> Output:
    driver.run([driver.request(name, prompt, temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, **params)])
    assert not driver.errors
    return driver.outputs[name, 0]


HYBRIDS = ("qwen3_5", "qwen3_next", "kimi_linear")
# Parity covers Kimi Linear's mixer in the suite of every commit; the engine's part is that of the other hybrids.
SERVED = [
    pytest.param(v, marks=pytest.mark.slow) if v == "kimi_linear" else v
    for v in checkpoints.VARIANTS
    if v not in checkpoints.TWINS
]


def options(folder: str) -> dict[str, int]:
    """Let a hybrid keep a snapshot at the end of every page, so that it has the hits of others."""
    family = json.loads(Path(folder, "config.json").read_text())["model_type"]
    return {"state_interval": PAGE} if family.startswith(HYBRIDS) else {}


class Served(NamedTuple):
    """One variant: its folder, the reference model, the reference's answers to the prompts, and its place in SERVED."""

    folder: str
    model: Any
    wanted: list[list[int]]
    place: int


@pytest.fixture(scope="module", params=SERVED)
def served(request, tmp_path_factory) -> Served:
    folder = checkpoints.write(tmp_path_factory.mktemp("model"), request.param)
    model = checkpoints.reference(folder)
    model.generation_config.eos_token_id = None
    return Served(str(folder), model, [greedy(model, p) for p in prompts()], request.param_index)


# Rows of a step, and whether the mode is exact. Families take turns: each has one for tokens and the opposite one for
# log-probabilities, so that every pair of family, rows, mode and test occurs. `make test-all` runs the product.
WAYS = [(7, True), (7, False), (256, False), (256, True)]


def test_tokens_and_prefix_hits(served):
    check_tokens(served, *WAYS[served.place % 4])


def test_log_probabilities(served):
    check_log_probabilities(served, *WAYS[(served.place + 2) % 4])


@pytest.mark.slow
@pytest.mark.parametrize("check", ["tokens", "log-probabilities"])
@pytest.mark.parametrize("rows, exact", WAYS)
def test_every_way(served, rows, exact, check):
    (check_tokens if check == "tokens" else check_log_probabilities)(served, rows, exact)


def check_tokens(served, rows, exact):
    folder, _, wanted, _ = served
    given = dict(page_slots=PAGE, max_num_batched_tokens=rows, max_model_len=128, batch_invariant=exact)
    driver = Driver(folder, **given, **options(folder))
    outputs = [serve(driver, f"p{i}", p) for i, p in enumerate(prompts())]
    again = serve(driver, "again", prompts()[0])
    assert [o.tokens for o in outputs] == wanted and again.tokens == wanted[0]
    assert [o.num_cached for o in outputs] == [0, 36, 20] and again.num_cached == 40, (
        "whole pages of the shared beginning"
    )
    driver.close()


def check_log_probabilities(served, rows, exact):
    folder, model, wanted, _ = served
    given = dict(page_slots=PAGE, max_num_batched_tokens=rows, max_model_len=128, batch_invariant=exact)
    driver = Driver(folder, **given, **options(folder))
    serve(driver, "warm", prompts()[1])
    for name, cached in (("scored", 0), ("hit", 40)):
        # A prompt that is scored is computed; the same one without scores is a hit.
        out = serve(driver, name, prompts()[0], logprobs=3, prompt_logprobs=None if cached else 3)
        assert (out.num_cached, out.tokens) == (cached, wanted[0])
        table = log_softmax(model, prompts()[0] + out.tokens)
        assert_logprobs(out.logprobs, out.tokens, table[PROMPT - 1 :])
        if not cached:
            assert out.prompt_logprobs[0] is None
            assert_logprobs(out.prompt_logprobs[1:], prompts()[0][1:], table)
        else:
            assert out.prompt_logprobs is None
    driver.close()


def test_all_at_once(served):
    """The three prompts in one batch, staggered and with preemptions, still give the reference's tokens."""
    folder, _, wanted, _ = served
    driver = Driver(folder, page_slots=PAGE, max_num_batched_tokens=16, max_model_len=128, max_num_seqs=4)
    driver.run(
        [
            driver.request(f"p{i}", p, temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
            for i, p in enumerate(prompts())
        ],
        gap=2,
        preempt_every=5,
    )
    assert [driver.outputs[f"p{i}", 0].tokens for i in range(3)] == wanted
    driver.close()


@pytest.mark.parametrize(
    "variant", [v for v, (_, _, quirks) in checkpoints.VARIANTS.items() if quirks.get("sliding_window")]
)
def test_window_groups_let_go_of_pages(variant, tmp_path):
    """During a long generation a window group holds no more pages than its window and one step's rows need."""
    driver = Driver(
        str(checkpoints.write(tmp_path, variant)), page_slots=PAGE, max_num_batched_tokens=16, max_model_len=128
    )
    driver.submit(driver.request("long", prompts()[0], temperature=0.0, max_tokens=LONG, ignore_eos=True))
    pools, most = driver.engine.pages.pools, {}
    while driver.engine.has_work():
        driver.step()
        for pool in pools:
            most[pool.group] = max(most.get(pool.group, 0), sum(count > 0 for count in pool.refs))
    assert len(driver.outputs["long", 0].tokens) == LONG
    windows = [pool for pool in pools if pool.window is not None]
    assert windows
    for pool in pools:
        if pool.window is None:
            assert most[pool.group] == -(-(PROMPT + LONG - 1) // PAGE)
        else:
            assert most[pool.group] <= -(-(pool.window + 16) // PAGE) + 1
    driver.assert_clean()
    driver.close()
