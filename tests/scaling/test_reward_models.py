"""Reward models as scorers: refused where they cannot work, charged, and used as the judge is; particle Gibbs."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from kvasir.errors import ConfigError
from tests.scaling.rewarded import Reward
from tests.scaling.tabular import ID, WORDS, Tabular, answer, table
from tests.scaling.test_layer import outcome, run

SCORED = {
    "beam": "beam:N=8,width=4,steps=4,tokens=2",
    "particle": "particle:N=8,steps=4,tokens=2",
    "gibbs": "particle:N=4,steps=4,tokens=2,iterations=3",
    "a_star": "a_star:k=6,expansions=9,tokens=2",
    "self_eval_prune": "self_eval_prune:n=8,prefix=2",
    "best_of_n": "best_of_n:n=8,by=prm",
}


def right(spec: str, reward: Reward, count: int = 30) -> float:
    found = run(spec, count, [Tabular("large", table(0.4, pause=0.2)), reward])
    return sum(s.result.answer == "1" for s in found.solved) / count


@pytest.mark.parametrize("name", SCORED)
def test_a_reward_model_that_knows_finds_the_right_answer_and_an_inverted_one_does_not(name):
    knows = Reward(of=lambda text: {"1": 0.999, None: 0.5}.get(answer(text), 0.001))
    inverted = Reward(of=lambda text: {"1": 0.001, None: 0.5}.get(answer(text), 0.999))
    spec = f"{SCORED[name]},prm=prm"
    assert right(spec, knows) > 0.8 and right(spec, inverted) < 0.15


@pytest.mark.parametrize("name", SCORED)
def test_a_reward_model_costs_a_score_a_step_and_no_token(name):
    endpoints = [Tabular("large", table(0.4)), Reward(faults=0)]
    solution = run(f"{SCORED[name]},prm=prm", 3, endpoints)
    assert {c.endpoint for c in solution.ledger.charges if c.kind == "score"} == {"prm"}
    assert not any(c.kind == "choose" for c in solution.ledger.charges)
    found = solution.ledger.by_endpoint()["prm"]
    assert found["uncached"] == endpoints[1].counts["uncached"] and not found["generated"] + found["discarded"]
    assert outcome(solution) == outcome(run(f"{SCORED[name]},prm=prm", 3, [Tabular("large", table(0.4)), Reward()]))


def test_tiers_are_the_models_that_write():
    """A reward model is never the strongest or the cheapest model of a run, wherever it stands."""
    for models in ([Tabular("large"), Reward()], [Reward(), Tabular("large")]):
        assert outcome(run("cascade:n=3,agree=3,last=3", 3, models)) == outcome(
            run("cascade:n=3,agree=3,last=3", 3, [Tabular("large")])
        )


@pytest.mark.parametrize(
    "spec, why",
    [
        ("beam:prm=nobody", "no model named 'nobody'"),
        ("beam:prm=large", "is no reward model"),
        ("beam:judge=prm", "name it as prm=prm"),
        ("beam:judge=large,prm=prm", "two scorers"),
        ("majority:model=prm", "there are large"),
        ("best_of_n:by=prm", "belong together"),
        ("particle:N=1,iterations=2", "N=2 or more"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_call(spec, why):
    models = [Tabular("large"), Reward()]
    with pytest.raises(ConfigError, match=why):
        run(spec, 1, models)
    assert not models[0].prompts


# -------------------------------------------------------------------------------------------------------------- Gibbs


def _posterior() -> tuple[Counter, dict]:
    """The exact posterior over answers of three one-token steps, and its table."""
    model = table(0.5, judge=0.85, pause=0.4)

    def paths(begun: tuple[int, ...], weight: float, depth: int):
        if depth == 3 or begun and begun[-1] == 0:
            yield "".join(WORDS[i] for i in begun if i), weight
            return
        for word, p in model("solve", begun).items():
            grown = (*begun, ID[word])
            r = model(f"one {answer(''.join(WORDS[i] for i in grown if i))}", ())["Yes"]
            yield from paths(grown, weight * p * r / (1 - r), depth + 1)

    exact = Counter()
    for text, weight in paths((), 1.0, 0):
        exact[answer(text)] += weight
    return exact, model


def test_gibbs_iterations_bring_few_particles_to_the_posterior():
    """Three particles alone are biased towards plain samples. The last of several passes is not."""
    exact, model = _posterior()
    goal = exact["1"] / sum(exact.values())

    def share(iterations: int) -> float:
        """Share of right answers among the particles that the last pass adds to those before."""
        found = [run(f"particle:N=3,steps=3,tokens=1,iterations={n}", 120, [Tabular(model=model)]) for n in
                 (iterations - 1, iterations) if n]  # fmt: skip
        votes = [sum((Counter(s.result.votes) for s in f.solved), Counter()) for f in found]
        more = votes[-1] - votes[0] if len(votes) > 1 else votes[0]
        return more["1"] / (120 * 3)

    first, later = share(1), share(4)
    assert abs(later - goal) < 0.07 < goal - first, (first, later, goal)


def test_a_pass_of_gibbs_keeps_its_reference_and_pays_for_the_others():
    """Every pass has its reference among its particles, whose tokens are not computed again."""
    endpoints = [Tabular(model=table(0.5, judge=0.7, pause=0.4))]
    found = run("particle:N=4,steps=4,tokens=1,iterations=3", 1, endpoints)
    once = run("particle:N=4,steps=4,tokens=1", 1, [Tabular(model=table(0.5, judge=0.7, pause=0.4))])
    made = [c for c in found.ledger.charges if c.kind == "sample"]
    passes = Counter(c.key.partition("gibbs")[2][:1] for c in made)
    assert set(passes) == {"", "1", "2"} and passes["1"] <= 3 * 4
    assert passes[""] == sum(c.kind == "sample" for c in once.ledger.charges)
    assert math.isclose(sum(found.solved[0].result.votes.values()), 12, abs_tol=3)
