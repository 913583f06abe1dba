"""Steps with forced chains in decode graphs, on servers without a drafter: they cost nothing before the first chain."""

from __future__ import annotations

from collections import Counter

import pytest

from kvasir.decoding.sampler import StepOutput
from kvasir.engine.start.build import ways_to_run
from kvasir.engine.ways.capture import call_through
from kvasir.engine.ways.chain_graphs import MAX_CHAIN, MAX_ROWS, ChainGraphs
from kvasir.engine.ways.graph_buckets import SHARED_ROWS
from kvasir.engine.ways.graphs import DecodeGraphs
from tests.engine.driver import Driver
from tests.engine.stepwise import Stepwise
from tests.engine.test_draft_graphs import FORMS, use_graphs
from tests.engine.test_forced import KINDS, by_share, fleet, outcome


def forced(**given) -> Driver:
    driver = by_share(Driver(overlap=True, **given))
    driver.backend = use_graphs(driver, 0)
    return driver


@pytest.fixture(scope="module")
def plain():
    driver = Driver(overlap=False)
    driver.engine.proposals.forcing.wanted = lambda drafting: False
    driver.run(list(fleet(driver)))
    return outcome(driver)


def count_ways(driver: Driver) -> Counter:
    """Count the steps with chains and nothing but decodes that each way runs."""
    ran: Counter = Counter()
    for way in driver.engine.runner.ways:

        def run(spans, way=way, run=way.run):
            chains = any(span.seq.num_forced for span in spans)
            if chains and all(len(span.want.get("sample", ())) == span.length for span in spans):
                ran[type(way)] += 1
            return run(spans)

        way.run = run
    return ran


@pytest.mark.parametrize("preempt_every", [0, 4])
def test_chains_run_in_graphs_and_change_no_token(preempt_every, plain):
    driver = forced()
    ran = count_ways(driver)
    driver.run(list(fleet(driver)), preempt_every=preempt_every)
    assert outcome(driver) == plain
    assert ran[ChainGraphs] >= 2 and set(ran) == {ChainGraphs}  # how many depends on measured times
    seen = {most for most, _ in driver.backend.seen}  # a slow machine may launch long chains alone
    assert seen and seen <= set(FORMS), "rows of a chain share the keys they read"
    stats = driver.engine.stats()
    assert stats.forced_tokens > 0.3 * stats.generation_tokens
    driver.close()


def test_without_a_way_for_chains_the_check_fails(plain):
    """Negative control: without their graphs, steps with chains are launched in another way."""
    driver = forced()
    runner = driver.engine.runner
    runner.use([way for way in runner.ways if not isinstance(way, ChainGraphs)])
    ran = count_ways(driver)
    driver.run(list(fleet(driver)))
    assert outcome(driver) == plain and ran and ChainGraphs not in ran
    driver.close()


def test_servers_without_grammars_pay_nothing():
    driver = forced(max_num_seqs=16)  # few buckets of decodes, and those of chains up to the most rows and beyond
    way = driver.engine.runner.chains
    driver.run([driver.request(f"r{i}", [300 + i] * i, max_tokens=12, seed=i) for i in range(9, 12)])
    for _ in range(99):
        driver.engine.runner.capture_next()
    assert "_buffers" not in vars(way) and way.captures == 0 and way.measure() == (0, 0)
    driver.run(list(fleet(driver, KINDS[:1])))
    assert "_buffers" in vars(way)
    for _ in range(99):
        driver.engine.runner.capture_next()
    keys = {key for key in way._ready if key.size & (key.size - 1) == 0}
    assert {key.size for key in keys} >= {size for size in way.choice.drafted if size in (2, 4, 8, 16, 32, 64)}
    assert {key.output for key in way._ready} == {StepOutput.HIDDEN} and max(way._ready).size <= MAX_ROWS
    driver.close()


def test_a_failed_capture_leaves_decodes_their_graphs(plain):
    driver = forced()
    runner = driver.engine.runner

    def fail(work):
        raise MemoryError("no memory for this graph")

    runner.chains._capture = fail
    driver.run(list(fleet(driver)))
    runner.chains.capture_next()
    assert outcome(driver) == plain
    assert runner.chains._capture is None and runner.chains.captures == 0 and runner.graphs._capture is not None
    driver.close()


@pytest.mark.parametrize("max_seqs, most", [(4, 4 * (1 + MAX_CHAIN)), (16, 16 * (1 + MAX_CHAIN)), (128, SHARED_ROWS)])
def test_buckets_are_those_that_a_drafter_would_get(max_seqs, most):
    driver = Driver(max_num_seqs=max_seqs)
    use_graphs(driver, 0)
    runner = driver.engine.runner
    assert runner.chains.most_drafted == runner.chains.buckets[-1] == most
    assert runner.graphs.buckets[-1] == max_seqs and driver.engine.proposals.forcing.most_rows == min(most, MAX_ROWS)
    kinds = [type(way) for way in ways_to_run(runner.parts, call_through, 4, Stepwise(), 64)]
    assert DecodeGraphs in kinds and ChainGraphs not in kinds, "a drafter's graphs take chains, too"
    driver.close()


def test_chains_are_cut_to_the_largest_bucket(plain):
    """A chain that is cut goes on in the next step: no step leaves the graphs, and no token changes."""
    driver = forced()
    way = driver.engine.runner.chains
    way.most_drafted = way.choice.most_drafted = 14
    ran = count_ways(driver)
    driver.run(list(fleet(driver, KINDS[:6])))
    assert outcome(driver) == {key: plain[key] for key in driver.outputs} and set(ran) == {ChainGraphs}
    assert max(sum(lengths) for _, lengths in driver.backend.seen) <= 16, "rows of the bucket that holds 14"
    driver.close()
