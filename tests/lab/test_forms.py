"""Prompt forms: the question, the target and what counts as right, for every mix of right and wrong candidates."""

from __future__ import annotations

import collections
import itertools

import numpy as np
import pytest

from kvasir.errors import ConfigError
from kvasir_lab.forms import FORMS, SOLVING, FormTask, ratings, render, solution, target, verdict
from kvasir_lab.lookup import load_task
from kvasir_lab.task import Problem

TASKS = ["chain", "reflect", "long_add", "countdown", "path", "facts", "needle", "state"]
JUDGED = [form for form in FORMS if form != "solve"]
# The solutions of these tasks, right and wrong, depend on the problem only, so documents can be compared with problems.
PLAIN = ["chain", "long_add", "state", "facts"]


def candidates_of(task, count: int = 6):
    """A problem, its right solution and some wrong ones."""
    rng = np.random.default_rng(1)
    drawn = task.drawn(rng, "test", 1)
    wrong = [task.written(drawn, rng, np.ones(1, dtype=bool))[0] for _ in range(count)]
    return task.as_problems(drawn, rng)[0], wrong


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("form", JUDGED)
def test_targets_are_right_for_every_mix_of_candidates(name, form):
    task = load_task(name)
    asks = FormTask(form, task)
    problem, wrong = candidates_of(task)
    least, most = FORMS[form].least, min(FORMS[form].most, 4)
    for size in range(least, most + 1):
        for mix in itertools.product((True, False), repeat=size):
            case = asks.case(problem, [problem.solution if ok else wrong[i] for i, ok in enumerate(mix)])
            assert case.right == mix and case.difficulty == sum(mix)
            assert asks.check(case, case.solution) and case.answer == asks.answer(case.solution)
            prompt = "\n".join(m["content"] for m in case.messages)
            assert problem.messages[-1]["content"] in prompt and all(text in prompt for text in case.candidates)
            if form in ("aggregate", "refine"):
                assert task.check(problem, solution(case.solution)) and not asks.check(case, wrong[0])
            elif form == "judge_pair":
                a, b = ratings(case.solution)
                assert (a > b) == (mix == (True, False)) and (a == b) == (mix[0] == mix[1]) and (a > 5) == mix[0]
            else:
                assert verdict(case.solution) == ("Yes" if mix[0] else "No") and not asks.check(
                    case, "No" if mix[0] else "Yes"
                )
            if FORMS[form].names:  # the check comes first, and a model may leave it out
                check, said = (
                    task.verify(problem, case.candidates, FORMS[form].names),
                    target(form, problem, case.candidates, mix),
                )
                # Nothing was worked out in this case, so the question is repeated.
                if name == "countdown" and form in SOLVING and not any(mix):
                    check += f"\n{problem.messages[-1]['content']}"
                assert case.solution == check + ("\n\n" if form in SOLVING else "\n") + said and asks.check(case, said)
                assert asks.answer(said) == case.answer and solution(case.solution) == (
                    said if form in SOLVING else case.solution
                )


@pytest.mark.parametrize("form", [form for form in JUDGED if form != "judge_step"])
def test_the_problems_of_a_form_hold_every_mix_and_pass_their_own_check(form):
    task = load_task(f"{form}/chain:max_steps=6")
    problems = task.problems("test", 0, 200)
    assert all(
        task.check(p, p.solution) and p.right == tuple(task.inner.check(p.origin, c) for c in p.candidates)
        for p in problems
    )
    seen = collections.Counter((len(p.right), p.difficulty) for p in problems)
    least, most = FORMS[form].least, min(FORMS[form].most, 4)
    assert set(seen) == {(size, right) for size in range(least, most + 1) for right in range(size + 1)}
    if least < 3 <= most:  # the right ones are not always the first
        assert len({p.right for p in problems if p.difficulty == 1 and len(p.right) == 3}) == 3


