"""Pools: replies dealt without replacement, costs like an engine's, and the answers of a live run."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from kvasir.errors import ConfigError
from kvasir.scaling.endpoint import Prompt, Sampling
from kvasir.scaling.pool import Pool, PoolEndpoint, fill, key_of, ranked_right
from kvasir.scaling.solve import solve
from kvasir.scaling.strategy import load_strategy
from tests.scaling.tabular import Tabular, answer, problem, table

SAMPLING = Sampling(max_tokens=12)
PROBLEMS = [problem(f"p{i}", f"solve {i}") for i in range(6)]


@pytest.fixture(scope="module")
def pool() -> Pool:
    source = Tabular("table", table(0.5, pause=0.6), parameters=7)
    return asyncio.run(fill(source, PROBLEMS, 32, SAMPLING, 3))


def run(spec: str, pool: Pool, seed: int = 0):
    return asyncio.run(
        solve(load_strategy(spec), PROBLEMS, [PoolEndpoint(pool, seed)], seed=seed, sampling=SAMPLING)
    ).solved


def dealt(pool: Pool, seed: int, n: int, again: int = 0) -> list:
    """Replies that a fresh endpoint deals for the first problem, call after call."""
    endpoint = PoolEndpoint(pool, seed)

    async def draw():
        draw = endpoint.draw(Prompt(PROBLEMS[0].messages), n, SAMPLING, 0)
        return {c.index: c.whole async for c in draw if c.whole}

    return [s for _ in range(again + 1) for _, s in sorted(asyncio.run(draw()).items())]


def test_all_replies_once_in_an_order_of_the_seed(pool):
    whole = pool.of(PROBLEMS[0])
    first, waves, other = dealt(pool, 1, 32), dealt(pool, 1, 8, again=3), dealt(pool, 2, 32)
    assert (
        first == waves and sorted(s.index for s in first) == list(range(32)) and all(whole[s.index] is s for s in first)
    )
    assert [s.index for s in first] != [s.index for s in other] and dealt(pool, 1, 5) == first[:5]


def test_first_to_end_costs_what_all_had_written_by_then(pool):
    for solved in run("first_finish:n=8", pool):
        chosen, total = solved.result.sample, solved.ledger.total()
        mine = [s for s in pool.of(solved.problem)]
        assert chosen.text in {s.text for s in mine} and total["generated"] == chosen.tokens
        assert total["discarded"] == 7 * chosen.tokens, "in lockstep, nobody runs further, and the others had as many"


def test_whole_replies_keep_what_is_known_of_them(pool):
    for solved in run("best_of_n:n=32,by=lowest", pool):
        best = max((s for s in pool.of(solved.problem) if s.finish == "stop"), key=lambda s: s.lowest)
        assert solved.result.sample.lowest == best.lowest and solved.ledger.total()["generated"] == sum(
            s.tokens for s in pool.of(solved.problem)
        )
        assert solved.ledger.total()["uncached"] == 2 and solved.ledger.total()["flops"] > 0


def test_a_majority_of_all_is_that_of_a_live_run(pool):
    live = asyncio.run(
        solve(
            load_strategy("majority:n=32"),
            PROBLEMS,
            [Tabular("table", table(0.5, pause=0.6))],
            seed=3,
            sampling=SAMPLING,
        )
    ).solved
    assert [s.result.votes for s in run("majority:n=32", pool)] == [
        dict(sorted(s.result.votes.items(), key=lambda kv: 0)) for s in live
    ]


def test_waves_pay_for_the_prompt_once(pool):
    for solved in run("adaptive_consistency:n=16", pool):
        total = solved.ledger.total()
        assert total["uncached"] == 2 + (total["calls"] - 1) and total["cached"] == total["calls"] - 1


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("best_of_n:n=2,by=judge", "other texts"),
        ("rsa:N=4,K=2,T=2", "other texts"),
        ("majority:n=33", "draw a larger one"),
    ],
)
def test_what_cannot_run_says_so(pool, spec, named):
    with pytest.raises(ConfigError, match=named):
        run(spec, pool)


def test_files(pool, tmp_path):
    file, about = tmp_path / "pool.jsonl.gz", {"task": "t", "n": 6}
    pool.save(file, about)
    again = Pool.load(file, about)
    assert run("best_of_n:n=9", again, 5)[0].result.text == run("best_of_n:n=9", pool, 5)[0].result.text
    assert [s.confidence for s in again.of(PROBLEMS[2])] == [
        s.confidence for s in pool.of(PROBLEMS[2])
    ] and again.parameters == 7
    with pytest.raises(ConfigError, match="n differ"):
        Pool.load(file, about | {"n": 7})
    file.write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="no pool"):
        Pool.load(file, about)


def test_ranking_against_every_pair(pool):
    right = [[answer(s.text) == "1" for s in pool.of(p)] for p in PROBLEMS]
    pairs = [
        (g.confidence, b.confidence)
        for p, marks in zip(PROBLEMS, right)
        for (g, x), (b, y) in itertools.product(zip(pool.of(p), marks), repeat=2)
        if x and not y
    ]
    expected = sum((g > b) + 0.5 * (g == b) for g, b in pairs) / len(pairs)
    assert ranked_right(pool, PROBLEMS, right, "confidence") == pytest.approx(expected)
    assert (
        ranked_right(pool, PROBLEMS, [[True] * 32] * 6, "confidence") is None
        and key_of(PROBLEMS[0].messages) in pool.entries
    )
