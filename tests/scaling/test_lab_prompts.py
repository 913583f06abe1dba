"""The lab's prompt forms under the strategies, with replies that check before they solve, from a scripted model."""

from __future__ import annotations

import asyncio
import itertools
import re

import pytest

from kvasir.scaling.endpoint import Chunk, Draw, Endpoint, Sampling
from kvasir.scaling.ledger import Price
from kvasir.scaling.solve import solve
from kvasir.scaling.strategy import load_strategy
from kvasir_lab.forms import FORMS, SOLVING, FormTask, render, solution
from kvasir_lab.lookup import load_task
from kvasir_lab.solving.job import LabPrompts, lab_problems


class Scripted(Endpoint):
    """A model that writes ``reply(prompt)`` as one token. ``asked``: every prompt's last message."""

    name, vocabulary, parameters, price = "scripted", "none", 0, Price()

    def __init__(self, reply) -> None:
        self.reply, self.asked = reply, []

    def draw(self, prompt, n, sampling, seed, group=None):
        return ScriptedDraw(self, prompt, n)

    def most_prompt_tokens(self, prompt):
        return 1


class ScriptedDraw(Draw):
    def __init__(self, endpoint, prompt, n) -> None:
        super().__init__()
        self.endpoint, self.content, self.n = endpoint, prompt.messages[-1]["content"], n

    async def cancel(self, indexes):
        raise AssertionError("nothing to cancel")

    async def __aiter__(self):
        for i in range(self.n):
            self.endpoint.asked.append(self.content)
            await asyncio.sleep(0)
            yield Chunk(i, text=self.endpoint.reply(self.content), finish="stop")


def oracle(task, origin, wrong):
    """Solves one time in three; aggregates, refines and judges as the lab's models are taught to."""
    turns = itertools.cycle((wrong, wrong, origin.solution))
    question = origin.messages[-1]["content"]

    def reply(content: str) -> str:
        if content == question:
            return next(turns)
        form = next(name for name, form in FORMS.items() if form.tail and content.endswith(form.tail))
        body = content.removeprefix(question).removesuffix(FORMS[form].tail).strip()
        texts = re.split("|".join(re.escape(head) + r"\n" for head in FORMS[form].heads), body)[1:]
        return FormTask(form, task).case(origin, [text.strip() for text in texts]).solution

    return reply


@pytest.mark.parametrize("name", ["chain", "countdown", "path", "state"])
@pytest.mark.parametrize(
    "spec",
    [
        "rsa:N=4,K=3,T=4",
        "squeeze_evolve:N=4,K=2,T=4",
        "squeeze_evolve:N=3,K=1,T=2,final=synthesize",
        "v1:N=4,distinct=false",
        "best_of_n:n=4,by=judge",
    ],
)
def test_populations_of_checked_replies_go_round(spec, name):
    task = load_task(name)
    origin = task.problems("test", 3, 1)[0]
    wrong = next(p.solution for p in task.problems("test", 4, 40) if not task.check(origin, p.solution))
    endpoint = Scripted(oracle(task, origin, wrong))
    (problem,) = lab_problems(task, [origin])
    found = asyncio.run(
        solve(load_strategy(spec), [problem], [endpoint], seed=1, sampling=Sampling(max_tokens=64), pause=0.0)
    )
    result = found.solved[0].result
    assert task.check(origin, solution(result.text)) and result.answer == problem.answer(
        origin.solution
    ) == task.answer(origin.solution)
    formed = [content for content in endpoint.asked if content != origin.messages[-1]["content"]]
    assert formed and not any(line.endswith((" good", " bad")) for content in formed for line in content.split("\n"))
    if result.populations:  # later replies hold checks, which cost tokens but cast no vote
        assert any(solution(text) != text for text in result.populations[-1])
        assert {problem.answer(text) for population in result.populations for text in population} <= {
            task.answer(origin.solution),
            task.answer(wrong),
        }


def test_prompts_show_what_a_reply_comes_to():
    task = load_task("chain")
    origin, wrong = task.problems("test", 4, 1)[0], "Answer: 1"
    checked = FormTask("aggregate", task).case(origin, [origin.solution, wrong]).solution
    (problem,) = lab_problems(task, [origin])
    prompts = problem.prompts
    assert isinstance(prompts, LabPrompts) and problem.answer(checked) == origin.answer == problem.answer(
        origin.solution
    )
    assert prompts.aggregate(problem, [checked, wrong]) == render("aggregate", origin, [origin.solution, wrong])
    assert prompts.judge_pair(problem, wrong, checked) == render("judge_pair", origin, [wrong, origin.solution])
    for made in (
        prompts.refine(problem, checked),
        prompts.judge_one(problem, checked),
        prompts.self_evaluate(problem, checked),
    ):
        assert made and "good" not in str(made) and origin.solution in "".join(m["content"] for m in made)
    for form in SOLVING[1:]:
        asks = FormTask(form, task)
        case = asks.case(origin, [wrong] * FORMS[form].least)
        assert (
            problem.answer(case.solution) == origin.answer
            and asks.check(case, case.solution)
            and asks.check(case, origin.solution)
        )