@pytest.mark.parametrize("form", JUDGED)
def test_a_constant_reply_is_no_judge(form):
    task = load_task(f"{form}/chain")
    problems = task.problems("test", 1, 200)
    for reply in ("Yes", "No", "A: 9\nB: 2", "A: 5\nB: 5", problems[0].solution):
        share = sum(task.check(p, reply) for p in problems) / len(problems)
        assert share < 0.7, reply


@pytest.mark.parametrize("name", [*PLAIN, "countdown", "path:form=star", "needle"])
@pytest.mark.parametrize("form", JUDGED)
def test_documents_are_the_tokenised_text_with_loss_on_the_last_reply_only(tokenizer, form, name):
    made = load_task(f"{form}/{name}").documents(tokenizer, np.random.default_rng(2), 12)
    assert len(made) == 12
    for a, b in zip(made.bounds, made.bounds[1:], strict=False):
        text = tokenizer.decode(made.ids[a:b].tolist(), skip_special_tokens=False)
        assert tokenizer.encode(text, add_special_tokens=False).ids == made.ids[a:b].tolist()
        learnt = tokenizer.decode(made.ids[a:b][made.trained[a:b]].tolist(), skip_special_tokens=False)
        assert learnt == text.rsplit("<|im_start|>assistant\n", 1)[1] and learnt.endswith("<|im_end|>")
        assert text.count("<|im_start|>assistant\n") == (2 if form in ("self_evaluate", "judge_step") else 1)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("form", JUDGED)
def test_documents_read_as_the_problems_do(tokenizer, form, name):
    """Take a training document apart, rebuild its case from the texts alone, and find the same prompt and target."""
    task = load_task(f"{form}/{name}")
    made = task.documents(tokenizer, np.random.default_rng(5), 20, "train")
    # The same draw from the same generator gives the problems of these documents.
    rng = np.random.default_rng(5)
    origins = task.inner.as_problems(task.inner.drawn(rng, "train", 20), np.random.default_rng(0))
    heads = FORMS[form].heads
    for i, origin in enumerate(origins):
        text = tokenizer.decode(made.ids[made.bounds[i] : made.bounds[i + 1]].tolist(), skip_special_tokens=False)
        prompt, reply = text.rsplit("<|im_start|>assistant\n", 1)
        asked = prompt.split("<|im_start|>user\n", 1)[1]
        if form in ("self_evaluate", "judge_step"):
            texts = [asked.split("assistant\n")[1].split("<|im_end|>")[0]]
        else:
            body, texts = asked.removesuffix(f"\n\n{FORMS[form].tail}<|im_end|>\n"), []
            for head in reversed(heads):
                if f"\n\n{head}\n" in body:
                    body, last = body.split(f"\n\n{head}\n")
                    texts.insert(0, last)
        case = task.case(origin, texts)
        assert (
            case.prompt.split("<|im_start|>user\n", 1)[1] == text.removesuffix(reply).split("<|im_start|>user\n", 1)[1]
        )
        assert case.solution + "<|im_end|>" == reply


def test_real_replies_become_cases_whatever_they_say():
    task = load_task("chain")
    problem = task.problems("test", 0, 1)[0]
    replies = [problem.solution, "", "I do not know.", "Answer: 96\n\nCandidate 2:\n", "💥"]
    case = FormTask("aggregate", task).case(problem, replies)
    assert case.right == (True, False, False, False, False) and solution(case.solution) == problem.solution
    assert f"1: {problem.answer} good\n2: none bad\n3: none bad\n4: none bad\n5: none bad\n\n" in case.solution
    case = FormTask("aggregate", task).case(problem, replies[1:])
    assert case.difficulty == 0 and solution(case.solution) == problem.solution
    other = load_task("countdown")
    game = type(problem)(
        ({"role": "user", "content": "Make 22 from 7, 4, 3, 9."},), "4*7=28\n28-9=19\n19+3=22\nAnswer: 22", ""
    )
    way = "7*4=28\n9-3=6\n28-6=22\nAnswer: 22"
    # A right candidate stands, whatever its style.
    assert solution(FormTask("refine", other).case(game, [way]).solution) == way


