"""The layer on the tabular model: closed-form scores, conservation, budgets, resuming, groups, sequences, faults."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import os
import random
from pathlib import Path

import pytest

from kvasir.errors import ConfigError
from kvasir.scaling.endpoint import Caps, Sampling
from kvasir.scaling.journal import Journal
from kvasir.scaling.ledger import Budget, BudgetExceeded, Charge, Ledger, Price
from kvasir.scaling.primitives import Context, EndpointDown, Run
from kvasir.scaling.solve import solve
from kvasir.scaling.strategy import Strategy, load_strategy
from kvasir.technique import own
from tests.scaling.rewarded import Reward
from tests.scaling.tabular import ID, Tabular, answer, problem, table

ALL = {
    "majority": "majority:n=5",
    "best_of_n": "best_of_n:n=5,by=self",
    "adaptive_consistency": "adaptive_consistency:n=9",
    "first_finish": "first_finish:n=4",
    "short_m_at_k": "short_m_at_k:m=2,k=5",
    "self_eval_prune": "self_eval_prune:n=5,prefix=1",
    "rsa": "rsa:N=4,K=2,T=3",
    "squeeze_evolve": "squeeze_evolve:N=4,K=2,T=3",
    "v1": "v1:N=5,distinct=false,calls=2",
    "cascade": "cascade:n=3,agree=3,last=3",
    "specreason": "specreason:steps=8",
    "cost_router": "cost_router:prm=prm,n=3",
    "particle": "particle:N=4,steps=4,tokens=2",
    "beam": "beam:N=4,width=2,steps=4,tokens=2",
    "a_star": "a_star:k=3,expansions=5,tokens=2",
    "adaptive_self_eval": "adaptive_self_eval:n=4,threshold=0.7",
    "revisions": "revisions:chains=2,revisions=2,judge=small",
    "compute_optimal": f"compute_optimal:table={Path(__file__).with_name('policy_table.json')},prm=prm",
    "plan_and_budget": "plan_and_budget:enforce=hard,plan_tokens=4",
}
SAMPLING = Sampling(max_tokens=12)


def tiers(**options) -> list[Tabular]:
    """Two models that write, and a reward model."""
    return [
        Tabular("small", table(0.4), **options),
        Tabular("large", table(0.7), parameters=10, price=Price(3.0, 0.3, 12.0), **options),
        Reward(cache=options.get("cache", True)),
    ]


def context(*endpoints: Tabular, **options) -> Context:
    return Context(Run(endpoints or (Tabular(),), seed=3, sampling=SAMPLING, **options), "p0")


def outcome(solution) -> list:
    return [(s.result.answer, s.result.text, s.result.votes, s.result.stats, s.result.why) for s in solution.solved]


def run(spec: str, count: int = 3, endpoints=None, **options):
    endpoints = endpoints or tiers()
    options = {"seed": 5, "sampling": SAMPLING, "pause": 0.0, **options}
    return asyncio.run(solve(load_strategy(spec), [problem(f"p{i}") for i in range(count)], endpoints, **options))


def amounts(solution, *skip: str) -> dict[str, float]:
    return {k: v for k, v in solution.ledger.total().items() if k not in ("seconds", *skip)}


def test_every_strategy_is_tested():
    assert set(ALL) == set(own("kvasir.scaling.strategies"))


# ------------------------------------------------------------------------------------------------------------- scores


def test_scores_equal_the_closed_form_and_those_of_decoding():
    async def main():
        c = context()
        messages = problem().messages
        for sample in await c.sample(c.endpoints[0], messages, 8):
            if sample.finish != "stop":
                continue
            dots = len(sample.ids) - 2
            share = {"1": 0.5, "2": 0.3, "3": 0.2}[answer(sample.text)]
            # The table adds 1e-6 to every word, which is removed here.
            row = 1 + 11e-6
            exact = (
                dots * math.log((0.4 + 1e-6) / row) + math.log((0.6 * share + 1e-6) / row) + math.log((1 + 1e-6) / row)
            )
            score = await c.score(c.endpoints[0], messages, sample)
            assert math.isclose(score.logprob, exact, rel_tol=1e-9) and math.isclose(
                sample.logprob, exact, rel_tol=1e-9
            )
            assert math.isclose(
                score.confidence, sample.confidence, rel_tol=1e-12
            ) and score.tokens == sample.tokens == len(sample.ids)

    asyncio.run(main())


def test_choose_is_the_tables_distribution_and_sums_to_one():
    async def main():
        c = context()
        found = await c.choose(c.endpoints[0], problem(text="one 1").messages, ("Yes", "No"))
        assert math.isclose(math.exp(found["Yes"]), 0.8, rel_tol=1e-4) and math.isclose(
            sum(map(math.exp, found.values())), 1.0
        )
        assert c.ledger.total()["discarded"] == 1  # the token that was drawn and discarded

    asyncio.run(main())


def test_the_share_of_answers_is_the_tables():
    async def main():
        c = context()
        found = await c.sample(c.endpoints[0], problem().messages, 3000)
        given = [answer(s.text) for s in found if s.finish == "stop"]
        assert abs(given.count("1") / len(given) - 0.5) < 0.03 and abs(given.count("3") / len(given) - 0.2) < 0.03

    asyncio.run(main())


def test_a_sample_depends_on_its_number_only():
    async def main(n):
        c = context()
        return [(s.ids, s.finish) for s in await c.sample(c.endpoints[0], problem().messages, n)]

    assert asyncio.run(main(3)) == asyncio.run(main(9))[:3]


# ---------------------------------------------------------------------------------------------------------- sequences


@pytest.mark.parametrize("cuts", [(1,), (2, 1), (1, 1, 1, 3)])
def test_pieces_forks_and_cuts_equal_one_generation(cuts):
    async def main():
        endpoint = Tabular(model=table(pause=0.8))
        c = context(endpoint)
        whole = c.open(endpoint, problem().messages)
        whole.stream = 77
        await whole.generate(max_tokens=12)
        seq = c.open(endpoint, problem().messages)
        seq.stream = 77
        for cut in cuts:
            if not seq.done:
                await seq.generate(max_tokens=cut)
        if not seq.done:
            kept = len(seq.pieces)
            other = seq.fork(2)[1]
            await other.generate()
            assert other.ids[: len(seq.ids)] == seq.ids and len(seq.pieces) == kept
            tokens = sum(p.tokens for p in seq.pieces)
            await seq.generate(max_tokens=1)
            before = c.ledger.total()
            seq.truncate(kept)
            after = c.ledger.total()
            assert sum(p.tokens for p in seq.pieces) == tokens and after["discarded"] == before["discarded"] + 1
            assert after["discarded"] + after["generated"] == before["discarded"] + before["generated"]
            await seq.generate(max_tokens=12 - len(seq.ids))
        assert seq.ids == whole.ids and seq.sample().finish == whole.sample().finish and seq.text == whole.text
        assert math.isclose(seq.sample().confidence, whole.sample().confidence) and math.isclose(
            seq.sample().logprob, whole.sample().logprob
        )

    asyncio.run(main())


def test_a_step_keeps_its_delimiter_and_is_not_the_end():
    async def main():
        endpoint = Tabular(
            model=lambda text, begun: (
                {"\n": 1.0} if len(begun) < 2 else {"1": 1.0} if len(begun) == 2 else {"<end>": 1.0}
            )
        )
        seq = context(endpoint).open(endpoint, problem().messages)
        assert (await seq.generate(until=("\n",))).text == "\n" and not seq.done
        assert (await seq.generate(until=("\n",))).text == "\n" and not seq.done
        assert (
            (await seq.generate(until=("\n",))).text == "1" and seq.done and seq.ids == [ID["\n"], ID["\n"], ID["1"], 0]
        )

    asyncio.run(main())


# ------------------------------------------------------------------------------------------------------------- groups


@pytest.mark.parametrize("jitter", range(20))
def test_the_first_to_finish_are_the_shortest_whatever_the_timing(jitter):
    async def main():
        full = context(Tabular(model=table(pause=0.7)))
        pool = await full.sample(full.endpoints[0], problem().messages, 6)
        expected = sorted((s.tokens, s.index) for s in pool if s.finish == "stop")[:2]
        c = context(Tabular(model=table(pause=0.7), jitter=jitter))
        cut = await c.sample(c.endpoints[0], problem().messages, 6, finish_after=2)
        first = [s for s in cut if s.met is not None]
        assert sorted((s.tokens, s.index) for s in first) == expected and all(s.ids == pool[s.index].ids for s in first)
        last = expected[-1][0]
        assert all(last - 1 <= s.tokens <= last + 1 for s in cut if s.met is None) and all(
            s.finish == "group" for s in cut if s.met is None
        )
        assert c.ledger.total()["generated"] == sum(t for t, _ in expected)
        assert c.ledger.total()["generated"] + c.ledger.total()["discarded"] == c.endpoints[0].counts["generated"]

    asyncio.run(main())


def test_a_mark_ends_the_others_and_the_winner_goes_on():
    async def main():
        c = context(Tabular(model=table(pause=0.7)))
        pool = await c.sample(c.endpoints[0], problem().messages, 6, finish_after=1, on="1")
        first = [s for s in pool if s.met is not None]
        assert len(first) == 1 and first[0].finish == "stop" and first[0].tokens == first[0].met + 1  # and its end mark

    asyncio.run(main())


def test_what_is_not_accepted_does_not_count():
    async def main():
        c = context()
        pool = await c.sample(
            c.endpoints[0], problem().messages, 6, finish_after=1, accept=lambda text: answer(text) == "3"
        )
        assert [answer(s.text) for s in pool if s.met is not None] in (["3"], [])

    asyncio.run(main())


# ---------------------------------------------------------------------------------------------------- ledger, budgets


@pytest.mark.parametrize("spec", ALL.values(), ids=ALL)
@pytest.mark.parametrize("jitter", [None, 1])
def test_the_ledger_holds_what_the_models_did(spec, jitter):
    endpoints = tiers(jitter=jitter, faults=1)
    solution = run(spec, endpoints=endpoints)
    for endpoint in endpoints:
        found = solution.ledger.by_endpoint().get(endpoint.name)
        counts = endpoint.counts
        if found is None:
            assert not counts["requests"]
            continue
        assert (
            found["uncached"] == counts["uncached"]
            and found["cached"] == counts["cached"]
            and found["calls"] == counts["requests"]
        )
        assert found["generated"] + found["discarded"] == counts["generated"] and min(found.values()) >= 0
        p = endpoint.price
        assert math.isclose(
            found["dollars"] * 1e6,
            counts["uncached"] * p.uncached + counts["cached"] * p.cached + counts["generated"] * p.generated,
        )
        assert found["flops"] == 2 * endpoint.parameters * (counts["uncached"] + counts["generated"])
    parts = [s.ledger.total() for s in solution.solved]
    assert all(math.isclose(sum(p[unit] for p in parts), value) for unit, value in solution.ledger.total().items())


@pytest.mark.parametrize("spec", ALL.values(), ids=ALL)
def test_budgets_are_never_exceeded(spec):
    """Random bounds in every unit and random interleavings; every reservation is given back."""
    rng = random.Random(spec)
    for trial in range(8):
        budget = Budget(
            tokens=rng.randrange(1, 400),
            generated=rng.choice([None, rng.randrange(1, 300)]),
            calls=rng.choice([None, rng.randrange(1, 20)]),
            dollars=rng.choice([None, rng.random() * 2e-3 + 1e-6]),
        )
        each = Budget(tokens=rng.randrange(1, 200))
        endpoints = tiers(jitter=trial, faults=rng.randrange(3))
        solution = run(spec, endpoints=endpoints, budget=budget, problem_budget=each, retries=9)
        made = sum(e.counts["generated"] for e in endpoints)
        total = solution.ledger.total()
        assert sum(e.counts["uncached"] for e in endpoints) + made <= budget.tokens
        assert budget.generated is None or made <= budget.generated
        assert budget.calls is None or total["calls"] <= budget.calls
        assert budget.dollars is None or total["dollars"] <= budget.dollars * (1 + 1e-9)
        parts = [s.ledger.total() for s in solution.solved]
        assert all(part["uncached"] + part["generated"] + part["discarded"] <= each.tokens for part in parts)
        assert all(abs(v) < 1e-12 for v in solution.ledger._reserved.values())


def test_a_budget_that_never_binds_changes_nothing_and_a_small_one_says_why():
    assert outcome(run(ALL["rsa"])) == outcome(run(ALL["rsa"], budget=Budget(tokens=10**9, dollars=10.0)))
    short = run(ALL["rsa"], problem_budget=Budget(tokens=70))
    assert all(s.result.why.startswith("budget: ") and s.result.answer for s in short.solved)
    assert all(not s.result.answer for s in run(ALL["rsa"], problem_budget=Budget(tokens=1)).solved)


def test_a_call_takes_as_many_samples_as_there_is_room_for():
    async def main():
        c = context()
        c.ledger.budget = Budget(generated=3 * SAMPLING.max_tokens + 1)
        assert len(await c.sample(c.endpoints[0], problem().messages, 8)) == 3
        c.ledger.budget = Budget(generated=1)
        with pytest.raises(BudgetExceeded, match="generated wanted"):
            await c.sample(c.endpoints[0], problem().messages, 8)

    asyncio.run(main())


def test_reservations_count_before_the_call_ends():
    ledger = Ledger(Budget(tokens=10))
    held = ledger.reserve(Charge(uncached=6))
    with pytest.raises(BudgetExceeded):
        Ledger(parent=ledger).reserve(Charge(uncached=5))
    ledger.release(held)
    Ledger(parent=ledger).reserve(Charge(uncached=10))


# ------------------------------------------------------------------------------------------------------------ journal


class Killed(BaseException):
    pass


class Mortal(Journal):
    """A journal that dies after ``lives`` lines, as a process would: later lines are not written.

    ``torn``: half a line more is written.
    """

    def __init__(self, *args, lives: int, torn: bool = False) -> None:
        self.lives, self.torn = lives, torn
        super().__init__(*args)

    def _write(self, entry):
        if self.lives > 0:
            super()._write(entry)
        elif self.lives == 0:
            if self.torn:
                os.write(self._file._handle, json.dumps(entry)[:17].encode())
            self.lives = -1
            raise Killed
        self.lives -= self.lives > 0


@pytest.mark.parametrize("spec", ALL.values(), ids=ALL)
def test_a_run_killed_anywhere_resumes_to_the_same_result(spec, tmp_path):
    """Kill the run at every point.

    Results and charges are the same, every call is in the journal once, and no finished call is made again.
    """
    options = {"count": 2, "problem_budget": Budget(tokens=250)}
    whole = tmp_path / "whole"
    reference = run(spec, endpoints=tiers(cache=False), journal=Journal(whole, {"a": 1}), **options)
    lines = whole.read_text().splitlines()
    for point in range(1, len(lines) + 1):
        path = tmp_path / f"cut{point}"
        try:
            run(
                spec,
                endpoints=tiers(cache=False),
                journal=Mortal(path, {"a": 1}, lives=point, torn=bool(point % 2)),
                **options,
            )
        except Killed:
            assert point < len(lines)
        done = {json.loads(line)["key"] for line in path.read_text().split("\n")[1:-1]}
        endpoints = tiers(cache=False)
        again = run(spec, endpoints=endpoints, journal=Journal(path, {"a": 1}), **options)
        assert outcome(again) == outcome(reference) and amounts(again) == pytest.approx(amounts(reference))
        keys = [json.loads(line)["key"] for line in path.read_text().splitlines()[1:]]
        assert len(set(keys)) == len(keys) and set(keys) == {json.loads(line)["key"] for line in lines[1:]}
        costs = [json.loads(line)["charge"] for line in path.read_text().splitlines()[1:]]
        assert sum(e.counts["requests"] for e in endpoints) == sum(
            c is not None for c, k in zip(costs, keys) if k not in done
        )


def test_another_run_or_other_prompts_or_no_journal_at_all_are_refused(tmp_path):
    path = tmp_path / "j"
    run("majority:n=2", journal=path)
    with pytest.raises(ConfigError, match="config differ"):
        run("majority:n=3", journal=path)
    with pytest.raises(ConfigError, match="seed differ"):
        run("majority:n=2", journal=path, seed=6)
    with pytest.raises(ConfigError, match="asked for something else"):
        run("majority:n=2", journal=path, sampling=Sampling(max_tokens=3))
    for text in ("hello\n", '{"format": 1}\n[]\n', "\xff\xfe\n"):
        path.write_text(text)
        with pytest.raises(ConfigError):
            run("majority:n=2", journal=path)
    with pytest.raises(ConfigError, match="cannot be used"):
        run("majority:n=2", journal=tmp_path)


# ------------------------------------------------------------------------------------------------------------- faults


def test_a_call_that_fails_is_tried_again_and_its_waste_is_charged(tmp_path):
    path = tmp_path / "j"
    good, endpoints = run("majority:n=4"), tiers(faults=3)
    solution = run("majority:n=4", endpoints=endpoints, journal=path)
    assert outcome(good) == outcome(solution)
    lost = [c for c in solution.ledger.charges if c.kind == "lost"]
    assert len(lost) == 3 and all(c.discarded == 8 and c.uncached for c in lost)
    # Nothing is made again, and nothing is charged twice or forgotten.
    again = run("majority:n=4", endpoints=tiers(), journal=path)
    assert amounts(again) == amounts(solution)


def test_a_dead_endpoint_ends_the_run_clearly_and_leaves_the_journal(tmp_path):
    path, events = tmp_path / "j", []
    endpoints = tiers(faults=1000)
    endpoints[0].faults = 0
    with pytest.raises(EndpointDown, match="large failed 3 times in a row, the last time: the table broke"):
        run("cascade:n=3,agree=3,last=3", 6, endpoints, journal=path, retries=2, on_event=events.append)
    assert sum("key" in json.loads(line) for line in path.read_text().splitlines()[1:]) >= 6 and any(
        e["event"] == "retry" for e in events
    )
    assert outcome(run("cascade:n=3,agree=3,last=3", 6, journal=path)) == outcome(run("cascade:n=3,agree=3,last=3", 6))


def test_cancelling_the_task_cancels_the_call_and_charges_what_was_seen():
    async def main():
        endpoint = Tabular(model=table(pause=0.999))
        c = context(endpoint)
        task = asyncio.ensure_future(c.sample(endpoint, problem().messages, 3))
        for _ in range(8):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        seen = endpoint.counts["generated"]
        for _ in range(20):
            await asyncio.sleep(0)
        total = c.ledger.total()
        assert (
            0 < seen == endpoint.counts["generated"]
            and seen - 1 <= total["discarded"] <= seen
            and not total["generated"]
        )
        assert not any(c.ledger._reserved.values())

    asyncio.run(main())


@pytest.mark.parametrize("spec", ALL.values(), ids=ALL)
def test_prompts_that_do_not_fit_end_in_a_result(spec):
    assert len(run(spec, endpoints=tiers(context=3)).solved) == 3
    assert all(s.result.answer is None for s in run(spec, endpoints=tiers(context=1)).solved)


@pytest.mark.parametrize("ids", [("a", "a"), ("",), ("a/b",), ("a#0",), ("a?x",)])
def test_ids_that_could_meet_are_refused(ids):
    """Ids begin the keys of calls and the seeds: a problem must not get another's replies."""
    with pytest.raises(ConfigError, match="id"):
        asyncio.run(solve(load_strategy("majority:n=1"), [problem(name) for name in ids], [Tabular()]))


