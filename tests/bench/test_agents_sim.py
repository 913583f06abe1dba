"""Simulated agents: the cache collapses in a small pool and not in a large one, and no run beats Belady's bound."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from kvasir.bench import agents_sim
from kvasir.bench.agents_load import AgentLoad, pages_needed
from kvasir.bench.agents_sim import Simulation, run_once, simulate
from kvasir.config import EngineConfig
from kvasir.engine.pages.visits import Visits
from kvasir.engine.schedule.step_time import StepShape
from kvasir.errors import ConfigError
from kvasir_lab.bench.steps import TERMS
from tests.bench.test_result import check

LOAD = AgentLoad("s", sessions=24, turns=8, system=128, task=256, result=640, output=12, pause=0.2, forks=0.1)
CONFIG = EngineConfig.of(page_slots=16, max_num_seqs=32, prefix_eviction="lru")
KEEP = CONFIG.replace(prefix_eviction="expected_loss")


@pytest.fixture(scope="module")
def needed():
    return pages_needed(LOAD.draw(1), 16)


@pytest.fixture(scope="module")
def small(needed):
    return run_once(LOAD.draw(1), LOAD, CONFIG, needed // 3)


@pytest.fixture(scope="module")
def large(needed):
    return run_once(LOAD.draw(1), LOAD, CONFIG, 2 * needed)


def test_a_small_pool_collapses_and_a_large_one_does_not(small, large):
    assert large["cached_share"] == large["unlimited_share"] > 0.75
    assert small["cached_share"] < 0.65 * large["cached_share"]
    assert small["ttft_ms_p99"] > 2 * large["ttft_ms_p99"] and small["turns_s"] < 0.8 * large["turns_s"]
    assert small["failed"] == small["short"] == 0 and small["turns"] == large["turns"]


def test_what_comes_back_is_kept(needed, small, large):
    kept = run_once(LOAD.draw(1), LOAD, KEEP, needed // 3)
    assert kept["cached_share"] > 1.15 * small["cached_share"] and kept["turns_s"] > 1.05 * small["turns_s"]
    assert run_once(LOAD.draw(1), LOAD, KEEP, 2 * needed) == large, "with room for all nothing changes"


def test_what_waits_in_the_queue_is_kept_for_it(needed, monkeypatch):
    """So few rows that prompts wait longer than any tool took.

    Mutation: nobody asks for what a waiting request has found, so it is taken for a prefix that nobody comes back to.
    """
    load = dataclasses.replace(LOAD, sessions=32)
    config = KEEP.replace(max_num_batched_tokens=256)
    pages = pages_needed(load.draw(1), 16) // 3
    kept = run_once(load.draw(1), load, config, pages)
    monkeypatch.setattr(Visits, "ask", lambda visits, seq: None)
    lost = run_once(load.draw(1), load, config, pages)
    assert kept["cached_share"] > 1.1 * lost["cached_share"], (kept["cached_share"], lost["cached_share"])


def test_prompts_that_nobody_repeats_run_as_before():
    load = AgentLoad("once", sessions=60, turns=1, system=64, task=600, output=12, pause=2.0)
    pages = pages_needed(load.draw(1), 16) // 4
    assert run_once(load.draw(1), load, KEEP, pages) == run_once(load.draw(1), load, CONFIG, pages)


def test_the_bound_lies_between_the_run_and_an_unlimited_cache(small, large):
    assert small["cached_share"] < small["belady_share"] < small["unlimited_share"]
    assert large["belady_share"] == large["unlimited_share"]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("policy", ["fcfs", "shortest"])
@pytest.mark.parametrize("eviction", ["lru", "expected_loss"])
def test_no_run_beats_the_bound(seed, policy, eviction):
    load = dataclasses.replace(LOAD, sessions=6, turns=5, result=200, forks=0.3, seed=seed)
    sessions = load.draw(1)
    config = CONFIG.replace(
        prefix_eviction=eviction, scheduling_policy=policy, max_num_seqs=4 + seed, max_num_batched_tokens=128 << seed
    )
    needed = pages_needed(sessions, 16)
    for part in (0.3, 0.5, 0.8, 1.2):
        simulation = Simulation(load, sessions, config, int(part * needed))
        cached = sum(one.reply.cached for one in simulation.run("x"))
        assert cached <= simulation.bound(), (part, cached)
        simulation.scheduler.check()


def test_the_same_load_gives_the_same_result(small, needed):
    assert run_once(LOAD.draw(1), LOAD, CONFIG, needed // 3) == small
    assert run_once(LOAD.draw(2), LOAD, CONFIG, needed // 3) != small


def test_sub_agents_start_when_their_turn_is_answered_and_the_session_waits_for_them(needed):
    load = dataclasses.replace(LOAD, forks=0.5, sessions=3)
    asked = Simulation(load, load.draw(1), CONFIG, 2 * needed).run("x")
    by = {(one.session.name, one.turn): one.reply for one in asked}
    forks = 0
    for one in asked:
        after = by.get((one.session.name, one.turn + 1))
        if after is not None:
            ends = [by[agent.name, len(agent.prompts) - 1] for agent in one.session.agents.get(one.turn, [])]
            forks += bool(ends)
            began = max(r.ended for r in [one.reply, *ends])
            assert after.due == pytest.approx(began + one.session.pauses[one.turn + 1])
    assert forks
    assert len(asked) == len(by) and all(r.events[0] > r.due and r.ended == r.events[-1] for r in by.values())


def test_no_turn_starts_after_the_time_of_the_load(large):
    load = dataclasses.replace(LOAD, seconds=large["seconds"] / 2)
    simulation = Simulation(load, load.draw(1), CONFIG, 10_000)
    asked = simulation.run("x")
    assert 0 < len(asked) < large["turns"] and max(one.reply.due for one in asked) < load.seconds
    assert all(one.good for one in asked)


def test_a_pool_smaller_than_one_prompt_is_refused():
    with pytest.raises(ConfigError, match="raise --num-pages"):
        Simulation(LOAD, LOAD.draw(1), CONFIG, 20)


def test_step_times_are_those_that_were_fitted():
    stored = Path(__file__).parents[2] / "bench/results/h200/steps-llama-8b.json"
    terms = json.loads(stored.read_text())["arms"][0]["metrics"]
    units = dict(TERMS)
    for name, known in (("decode_terms", agents_sim.DECODES), ("prompt_terms", agents_sim.PROMPTS)):
        assert known == pytest.approx([value / units[term] for term, value in terms[name].items()])
    model = agents_sim.step_times()
    assert list(model.coefficients(graph=True)) == pytest.approx(agents_sim.DECODES)
    shape = StepShape.of([(4096, 2048), (1000, 1)])
    expected = sum(c * x for c, x in zip(agents_sim.PROMPTS, (1, 2049, 2048 * (4096 + 1024), 1000, 2)))
    assert model.predict(shape) == pytest.approx(expected)


def test_the_result_has_the_arms_and_an_unlimited_pool():
    load = dataclasses.replace(LOAD, sessions=6, turns=5)
    kept = []
    plain = {"page_slots": 16, "prefix_eviction": "lru"}
    arms = {"kvasir": plain, "shortest": plain | {"scheduling_policy": "shortest"}}
    found = simulate({"s": load}, arms, name="agents-x", keep=kept.append)
    check(found)
    assert [a["name"] for a in found["arms"]] == ["kvasir", "unlimited", "shortest"]
    assert len(kept) == 3 and found["ratios"]["s.cached_share kvasir/unlimited"] < 1
    assert {"s.turns_s shortest/kvasir", "s.turns_s shortest/unlimited"} <= set(found["ratios"])
    for entry in found["arms"]:
        share = entry["metrics"]["s.cached_share"]
        assert share <= entry["metrics"]["s.belady_share"] <= entry["metrics"]["s.unlimited_share"]
        assert (share == entry["metrics"]["s.unlimited_share"]) == (entry["name"] == "unlimited")
    assert found["arms"][0]["metrics"]["s.cache_tokens"] == pytest.approx(
        found["arms"][0]["metrics"]["s.needed_tokens"] / 3, abs=16
    )
    with pytest.raises(ConfigError, match="named like the run"):
        simulate({"s": load}, {"unlimited": {}}, name="x")
