"""The lab's tasks: seeds, disjoint splits, exact checkers with negative controls, and documents equal to their text."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvasir.errors import ConfigError
from kvasir.technique import names
from kvasir_lab.lookup import load_task
from kvasir_lab.task import SPLITS, encode, split_of

NAMES = names("kvasir_lab.tasks")
ANSWERED = [name for name in NAMES if load_task(name).scored == "answer"]


def test_the_tasks_are_found_by_name():
    assert {"chain", "story", "chat", "schema", "tool"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_problems(name):
    task = load_task(name)
    assert task.problems("train", 5, 20) == task.problems("train", 5, 20)
    assert task.problems("train", 5, 20) != task.problems("train", 6, 20)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("chat", "story")])
def test_no_problem_stands_in_two_splits(name):
    task = load_task(name)
    seen = {split: {p.messages[-1]["content"] for p in task.problems(split, 0, 60)} for split in SPLITS}
    shared_turns = {"Hello!", "Thank you!", "Who are you?"} if name == "tool" else set()
    for a in SPLITS[:3]:
        for b in SPLITS[:3]:
            assert a == b or not (seen[a] & seen[b]) - shared_turns


def test_a_small_space_of_chains_is_split_without_overlap():
    """Draw nearly every problem that exists: a split by seed alone would overlap here."""
    task = load_task("chain:modulus=7,max_factor=3,min_steps=3,max_steps=3")
    seen = {split: {p.prompt for p in task.problems(split, 0, 4000)} for split in ("train", "validation", "test")}
    assert all(len(s) > 200 for s in seen.values())
    assert (
        not seen["train"] & seen["test"]
        and not seen["train"] & seen["validation"]
        and not seen["validation"] & seen["test"]
    )


def test_longer_chains_are_longer_than_any_in_training():
    task = load_task("chain:min_steps=2,max_steps=5")
    assert {p.difficulty for p in task.problems("train", 0, 300)} == {2, 3, 4, 5}
    assert min(p.difficulty for p in task.problems("longer", 0, 100)) == 6


@pytest.mark.parametrize("name", ANSWERED)
def test_the_checker_takes_the_solution_and_refuses_what_is_wrong(name):
    task = load_task(name)
    problems = task.problems("test", 1, 40)
    for problem in problems:
        assert task.check(problem, problem.solution)
        for wrong in (
            "",
            "Answer:",
            problem.solution[:-1],
            problem.solution + "1",
            "{",
            "[1]",
            "<tool_call>\n</tool_call>",
            "\0",
            "nan",
        ):
            assert not task.check(problem, wrong), (problem.solution, wrong)


@pytest.mark.parametrize("name", ["chain", "schema", "tool"])
def test_another_problems_solution_is_refused(name):
    """The negative control of every score: shuffled replies must fail."""
    task = load_task(name)
    problems = task.problems("test", 2, 60)
    passed = sum(
        task.check(p, q.solution)
        for p, q in zip(problems, problems[1:] + problems[:1], strict=True)
        if p.answer != q.answer
    )
    assert passed <= 3


def test_the_chain_oracle_is_right_by_plain_arithmetic():
    task = load_task("chain")
    for problem in task.problems("test", 3, 50):
        head, *steps = problem.messages[-1]["content"].removeprefix("Compute modulo 97: start ").split("; ")
        value = int(head)
        for step in steps:
            value = {"+": value + int(step[1:]), "-": value - int(step[1:]), "*": value * int(step[1:])}[step[0]] % 97
        assert problem.answer == str(value) and len(steps) == problem.difficulty


def test_an_answer_hidden_among_others_does_not_count():
    task = load_task("chain")
    problem = task.problems("test", 4, 1)[0]
    assert not task.check(problem, f"Answer: {problem.answer}\nAnswer: {problem.answer}")
    assert not task.check(problem, problem.solution + "\nI hope this helps")


def test_schema_checks_types_and_fields():
    task = load_task("schema")
    problem = next(
        p for p in task.problems("test", 0, 50) if p.answer.endswith("#types") and len(json.loads(p.solution)) > 1
    )
    record = json.loads(problem.solution)
    assert not task.check(problem, json.dumps({**record, "more": 1}))
    assert not task.check(problem, json.dumps(dict(list(record.items())[1:])))
    assert not task.check(problem, json.dumps({k: None for k in record}))
    assert task.check(problem, json.dumps(dict(reversed(record.items()))))


@pytest.mark.parametrize(
    "spec", ["chain", "chain:modulus=101,max_factor=100,min_steps=1,max_steps=3", "chain:modulus=7,max_factor=6"]
)
def test_vectorised_chain_documents_are_the_tokenised_text(tokenizer, spec):
    task = load_task(spec)
    made = task.documents(tokenizer, np.random.default_rng(0), 60)
    assert len(made) == 60
    for i in range(60):
        cut = slice(made.bounds[i], made.bounds[i + 1])
        text = tokenizer.decode(made.ids[cut].tolist(), skip_special_tokens=False)
        assert tokenizer.encode(text, add_special_tokens=False).ids == made.ids[cut].tolist()
        question, reply = text.split("<|im_start|>assistant\n")
        assert tokenizer.decode(made.ids[cut][made.trained[cut]].tolist(), skip_special_tokens=False) == reply
        value, *_ = question.split("start ")[1].split(";")
        for line in reply.split("\n")[:-1]:
            left, result = line.split("=")
            assert left.startswith(value) and eval(left) % task.config.modulus == int(result)  # noqa: S307
            value = result
        assert reply.endswith(f"Answer: {value}<|im_end|>")


def test_training_documents_hold_no_test_problem(tokenizer):
    task = load_task("chain:modulus=7,max_factor=3,min_steps=2,max_steps=2")
    test = {p.messages[-1]["content"] for p in task.problems("test", 0, 500)}
    made = task.documents(tokenizer, np.random.default_rng(1), 3000)
    texts = tokenizer.decode_batch(
        [made.ids[a:b].tolist() for a, b in zip(made.bounds, made.bounds[1:], strict=False)], skip_special_tokens=False
    )
    asked = {t.split("user\n")[1].split("<|im_end|>")[0] for t in texts}
    assert len(asked) > 500 and not asked & test


@pytest.mark.parametrize("name", ["story", "chat", "schema", "tool"])
def test_documents_carry_loss_on_the_last_reply(tokenizer, name):
    task = load_task(name)
    made = task.documents(tokenizer, np.random.default_rng(0), 20)
    for i in range(20):
        cut = slice(made.bounds[i], made.bounds[i + 1])
        learned = tokenizer.decode(made.ids[cut][made.trained[cut]].tolist(), skip_special_tokens=False)
        assert learned.endswith("<|im_end|>") and "user\n" not in learned
        assert made.ids[cut][0] == tokenizer.token_to_id("<bos>") and not made.trained[cut][0]


def test_take_and_join_keep_documents_whole(tokenizer):
    made = encode(tokenizer, [[("<bos>", False), (f"number {i}", True)] for i in range(5)])
    picked = made.take(np.array([3, 1]))
    both = made.join([picked, made])
    assert len(both) == 7
    text = [tokenizer.decode(both.ids[a:b].tolist()) for a, b in zip(both.bounds, both.bounds[1:], strict=False)]
    assert text == ["number 3", "number 1", *(f"number {i}" for i in range(5))]


def test_prose_windows_have_the_asked_length_and_come_from_the_books(tokenizer):
    task = load_task("story:form=prose,length=64")
    made = task.documents(tokenizer, np.random.default_rng(0), 30, "validation")
    assert (made.lengths == 64).all()
    assert made.trained.reshape(30, 64)[:, 1:].all() and not made.trained.reshape(30, 64)[:, 0].any()


def test_held_out_prose_is_not_trained_on():
    from kvasir_lab.tasks.story import books

    train = {p for book in books("train") for p in book if len(p) > 150}
    for split in ("validation", "test"):
        assert not train & {p for book in books(split) for p in book if len(p) > 150}


def test_stories_are_about_what_was_asked():
    for problem in load_task("story").problems("train", 0, 100):
        question = problem.messages[0]["content"]
        assert len(problem.solution) > 20
        if question == "Tell me a story about a fox.":
            assert "fox" in problem.solution.lower()


@pytest.mark.parametrize(
    "spec, named",
    [
        ("chian", "chain"),
        ("chain:stesp=3", "stesp"),
        ("chain:modulus=3", "modulus"),
        ("chain:min_steps=9,max_steps=3", "min_steps"),
        ("chain:max_factor=97", "max_factor"),
        ("chain:modulus=x", "modulus"),
        ("story:form=poem", "form"),
        ("story:length=1", "length"),
        ("schema:fields=0", "fields"),
        ("chat:a=1", "options"),
    ],
)
def test_bad_specs_are_refused_by_name(spec, named):
    with pytest.raises(ConfigError, match=named):
        load_task(spec)


def test_bad_splits_and_exhausted_dials_are_refused():
    with pytest.raises(ConfigError, match="split"):
        load_task("chain").problems("tset", 0, 1)
    with pytest.raises(ConfigError, match="split"):
        load_task("schema").problems("tset", 0, 1)


def test_split_of_is_fixed_for_ever():
    """A change here would leak test problems into models that are trained already."""
    counts = {s: sum(split_of(str(i)) == s for i in range(6400)) for s in ("train", "validation", "test")}
    assert 60 < counts["test"] < 140 and 60 < counts["validation"] < 140
    assert [i for i in range(300) if split_of(str(i)) == "test"] == [46, 197, 232, 277, 278]


def test_a_dial_that_leaves_nothing_to_hold_out_is_refused(monkeypatch):
    task = load_task("chain:modulus=5,max_factor=2,min_steps=1,max_steps=1")
    monkeypatch.setattr(task, "key", lambda drawn: np.full(len(drawn), 5, dtype=np.uint64))
    with pytest.raises(ConfigError, match="too few"):
        task.problems("test", 0, 3)
