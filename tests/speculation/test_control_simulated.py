"""The controller's promise on a simulated GPU: never more than 2 % slower than without drafts, and within 5 % of the
best fixed depth.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean

import pytest

from kvasir.engine.drafts import draft_times
from kvasir.speculation.router import Router
from kvasir_lab.bench.drafting_sim import Clock, Coins, Compared, Load, Machine, Simulation, coins, compare, constant

ROOT = Path(__file__).parents[2]
SMALL = dict(machine=Machine(scale=0.1, sync=0.3e-3), shape="qwen3-0.6b")


def misses(found: Compared, cold: float = 0.95, warm: float = 0.95) -> list[str]:
    """Return the broken promises: more than 2 % slower than without drafts, or further than this from the best fixed
    setting where that gains more than 5 %."""
    slow = [f"round {i}: {rate:.3f} of plain" for i, rate in enumerate(found.rounds) if rate < 0.98]
    if found.best > 1.05:
        slow += [
            f"round {i}: {rate / found.best:.3f} of the best fixed"
            for i, rate in enumerate(found.rounds)
            if rate < (warm if i else cold) * found.best
        ]
    return slow


@pytest.mark.parametrize(
    "name",
    [
        "plain 1",
        "fixed4 accept=0.9 1",
        "plain 16",
        "fixed2 accept=0.9 16",
        "plain 64",
        "fixed1 accept=0.5 64",
        "fixed4 accept=0.9 64",
    ],
)
def test_the_machine_is_like_the_one_measured(name):
    stored = json.loads((ROOT / "bench/results/h200/speculation-llama-8b.json").read_text())
    measured = next(a["metrics"]["decode_tok_s"]["median"] for a in stored["arms"] if a["name"] == name)
    kind, *_, batch = name.split()
    size = int(batch)
    chance = float(name.split("accept=")[1].split()[0]) if "accept" in name else 0.0
    simulation = (
        Simulation(size, coins(chance), depth=int(kind[5:]), control="fixed") if chance else Simulation(size, None)
    )
    prompts = Simulation(size, None).run(Load(size, outputs=(1,)))
    assert size * 191 / (simulation.run(Load(size)) - prompts) == pytest.approx(measured, rel=0.12)


@pytest.mark.parametrize(
    "batch, accept, seeds",
    [
        (1, 0.0, 8),
        (1, 0.3, 2),
        (1, 0.7, 2),
        (1, 0.9, 4),
        (8, 0.0, 8),
        (8, 0.5, 1),
        (8, 0.9, 2),
        (16, 0.7, 1),
        (64, 0.0, 2),
        (64, 0.9, 1),
        (256, 0.0, 1),
    ],
)
def test_never_slower_and_near_the_best_from_the_first_token_on(batch, accept, seeds):
    """Run workloads of 192 tokens, once from a fresh start and once more."""
    for seed in range(seeds):
        found = compare(
            Load(batch),
            coins(accept, seed=seed),
            seed=seed,
            depths=(1, 2, 4, 8) if accept and batch < 64 else (4, 8) if accept else (),
        )
        assert not misses(found, cold=0.94), (seed, found)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("accept", [0.0, 0.3, 0.5, 0.7, 0.9])
def test_at_every_batch(batch, accept):
    """Means over seeds keep the promise; a single seed may miss it.

    Where drafting gains a few per cent, sequences that end at different times cost some of it, and a few unlucky
    proposals at the start are believed."""
    found = [
        compare(Load(batch), coins(accept, seed=seed), seed=seed, depths=(1, 2, 4, 8) if accept else ())
        for seed in range(8 if batch < 16 else 2)
    ]
    mean = Compared(
        [fmean(f.rounds[i] for f in found) for i in range(2)],
        {k: fmean(f.fixed[k] for f in found) for k in found[0].fixed},
    )
    assert not misses(mean, cold=0.93), mean


@pytest.mark.parametrize("boast", [0.2, 0.75], ids=["humble", "boasting"])
def test_whatever_a_drafter_says_of_itself(boast):
    for batch, accept in ((1, 0.0), (1, 0.9), (8, 0.0), (8, 0.3), (8, 0.9), (64, 0.0)):
        found = compare(Load(batch), coins(accept, boast=boast), depths=(2, 8) if accept else ())
        assert not misses(found, cold=0.9), (batch, accept, found)


@pytest.mark.parametrize("batch", [1, 8])
def test_graphs_that_are_captured_on_the_way(batch):
    """A drafter whose capture costs some hundred steps' drafts at first, and nothing later."""
    for accept in (0.0, 0.7):
        found = compare(Load(batch), coins(accept), ready=False, depths=(4, 8) if accept else ())
        assert not misses(found, cold=0.84), (accept, found)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("first, then", [(0.9, 0.0), (0.0, 0.9)], ids=["gets worse", "gets better"])
def test_acceptance_that_changes(batch, first, then):
    def accept(sequence: int, token: int) -> float:
        return first if sequence < 2 * batch else then

    found = compare(Load(batch, count=4 * batch, outputs=(256,)), coins(accept, boast=0.6), rounds=1, depths=(2, 8))
    assert not misses(found), found


@pytest.mark.parametrize("accept", [0.0, 0.7])
def test_requests_that_come_and_go(accept):
    load = Load(8, count=24, outputs=(96, 192, 256), spread=0.12)
    found = compare(load, coins(accept, boast=0.5), rounds=1, depths=(4, 8) if accept else ())
    assert not misses(found), found


