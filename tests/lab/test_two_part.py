"""The task of two parts: plain arithmetic agrees, and the parts' difficulties are what the question says."""

from __future__ import annotations

import re

import numpy as np

from kvasir_lab.lookup import load_task
from kvasir_lab.tasks.two_part import part_steps


def worked_out(question: str) -> int:
    total = 0
    for part in re.findall(r"start ([^.]*)\.", question):
        head, *steps = part.split("; ")
        value = int(head)
        for step in steps:
            value = {"+": value + int(step[1:]), "-": value - int(step[1:]), "*": value * int(step[1:])}[step[0]] % 97
        total += value
    return total % 97


def test_the_oracle_is_right_by_plain_arithmetic():
    task = load_task("two_part")
    for problem in task.problems("test", 3, 50):
        assert problem.answer == str(worked_out(problem.messages[-1]["content"]))
        assert task.check(problem, problem.solution)


def test_the_parts_have_the_steps_that_are_told():
    task = load_task("two_part:easy=2,hard=6")
    problems = task.problems("train", 1, 200)
    assert all(sum(part_steps(p)) == p.difficulty for p in problems)
    assert {min(part_steps(p)) for p in problems} == {1, 2} and {max(part_steps(p)) for p in problems} == {3, 4, 5, 6}
    assert len({part_steps(p)[0] > part_steps(p)[1] for p in problems}) == 2, "the long part comes first or last"
    assert all(max(part_steps(p)) > 6 for p in task.problems("longer", 1, 30))
    assert task.notes(problems[0]) == [
        f"A: {part_steps(problems[0])[0]} steps",
        f"B: {part_steps(problems[0])[1]} steps",
    ]


def test_a_slip_makes_the_answer_wrong():
    """Negative control: a wrong solution never passes."""
    task = load_task("two_part")
    rng = np.random.default_rng(5)
    drawn = task.drawn(rng, "train", 200)
    right = task.as_problems(drawn, rng)
    wrong = task.written(drawn, rng, np.ones(200, dtype=bool))
    assert not any(task.check(p, text) for p, text in zip(right, wrong))
