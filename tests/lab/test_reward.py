"""The process reward model: labels of beginnings, its measure, and that it is trained into a model that is served."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvasir.models import checkpoint
from kvasir_lab.adapters.reward import Plan, area, beliefs, train
from kvasir_lab.lookup import load_task


@pytest.mark.parametrize("task", ["chain", "countdown", "long_add", "state", "two_part"])
def test_a_beginning_is_right_until_the_slip(task):
    inner, form = load_task(task), load_task(f"judge_step/{task}")
    cases = form.problems("train", 1, 300)
    assert {case.right[0] for case in cases} == {True, False}
    for case in cases:
        assert form.check(case, case.solution) and not form.check(case, {"Yes": "No", "No": "Yes"}[case.solution])
        assert case.right[0] == case.origin.solution.startswith(case.candidates[0])
        if case.right[0] and case.candidates[0] == case.origin.solution:
            assert inner.check(case.origin, case.candidates[0])
        if not case.right[0] and not case.candidates[0].endswith("\n"):  # a whole solution
            assert not inner.check(case.origin, case.candidates[0])
    assert any(case.right[0] and case.candidates[0].endswith("\n") for case in cases)


def test_the_question_is_that_of_the_searches():
    case = load_task("judge_step/chain").problems("train", 1, 1)[0]
    assert case.messages == load_task("self_evaluate/chain").case(case.origin, case.candidates).messages


def test_the_area_under_the_curve():
    scores, right = np.array([0.9, 0.8, 0.3, 0.2]), np.array([True, False, True, False])
    assert area(scores, right) == 0.75 and area(-scores, right) == 0.25 and area(0 * scores, right) == 0.5
    assert area(scores, np.ones(4, bool)) is None


def test_it_learns_and_is_a_model(tmp_path, one_thread):
    task = "chain:min_steps=1,max_steps=2"
    plan = Plan(task, rank=4, steps=12, rows=2, count=24, length=256)
    record = train(plan, checkpoint.resolve("nano"), tmp_path / "prm", say=lambda text: None)
    assert record["history"][-1]["loss"] < record["history"][0]["loss"]
    assert json.loads((tmp_path / "prm" / "reward.json").read_text())["after"] == record["after"]
    cases = load_task(f"judge_step/{task}").problems("test", 0, 8)
    before, after = (beliefs(folder, cases) for folder in (checkpoint.resolve("nano"), tmp_path / "prm"))
    assert before != after and all(0 <= p <= 1 for p in after)
    single = [beliefs(tmp_path / "prm", [case])[0] for case in cases]
    assert after == pytest.approx(single, abs=1e-4), "padding changes nothing"
