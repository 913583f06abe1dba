"""Plan-and-Budget: shares by credits and decay, both ways to enforce them, its controls, and the ledger."""

from __future__ import annotations

import asyncio
import json
import math
import random

import pytest

from kvasir.config import EngineConfig
from kvasir.errors import ConfigError
from kvasir.scaling.endpoint import Caps, Chunk, Draw, Endpoint, Sampling, Shape
from kvasir.scaling.engine_endpoint import EngineEndpoint
from kvasir.scaling.primitives import Context, Run, opened
from kvasir.scaling.problem import Problem
from kvasir.scaling.report import figures
from kvasir.scaling.solve import solve
from kvasir.scaling.strategies.plan_and_budget import PLAN, TOTALS, allocate, read_plan, weight
from kvasir.scaling.strategy import load_strategy
from kvasir_lab.lookup import load_task
from kvasir_lab.solving.job import lab_problems

GOOD = {"level": 2, "steps": [{"step": s, "difficulty": 3, "credits": c} for s, c in (("x", 20), ("y", 60), ("z", 20))]}
DECAYS = ("constant", "linear", "polynomial", "exponential", "cosine")


class Scripted(Endpoint):
    """An endpoint that plans as told and answers one token a letter, a section at a time where it is bounded."""

    name = "scripted"
    caps = Caps(tokens=True, schema=True, bound=True)

    def __init__(self, plan: str = json.dumps(GOOD), caps: Caps = caps, needs: int = 10) -> None:
        self.plan, self.caps, self.needs, self.calls = plan, caps, needs, []

    def most_prompt_tokens(self, prompt):
        return 3

    def draw(self, prompt, n, sampling, seed, group=None):
        self.calls.append((prompt.messages[-1]["content"], sampling))
        shape = sampling.shape or Shape()
        if shape.schema:
            return ScriptedDraw(self.plan[: sampling.max_tokens], "stop")
        if shape.mark:  # each step wants ``needs`` tokens
            return ScriptedDraw("w" * min(self.needs, shape.limit) + shape.mark, "stop")
        return ScriptedDraw("Answer: 7", "stop")


class ScriptedDraw(Draw):
    def __init__(self, text, finish):
        super().__init__()
        self.text, self.finish = text, finish

    async def __aiter__(self):
        self.usage.uncached += 3
        yield Chunk(0, self.text, list(range(len(self.text))), finish=self.finish, count=len(self.text))

    async def cancel(self, indexes):
        raise AssertionError


def run(spec: str, endpoint: Endpoint | None = None, max_tokens: int = 4000):
    endpoint = endpoint or Scripted()
    problems = [Problem("p", ({"role": "user", "content": "What?"},))]
    done = asyncio.run(solve(load_strategy(spec), problems, [endpoint], sampling=Sampling(max_tokens=max_tokens)))
    return done.solved[0].result, endpoint, done.ledger


# ----------------------------------------------------------------------------------------------------------- the shares


@pytest.mark.parametrize("decay", DECAYS)
def test_shares_are_whole_and_sum_to_the_budget(decay):
    rng = random.Random(decay)
    for _ in range(200):
        credits = [rng.randint(1, 60) for _ in range(rng.randint(1, 8))]
        total = rng.randint(len(credits), 700)
        found = allocate(total, credits, decay)
        parts = [c * weight(decay, i, len(credits)) for i, c in enumerate(credits)]
        exact = [total * p / sum(parts) for p in parts]
        assert sum(found) == total and all(math.floor(x) <= t <= math.floor(x) + 1 for x, t in zip(exact, found))
        given = [x % 1 for x, t in zip(exact, found) if t > math.floor(x)]
        kept = [x % 1 for x, t in zip(exact, found) if t == math.floor(x)]
        assert not given or not kept or min(given) >= max(kept) - 1e-9, "the remainder goes to the largest fractions"


def test_the_decays_are_the_published_ones():
    assert [weight("linear", i, 4) for i in range(4)] == [4, 3, 2, 1]
    assert [weight("polynomial", i, 3) for i in range(3)] == [9, 4, 1]
    assert [weight("exponential", i, 3) for i in range(3)] == pytest.approx([1, 0.9, 0.81])
    assert [weight("cosine", i, 3) for i in range(3)] == pytest.approx([1.1, 0.6, 0.1])
    assert weight("cosine", 0, 1) == 1.1 and allocate(100, [5], "cosine") == [100]
    assert allocate(250, [20, 60, 20], "constant") == [50, 150, 50]
    assert allocate(10, [1, 1, 1], "linear") == [5, 3, 2]


# --------------------------------------------------------------------------------------------------------- the strategy


