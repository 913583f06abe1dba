"""Adaptive self-evaluation, revisions, lookahead and the policy table: limits, controls, and cross-fitting."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path

import pytest

from kvasir.errors import ConfigError
from kvasir.scaling.policy_table import Outcomes, PolicyTable, best, cross_fitted, fit, quantiles
from kvasir.scaling.problem import Problem
from kvasir.scaling.solve import solve
from kvasir.scaling.strategies.adaptive_self_eval import Config, temperature
from kvasir.scaling.strategy import load_strategy
from kvasir_lab import policy
from tests.scaling.rewarded import Reward
from tests.scaling.tabular import WORDS, Forms, Tabular, answer, table
from tests.scaling.test_layer import amounts, outcome, run

KNOWS = {"1": 0.95, None: 0.5}


def knows() -> Reward:
    return Reward(of=lambda text: KNOWS.get(answer(text), 0.05))


def drawn(solution) -> list[int]:
    return [s.result.stats["drawn"] for s in solution.solved]


# ------------------------------------------------------------------------------------------------- adaptive sampling


class Heated(Tabular):
    """Keeps the temperatures that it is asked for."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.heats: list[float] = []

    def draw(self, prompt, n, sampling, seed, group=None):
        self.heats.append(sampling.temperature)
        return super().draw(prompt, n, sampling, seed, group)


def test_no_threshold_is_one_reply_and_one_above_all_is_the_best_of_n():
    first = run("adaptive_self_eval:n=6,threshold=0,first=1,prm=prm", 20, [Tabular(model=table(0.4)), knows()])
    assert drawn(first) == [1] * 20
    every = run("adaptive_self_eval:n=6,threshold=1.1,prm=prm", 20, [Tabular(model=table(0.4)), knows()])
    assert drawn(every) == [6] * 20
    right = [s.result.answer == "1" for s in every.solved]
    assert right == [bool(s.result.votes.get("1")) for s in every.solved], "the scorer that knows finds what is there"


def test_sampling_stops_at_the_first_reply_that_convinces_and_a_constant_belief_stops_nothing():
    found = run("adaptive_self_eval:n=8,threshold=0.9,prm=prm", 60, [Tabular(model=table(0.4, pause=0.1)), knows()])
    for s in found.solved:
        beliefs = s.result.stats["beliefs"]
        assert all(b < 0.9 for b in beliefs[:-1]) and (beliefs[-1] >= 0.9 or len(beliefs) == 8)
    assert 1.5 < sum(drawn(found)) / 60 < 3.5 and sum(s.result.answer == "1" for s in found.solved) >= 58
    flat = run("adaptive_self_eval:n=8,threshold=0.9,prm=prm", 4, [Tabular(model=table(0.4)), Reward(of=lambda t: 0.5)])
    assert drawn(flat) == [8] * 4