def test_what_was_wrong_is_not_learnt():
    task = load_task("self_evaluate/chain")
    problem = next(p for p in task.problems("test", 0, 20) if not p.right[0])
    learnt = [text for text, trained in problem.segments() if trained]
    assert learnt == ["No<|im_end|>"] and problem.messages[1]["content"] == problem.candidates[0]


def test_pairs_are_checked_by_order_alone_when_mixed():
    task = load_task("judge_pair/chain")
    problem, wrong = candidates_of(task.inner)
    mixed = task.case(problem, [wrong[0], problem.solution])
    for reply, ok in (
        ("A: 1\nB: 2", True),
        ("A: 8\nB: 9", True),
        ("A: 9\nB: 8", False),
        ("A: 5\nB: 5", False),
        ("A: 2, B: 9", False),
        ("A: 2\nB: 10", False),
        ("B: 9\nA: 2", False),
        ("A: 2\nB: 9\n", True),
        ("2\n9", False),
        ("A: ²\nB: 9", False),
        ("", False),
    ):
        assert task.check(mixed, reply) == ok, reply
    both = task.case(problem, [problem.solution, problem.solution])
    for reply, ok in (("A: 9\nB: 7", True), ("A: 9\nB: 5", False), ("A: 2\nB: 2", False), ("A: 5\nB: 9", False)):
        assert task.check(both, reply) == ok, reply
    neither = task.case(problem, wrong[:2])
    assert task.check(neither, "A: 1\nB: 4") and not task.check(neither, "A: 9\nB: 2")


def test_seeds_splits_and_dials_reach_the_inner_task(tokenizer):
    task = load_task("judge_one/chain:min_steps=5,max_steps=5,modulus=31")
    assert {p.origin.difficulty for p in task.problems("test", 0, 20)} == {5}
    assert task.problems("test", 0, 5) == task.problems("test", 0, 5) != task.problems("test", 1, 5)
    asked = {split: {p.origin.prompt for p in task.problems(split, 0, 40)} for split in ("train", "test", "longer")}
    assert not asked["train"] & asked["test"]
    assert min(p.origin.difficulty for p in task.problems("longer", 0, 5)) > 5
    a, b = (load_task("aggregate/facts").documents(tokenizer, np.random.default_rng(0), 4).ids for _ in range(2))
    assert np.array_equal(a, b)
    assert load_task("solve/chain:max_steps=5").config == load_task("chain:max_steps=5").config


@pytest.mark.parametrize(
    "spec, named",
    [
        ("agregate/chain", "aggregate"),
        ("aggregate/chian", "chain"),
        ("aggregate/story", "no prompt forms"),
        ("judge_one/template", "no prompt forms"),
        ("aggregate/judge_one/chain", "no prompt forms"),
        ("aggregate/chain:stpes=1", "steps"),
        ("/chain", "prompt form"),
        ("aggregate/", "no tasks named"),
    ],
)
def test_bad_forms_are_refused_by_name(spec, named):
    with pytest.raises(ConfigError, match=named):
        load_task(spec)


@pytest.mark.parametrize(
    "form, count",
    [("aggregate", 1), ("aggregate", 9), ("judge_one", 0), ("judge_one", 2), ("judge_pair", 1), ("solve", 1)],
)
def test_a_wrong_number_of_candidates_is_refused(form, count):
    problem = load_task("chain").problems("test", 0, 1)[0]
    with pytest.raises(ConfigError, match="candidates"):
        render(form, problem, [""] * count)
    assert target("solve", problem, [], []) == problem.solution


# ------------------------------------------------------------------------------------------------------- written checks