def test_no_problems_are_no_work():
    assert run("rsa", 0).solved == []


@pytest.mark.parametrize(
    "spec, caps, named",
    [
        ("best_of_n:by=self", Caps(), "needs choose"),
        ("particle", Caps(choose=True), "needs tokens"),
        ("squeeze_evolve", Caps(logprobs=True), "cannot score"),
        ("best_of_n", Caps(), "needs logprobs"),
        ("squeeze_evolve:p=10/30", None, "need 1 bounds"),
        ("majority:model=x", None, "there are small, large"),
        ("squeeze_evolve:scorer=x", None, "scorer=x"),
        ("rsa:K=65,N=80", None, "more than the 64"),
        ("squeeze_evolve:K=65,N=80", None, "more than the 64"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_call(spec, caps, named):
    endpoints = tiers(caps=caps)
    with pytest.raises(ConfigError, match=named):
        run(spec, endpoints=endpoints)
    assert not endpoints[1].prompts


@pytest.mark.parametrize(
    "spec",
    [
        "majority:n=0",
        "rsa:N=2,K=3",
        "rsa:T=0",
        "squeeze_evolve:N=2,K=3",
        "squeeze_evolve:p=x",
        "squeeze_evolve:p=30/10",
        "squeeze_evolve:fitness=luck",
        "squeeze_evolve:M=2,K=4",
        "squeeze_evolve:zeta=0",
        "short_m_at_k:m=3,k=2",
        "beam:N=4,width=3",
        "a_star:k=0",
        "a_star:regret=-1",
        "particle:tau=0",
        "cascade:n=2,agree=3",
        "self_eval_prune:keep=0",
        "majorty",
        "majority:m=2",
        "squeeze_evolve:p=101",
        "squeeze_evolve:route=threshold,threshold=2/3",
        "squeeze_evolve:p=nan",
    ],
)
def test_bad_options_are_refused(spec):
    with pytest.raises(ConfigError):
        load_strategy(spec)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Budget)])
def test_a_budget_of_nothing_is_refused(field):
    with pytest.raises(ConfigError, match=field):
        Budget(**{field: 0})


def test_strategies_import_no_sibling_and_say_what_they_are():
    for name in own("kvasir.scaling.strategies"):
        assert issubclass(type(load_strategy(name)), Strategy)