@pytest.mark.parametrize("place, call", [("cpu", 0.0), ("same_device", 0.6e-3)], ids=["copying", "model"])
def test_a_useless_drafter_beside_a_good_one(place, call):
    def pair(clock: Clock) -> Router:
        useless = Coins(clock, constant(0.0), name="useless", boast=0.8, place=place, call=call)
        return Router([Coins(clock, constant(0.8), name="good", boast=0.5), useless], clock)

    for batch in (1, 8):
        both = compare(Load(batch), pair, depths=())
        alone = compare(Load(batch), coins(0.8, name="good", boast=0.5), depths=())
        assert min(both.rounds) > 0.95 * min(alone.rounds), batch


@pytest.mark.parametrize("call, each", [(2e-3, 50e-6), (0.0, 1e-3)], ids=["a call", "a sequence"])
def test_a_drafter_that_takes_its_time(call, each):
    """The price is known after the first steps. Those are bounded, not free: up to 3 % of this short workload, once."""
    for batch in (1, 8):
        found = compare(Load(batch), coins(0.0, call=call, each=each), depths=())
        assert found.rounds[0] > 0.965 and found.rounds[1] > 0.98, (batch, found)


class SlowAtFirst(Machine):
    """Another process uses the device at first."""

    steps = 45

    def decodes(self, *shape) -> float:
        self.steps -= 1
        return super().decodes(*shape) * (3.3 if self.steps > 0 else 1.0)


def test_slow_steps_at_the_start_are_not_believed_for_long():
    """Plain steps are timed again; otherwise every draft looks good compared with outdated ones."""
    load = Load(64, count=512, prompt=100, outputs=(12, 30, 40, 40, 50, 80, 141))
    drafting, without = (
        Simulation(64, made, machine=SlowAtFirst()) for made in (coins(0.25, call=0.2e-3, each=4e-6), None)
    )
    rates = [without.run(load) / drafting.run(load) for _ in range(2)]
    assert rates[1] > 0.98, rates


class Stalls(Machine):
    """Some drafted steps stand still for two seconds, as if kernels compiled, though others have the same size."""

    drafted, stalled = 0, 0.0

    def decodes(self, graphs, seqs, context, drafts, drafted) -> float:
        self.drafted += drafted
        late = 2.0 if drafted and self.drafted in (3, 4, 9, 17, 18, 26, 45, 61) else 0.0
        self.stalled += late
        return super().decodes(graphs, seqs, context, drafts, drafted) + late


def test_stalls_do_not_end_the_drafting():
    for batch in (8, 64):
        stalling, smooth = (Simulation(batch, coins(0.9), machine=machine) for machine in (Stalls(), None))
        load = Load(batch, count=4 * batch)
        seconds = sum(stalling.run(load) for _ in range(2)) - stalling.machine.stalled
        assert stalling.machine.stalled == 16.0
        assert seconds < 1.12 * sum(smooth.run(load) for _ in range(2)), (batch, seconds)


def test_a_prompt_that_is_launched_meanwhile_is_no_part_of_a_step():
    """The end of a decode in flight is noticed after the next step was launched kernel by kernel, which takes longer
    than the decode."""
    engine = Simulation(8, coins(0.0), machine=Machine(launch=0.03))
    seen, observe = [], engine.drafting._times.observe
    engine.drafting._times.observe = lambda *of, **more: seen.append((of[3], of[4])) or observe(*of, **more)
    engine.run(Load(8, count=120, outputs=(9, 14, 23, 31)))
    plain = [seconds for drafted, seconds in seen if not drafted]
    assert len(plain) > 20 and max(plain) < 0.02, sorted(plain)[-5:]


def test_a_drafter_that_always_stalls_is_given_up():
    """A repeated delay is no accident: two hundred milliseconds in every call soon cost too much."""
    drafting, without = (Simulation(8, made) for made in (coins(0.9, call=0.2), None))
    load = Load(8, count=64)
    rates = [without.run(load) / drafting.run(load) for _ in range(4)]
    assert rates[-1] > 0.9, rates


def test_sizes_that_were_never_run_are_tried(monkeypatch):
    """One sequence and 7 drafts fill a graph of 8 rows; the eighth draft needs the next size, and it pays."""

    def drafts() -> float:
        simulation = Simulation(1, coins(0.7, seed=1), machine=Machine(jitter=0.0, outliers=0.0))
        simulation.run(Load(1))
        stats = simulation.drafting.controller.stats
        drafted, verified = stats.drafted, stats.verified
        simulation.run(Load(1))
        return (stats.drafted - drafted) / (stats.verified - verified)

    assert drafts() > 7.5
    monkeypatch.setattr(draft_times, "UNTRIED", math.inf)
    assert drafts() < 7.1, "the model alone never measures it"


def test_where_steps_are_as_short_as_a_drafters_own_work():
    """A trial is expensive on a small model, such as ``base`` on an H200 with 0.5 ms a step.

    One step of a trial costs a per cent of the whole workload, so results are means over seeds."""
    for batch in (1, 8, 32):
        found = [
            compare(Load(batch), coins(0.3, call=0.6e-3, boast=0.5, seed=seed), seed=seed, depths=(), **SMALL).rounds
            for seed in range(4)
        ]
        assert fmean(cold for cold, _ in found) > 0.93 and fmean(warm for _, warm in found) > 0.98, (batch, found)


def test_a_controller_that_believes_a_boast_fails_here():
    """The other checks can fail: without control, drafts that are never right cost a tenth."""
    assert misses(compare(Load(8), coins(0.0, boast=0.9), rounds=1, control="fixed", depths=()))