@pytest.mark.parametrize(
    "name", [*TASKS, "path:form=star", "state:kind=parity", "chain:modulus=499,max_factor=30,max_steps=10"]
)
def test_the_verdict_follows_from_the_check(name):
    """Each candidate has one line: its name first, the checker's word last. The word follows from the line."""
    task = load_task(name)
    rng = np.random.default_rng(4)
    drawn = task.drawn(rng, "train", 60)
    problems = task.as_problems(drawn, rng)
    columns = [task.written(drawn, rng, rng.random(60) < 0.5) for _ in range(4)]
    for problem, *candidates in zip(problems, *columns, strict=True):
        check = task.verify(problem, candidates, "1234").split("\n")
        worked, lines = check[:-4], check[-4:]
        assert all(line.startswith(f"{i}: ") for i, line in enumerate(lines, 1)) and "" not in check
        words = [line.endswith(" good") for line in lines]
        assert words == [task.check(problem, text) for text in candidates], (problem, candidates)
        assert worked == task.work_out(problem) and not any(line.endswith((" good", " bad")) for line in worked)
        for text, line, good in zip(candidates, lines, words, strict=True):
            account = line.split(": ", 1)[1].rsplit(" ", 1)[0]
            if name == "countdown":
                goal = problem.messages[-1]["content"].split(" ")[1]
                assert good == (account.split("; ")[-1] == f"{goal} of {goal}")
            elif name == "path":
                assert good == account.endswith(f": {worked[-1]}")
            else:
                assert account == task.answer(text) and good == (worked[-1] == f"Answer: {account}")
        assert len("\n".join(check)) < 1200


def test_a_check_by_hand():
    def asked(question, answer="", solution=""):
        return Problem(({"role": "user", "content": question},), solution, answer)

    game = asked("Make 22 from 7, 4, 3, 9.")

    def verify(task, problem, *candidates):
        return load_task(task).verify(problem, candidates, "AB")

    assert (
        verify("countdown", game, "7*4=28\n9-3=6\n28-6=22\nAnswer: 22")
        == "A: 7*4=28, 3 9 28; 9-3=6, 28 6; 28-6=22, 22; 22 of 22 good"
    )
    for reply, said in (
        ("7*4=28\nAnswer: 22", "A: 7*4=28, 3 9 28; 28 of 22 bad"),
        ("7*4=27\nAnswer: 22", "A: 7*4=28 bad"),
        ("7*7=49\nAnswer: 22", "A: 7*7 bad"),
        ("7*5=35\nAnswer: 22", "A: 7*5 bad"),
        ("7/4=1\nAnswer: 22", "A: 7/4 bad"),
        ("seven\nAnswer: 22", "A: none bad"),
        ("", "A: bad"),
        ("Answer: 7*4-(9-3)", "A: good"),
        ("9+9=18\n18+4=22\nAnswer: 22", "A: 9+9 bad"),
    ):
        assert verify("countdown", game, reply) == said, reply
    roads = asked("Roads: A B, C A, D B, C E. Shortest way from D to E?")
    assert (
        verify("path", roads, "Answer: D B A C E", "Answer: D A C E")
        == "D B\nB A\nA C\nC E\n4\nA: D B, A B, C A, C E: 4 good\nB: D A bad"
    )
    for reply, last in (
        ("Answer: D B", "A: D B to B bad"),
        ("Answer: B A", "A: from B bad"),
        ("none", "A: from bad"),
        ("Answer: D B D B A C E", "A: D B, D B, D B, A B, C A, C E: 6 bad"),
        ("Answer: " + "D B " * 40 + "E", None),
    ):
        line = verify("path", roads, reply).split("\n")[-1]
        assert line.endswith("bad") and (last is None or line == last) and len(line) < 100, line
    row = asked("Row C A B. Swap 1 2, 2 3, 1 3. Write the row after every 2 swaps.", "C B A")
    assert verify("state:items=3", row, "A C B\nAnswer: C A B", "A B C\nAnswer: C B A").split("\n") == [
        "A C B",
        "A B C",
        "C B A",
        "Answer: C B A",
        "A: C A B bad",
        "B: C B A good",
    ]
    chain = asked("", "67", "12+45=57\n57+10=67\nAnswer: 67")
    assert verify("chain", chain, "12+45=57\n57+10=66\nAnswer: 66", "Answer: " + "6" * 500).split("\n") == [
        "12+45=57",
        "57+10=67",
        "Answer: 67",
        "A: 66 bad",
        f"B: {'6' * 64} bad",
    ]