def test_the_prompt_lists_each_step_with_its_words_and_the_plan_is_paid_for():
    result, endpoint, ledger = run("plan_and_budget")
    (plan, how), (answer, _) = endpoint.calls
    assert "credits" in plan and how.shape == Shape(schema=PLAN) and how.max_tokens == 2048
    assert "### 2\ny: use up to 150 words" in answer and answer.startswith("What?")
    assert result.answer == "7" and result.stats["asked"] == [50, 150, 50] and result.stats["level"] == 2
    assert ledger.total()["generated"] == len(json.dumps(GOOD)) + len("Answer: 7") and ledger.total()["calls"] == 2


@pytest.mark.parametrize("needs", [4, 1000])
def test_hard_forces_the_end_of_a_step(needs):
    endpoint = Scripted(needs=needs)
    result, _, _ = run("plan_and_budget:enforce=hard,budget=100,decay=polynomial", endpoint)
    bounds = [s.shape for _, s in endpoint.calls[1:-1]]
    assert [b.limit for b in bounds] == result.stats["asked"] and sum(b.limit for b in bounds) == 100
    assert [b.mark for b in bounds] == ["\n### 2\n", "\n### 3\n", "\nAnswer: "]
    spent = [u - len(b.mark) for u, b in zip(result.stats["used"], bounds)]
    assert spent == [min(needs, b.limit) for b in bounds] and result.text.endswith("\nAnswer: Answer: 7")


def test_e3_counts_the_plan():
    problems = [Problem("p", ({"role": "user", "content": "What?"},))]
    done = asyncio.run(solve(load_strategy("plan_and_budget"), problems, [Scripted()]))
    tokens = len(json.dumps(GOOD)) + len("Answer: 7")
    assert figures(done, [True])["E3"] == pytest.approx(1 / tokens, rel=1e-4)


def test_the_controls():
    result, endpoint, _ = run("plan_and_budget:share=global,budget=90")
    assert "Use less than 90 words" in endpoint.calls[0][0] and len(endpoint.calls) == 1
    assert run("plan_and_budget:share=global")[0].stats["asked"] == [TOTALS[3]]
    assert run("plan_and_budget:share=even,budget=90")[0].stats["asked"] == [30, 30, 30]


def test_a_plan_that_is_cut_off_leaves_one_plain_answer():
    """Negative control of the grammar: only a whole plan is used."""
    result, endpoint, ledger = run("plan_and_budget:plan_tokens=20")
    assert result.answer == "7" and result.stats["planned"] is False and endpoint.calls[1][0] == "What?"
    assert ledger.total()["generated"] == 20 + len("Answer: 7"), "and it is paid for"
    for bad in (
        "",
        "[]",
        "{}",
        '{"level": 2, "steps": []}',
        '{"level": "x", "steps": 3}',
        '{"level": 1, "steps": [1]}',
    ):
        assert read_plan(bad) is None


def test_what_cannot_work_is_refused():
    with pytest.raises(ConfigError, match="share=even"):
        load_strategy("plan_and_budget:share=global,enforce=hard")
    with pytest.raises(ConfigError, match="needs schema"):
        run("plan_and_budget", Scripted(caps=Caps(tokens=True, bound=True)))
    with pytest.raises(ConfigError, match="bound"):
        run("plan_and_budget:enforce=hard", Scripted(caps=Caps(schema=True)))


# ------------------------------------------------------------------------------------------------------ through engines


def test_an_engine_follows_the_grammar_and_never_exceeds_a_steps_budget():
    """A random model plans in JSON, and each step ends within its tokens by a mark that may be forced."""
    endpoint = EngineEndpoint(EngineConfig.of(model="nano", device="cpu"))
    task = load_task("two_part")
    [problem] = lab_problems(task, task.problems("test", 1, 1))

    async def main():
        async with opened([endpoint]):
            done = await solve(
                load_strategy("plan_and_budget:enforce=hard,budget=24"), [problem], [endpoint],
                sampling=Sampling(max_tokens=200, temperature=1.0),
            )  # fmt: skip
            context = Context(Run([endpoint], sampling=Sampling(max_tokens=200)), "q")
            marks, ids = [], endpoint.tokenizer.encode("\nAnswer: ", add_special=False)
            for limit in (0, 1, 5):
                seq = context.open(endpoint, problem.messages)
                await seq.generate(("\nAnswer: ",), limit + 16, shape=Shape(limit=limit, mark="\nAnswer: "))
                marks.append((seq.tokens, seq.ids[-len(ids) :] == ids, seq.done))
            return done, marks, len(ids)

    done, marks, size = asyncio.run(main())
    stats = done.solved[0].result.stats
    assert stats["planned"] and sum(stats["asked"]) == 24
    assert all(used <= asked + size for used, asked in zip(stats["used"], stats["asked"]))
    assert marks[0] == (size, True, False) and all(
        tokens <= limit + size for (tokens, _, _), limit in zip(marks, (0, 1, 5))
    )