def test_the_temperature_rises_with_the_count_and_is_bounded():
    writer = Heated("large", table(0.4))
    run("adaptive_self_eval:n=12,threshold=1.1,first=0.3,rise=0.1,prm=prm", 1, [writer, knows()])
    assert writer.heats == pytest.approx([0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert temperature(Config(first=1.0, rise=0.0), 5) == 1.0


def test_waves_draw_the_same_replies_and_the_writer_judges_itself_by_default():
    one, two = (
        run(f"adaptive_self_eval:n=4,threshold=1.1,wave={wave}", 5, [Tabular("large", table(0.5, judge=0.9))])
        for wave in (1, 4)
    )
    assert drawn(one) == drawn(two) == [4] * 5
    assert amounts(one)["calls"] == amounts(two)["calls"] == 5 * 8


# ---------------------------------------------------------------------------------------------------------- revisions


def test_no_revisions_are_a_majority_and_the_scorer_weighs():
    plain = run("revisions:chains=5,revisions=0", 12, [Tabular("large", table(0.4))])
    assert all(sum(s.result.votes.values()) <= 5 for s in plain.solved)
    assert amounts(plain)["calls"] == 12 * 5
    weighed = run("revisions:chains=3,revisions=2,prm=prm", 30, [Tabular("large", table(0.4, pause=0.1)), knows()])
    right = [s.result.answer == "1" for s in weighed.solved]
    assert sum(right) > sum(s.result.votes.get("1", 0) * 2 > sum(s.result.votes.values()) for s in weighed.solved)
    assert amounts(weighed)["calls"] == 30 * 3 * 3 * 2


def test_a_chain_revises_its_own_last_attempt():
    asked: list[str] = []

    class Refined(Forms):
        def refine(self, problem, candidate):
            asked.append(candidate)
            return problem.messages

    problem = Problem("p0", ({"role": "user", "content": "solve"},), answer, Refined())
    writer = Tabular("large", table(0.4))
    done = asyncio.run(solve(load_strategy("revisions:chains=1,revisions=3"), [problem], [writer], seed=2))
    assert len(asked) == 3 and sum(done.solved[0].result.votes.values()) <= 4


# ---------------------------------------------------------------------------------------------------------- lookahead


def late(content: str, begun) -> dict[str, float]:
    """The first mark decides what the second is; nothing but the second shows whether a reply is right."""
    if not begun:
        return {".": 0.5, "\n": 0.5}
    if len(begun) == 1:
        return {"1": 1.0} if WORDS[begun[0]] == "." else {"2": 1.0}
    return {"<end>": 1.0}


def test_lookahead_sees_what_a_step_leads_to_and_pays_for_it():
    """The score of a first mark says nothing, so a beam of one is right half the time; looking one step ahead it is
    right wherever a good mark is among the beams."""
    spec = "beam:N=4,width=4,steps=3,tokens=1,prm=prm"
    blind = run(spec, 60, [Tabular(model=late), knows()])
    sees = run(f"{spec},lookahead=1", 60, [Tabular(model=late), knows()])
    right = [sum(s.result.answer == "1" for s in found.solved) for found in (blind, sees)]
    assert right[0] < 45 and right[1] > 52
    assert amounts(sees)["discarded"] > amounts(blind)["discarded"]
    ledger = sees.ledger.by_endpoint()["table"]
    assert ledger["generated"] >= 0 and ledger["generated"] + ledger["discarded"] > amounts(blind)["generated"]


def test_no_lookahead_is_the_plain_beam():
    spec = "beam:N=4,width=2,steps=4,tokens=2,prm=prm"
    assert outcome(run(spec, endpoints=[Tabular(), knows()])) == outcome(
        run(f"{spec},lookahead=0", endpoints=[Tabular(), knows()])
    )


# ------------------------------------------------------------------------------------------------------- policy table


def world(count: int = 400, seed: int = 0) -> tuple[list[float], dict[str, Outcomes]]:
    """Hard problems need the dear strategy; on easy ones it is worse than the cheap one."""
    rng = random.Random(seed)
    ease = [rng.random() for _ in range(count)]
    cheap = [float(rng.random() < (0.9 if e > 0.5 else 0.1)) for e in ease]
    dear = [float(rng.random() < (0.6 if e > 0.5 else 0.5)) for e in ease]
    return ease, {"cheap": Outcomes(cheap, [1.0] * count), "dear": Outcomes(dear, [5.0] * count)}


def test_a_table_beats_the_best_single_strategy_where_difficulty_matters_and_not_where_it_is_unknown():
    ease, found = world()
    mean = lambda values: sum(values) / len(values)  # noqa: E731
    told = cross_fitted(ease, found, 5.0)
    assert mean(told.table.right) > mean(told.single.right) + 0.1 and mean(told.table.cost) < 5.0
    blind = cross_fitted(random.Random(1).sample(ease, len(ease)), found, 5.0)
    assert abs(mean(blind.table.right) - mean(blind.single.right)) < 0.05
    poor = cross_fitted(ease, found, 1.0)
    assert poor.table.right == poor.single.right == found["cheap"].right, "a budget for the cheap one alone"


def test_what_predicting_costs_is_told():
    ease, found = world()
    free, paid = (policy.judged(ease, [cost] * len(ease), found, [5e9])[0] for cost in (0.0, 2e9))
    assert paid["table_cost"] == pytest.approx(free["table_cost"] + 2e9) and paid["single_cost"] == free["single_cost"]
    assert {name: paid[name] for name in ("table", "single")} == {name: free[name] for name in ("table", "single")}
    assert f"table {paid['table']:.1%} at 2, " in policy.line(paid)


def test_cross_fitting_gains_nothing_from_noise():
    """Many strategies of equal strength: picked on the reported problems, the winner would look better than it is."""
    rng = random.Random(3)
    found = {f"s{i}": Outcomes([float(rng.random() < 0.5) for _ in range(300)], [1.0] * 300) for i in range(20)}
    scores = [rng.random() for _ in range(300)]
    leaked = fit(scores, found, [1.0])
    own = sum(found[leaked.choose(s, 1.0)].right[i] for i, s in enumerate(scores)) / 300
    fair = cross_fitted(scores, found, 1.0).table.right
    assert own > 0.56 and sum(fair) / 300 < 0.56


def test_bins_ties_and_budgets():
    assert quantiles([0.1, 0.2, 0.3, 0.4], 2) == (0.3,) and quantiles([0.5], 1) == ()
    both = {"dear": Outcomes([1.0], [2.0]), "cheap": Outcomes([1.0], [1.0])}
    assert best(both, [0], 9.0) == "cheap" and best(both, [0], 0.5) == "cheap" and best(both, [], 9.0, [0]) == "cheap"
    made = PolicyTable((0.5,), {1.0: ("a", "b"), 2.0: ("c", "d")})
    assert (made.choose(0.4, 0), made.choose(0.5, 1.5), made.bin(0.49)) == ("c", "b", 0)
    with pytest.raises(ConfigError, match="all above"):
        made.choose(0.4, 0.5)


def test_a_table_is_a_file(tmp_path):
    ease, found = world(50)
    made = fit(ease, found, [1.0, 5.0], pilot=3, about={"task": "t"})
    made.save(tmp_path / "t.json")
    assert PolicyTable.load(tmp_path / "t.json") == made
    for text in ("", "[]", '{"edges": [0.5], "choices": {"1": ["majority"]}}', '{"edges": [], "choices": {}}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ConfigError, match="bad.json"):
            PolicyTable.load(tmp_path / "bad.json")


def saved(folder: Path, pilot: int) -> str:
    file = folder / f"t{pilot}.json"
    rows = ("best_of_n:n=6,by=prm,prm={prm}", "majority:n=1")
    file.write_text(json.dumps({"edges": [0.5], "choices": {"1": rows}, "pilot": pilot}))
    return str(file)


@pytest.mark.parametrize("pilot", [0, 4])
def test_hard_problems_get_the_strategy_of_their_bin(tmp_path, pilot):
    """The table's writer is always right or always wrong, and the reward model knows which."""
    for skill, value, spec in ((1.0, 0.9, "majority:n=1"), (0.0, 0.1, "best_of_n:n=6,by=prm,prm={prm}")):
        reward = Reward(of=lambda text, value=value: value)
        models = [Tabular("large", table(skill)), reward]
        found = run(f"compute_optimal:table={saved(tmp_path, pilot)},prm=prm", 3, models)
        assert {s.result.stats["chosen"] for s in found.solved} == {spec}
        plain = run(spec.replace("{prm}", "prm"), 3, [Tabular("large", table(skill)), Reward(of=reward.of)])
        extra = amounts(found)["calls"] - amounts(plain)["calls"]
        assert extra == 3 * (pilot + 1), "the prompt's score, or a call for the pilot replies and one score for each"
        assert bool(amounts(found)["discarded"]) == bool(pilot)


def test_delegates_are_checked_and_their_reward_models_known(tmp_path):
    file = saved(tmp_path, 0)
    assert set(load_strategy(f"compute_optimal:table={file},prm=a/b").rewards()) == {"a/b"}
    for spec, why in (
        ("compute_optimal", "needs a reward model"),
        ("compute_optimal:prm=prm", "needs a table"),
        (f"compute_optimal:table={tmp_path}/none.json,prm=prm", "is no policy table"),
        (f"compute_optimal:table={file},prm=nobody", "no model named"),
    ):
        with pytest.raises(ConfigError, match=why):
            run(spec, 1, [Tabular("large"), Reward()])


def test_votes_count_the_replies_of_all_chains():
    found = run("revisions:chains=3,revisions=1", 20, [Tabular("large", table(0.4, pause=0.05))])
    given = sum((Counter(s.result.votes) for s in found.solved), Counter())
    assert abs(given["1"] / sum(given.values()) - 0.4) < 0.12