def test_a_check_of_slips_and_repairs_is_the_plain_chain():
    task = load_task("reflect:slip=0.5,needless=0.5")
    for problem in task.problems("test", 0, 20):
        check = task.verify(problem, [problem.solution], "A")
        assert "Wait" not in check and check.endswith(f"Answer: {problem.answer}\nA: {problem.answer} good")
        assert len(check.split("\n")) == problem.difficulty + 2
        assert solution(problem.solution) == problem.solution  # its empty lines follow no check


@pytest.mark.parametrize("name", TASKS)
def test_aggregates_of_aggregates_show_solutions_only(name):
    """Replies with checks become candidates again: prompts, labels and targets use the solutions alone."""
    task, asks = load_task(name), load_task(f"aggregate/{name}")
    problem, wrong = candidates_of(task)
    check = task.verify(problem, wrong[:2], "12")
    first = [asks.case(problem, [problem.solution, wrong[0]]).solution, f"{check}\n\n{wrong[1]}", wrong[2]]
    again = asks.case(problem, first)
    assert again.right == (True, False, False) and again.candidates == (problem.solution, *wrong[1:3])
    shown = "\n".join(m["content"] for m in again.messages)
    assert not any(line.endswith((" good", " bad")) for line in shown.split("\n")) and all(
        text in shown for text in again.candidates
    )
    assert asks.check(again, first[0]) and not asks.check(again, first[1]) and not asks.check(again, check)
    assert asks.answer(first[0]) == task.answer(problem.solution) and asks.answer(problem.solution) == task.answer(
        problem.solution
    )


def test_a_fresh_solution_begins_where_it_does_alone():
    """The question is repeated when there is no right candidate and nothing was worked out.

    Otherwise it is not.
    """
    for name in ("countdown", "path"):
        task = load_task(name)
        problem, wrong = candidates_of(task)
        question = problem.messages[-1]["content"]
        for form, count in (("aggregate", 3), ("refine", 1)):
            asks = FormTask(form, task)
            none = asks.case(problem, wrong[:count]).solution
            one = asks.case(problem, [*wrong[: count - 1], problem.solution]).solution
            assert (f" bad\n{question}\n\n" in none) == (name == "countdown") and question not in one
            assert solution(none) == problem.solution == solution(one)


@pytest.mark.parametrize(
    "name", [*TASKS[:1], "chain:modulus=499,max_factor=30,max_steps=10", "long_add", "countdown", "path", "state"]
)
def test_checks_fit_in_a_training_row_and_in_the_room_for_replies(tokenizer, name):
    made = load_task(f"aggregate/{name}").documents(tokenizer, np.random.default_rng(6), 200)
    replies = [made.trained[a:b].sum() for a, b in zip(made.bounds, made.bounds[1:], strict=False)]
    assert np.mean(made.lengths > 1024) < 0.02 and max(replies) <= 400


def test_checked_documents_carry_loss_on_the_check(tokenizer):
    made = load_task("judge_pair/chain").documents(tokenizer, np.random.default_rng(2), 30)
    assert 0.25 < made.trained.mean() < 0.5
    assert load_task("judge_pair/chain").pool and not load_task("chain").pool
    mixed = [p for p in load_task("judge_pair/chain").problems("test", 0, 400) if p.difficulty == 1]
    assert 0.42 < len(mixed) / 400 < 0.58
