"""All tasks written by numpy: ids equal the tokenised text, splits and dials work, and checkers refuse slips."""

from __future__ import annotations

import numpy as np
import pytest

from kvasir.errors import ConfigError
from kvasir.technique import names
from kvasir_lab.lookup import load_task
from kvasir_lab.sheet import Sheet, SheetTask, fold
from kvasir_lab.task import Task

SPECS = [
    "chain",
    "chain:modulus=11,max_factor=3",
    "reflect",
    "reflect:slip=0.5,needless=0.5,repair=0.5",
    "long_add",
    "long_add:max_digits=4,max_terms=5",
    "two_part",
    "two_part:easy=1,hard=1",
    "countdown",
    "countdown:min_numbers=2,max_numbers=6",
    "path",
    "path:extra=0",
    "path:form=star",
    "path:form=star,back=false,arms=4",
    "facts",
    "facts:think=yes,max_hops=6",
    "facts:think=no,min_facts=60,max_facts=90",
    "needle",
    "needle:asks=4",
    "needle:filler=pairs,asks=2,length=300",
    "needle:keys=1,digits=1",
    "state",
    "state:items=9",
    "state:kind=parity",
    "style",
    "template",
    "template:choices=3",
]
SOLVED = [spec for spec in SPECS if not spec.startswith("template")]


def texts_of(tokenizer, made) -> list[str]:
    return tokenizer.decode_batch(
        [made.ids[a:b].tolist() for a, b in zip(made.bounds, made.bounds[1:], strict=False)], skip_special_tokens=False
    )


def test_every_task_but_the_old_text_ones_is_covered_here():
    written = {name for name in names("kvasir_lab.tasks") if isinstance(load_task(name), SheetTask)}
    assert written == {spec.split(":")[0] for spec in SPECS}


@pytest.mark.parametrize("spec", SPECS)
def test_documents_are_the_tokenised_text_with_loss_on_the_reply(tokenizer, spec):
    made = load_task(spec).documents(tokenizer, np.random.default_rng(3), 25)
    assert len(made) == 25 and made.ids.dtype == np.int32
    for i, text in enumerate(texts_of(tokenizer, made)):
        cut = slice(made.bounds[i], made.bounds[i + 1])
        assert tokenizer.encode(text, add_special_tokens=False).ids == made.ids[cut].tolist()
        assert text.startswith("<bos><|im_start|>") and text.count("<|im_start|>user\n") == 1
        assert (
            tokenizer.decode(made.ids[cut][made.trained[cut]].tolist(), skip_special_tokens=False)
            == text.split("<|im_start|>assistant\n")[1]
        )


@pytest.mark.parametrize("spec", SPECS)
def test_training_documents_are_the_problems_own_text(tokenizer, spec):
    """`problems` and `documents` come from one rendering, so what is asked is what was trained."""
    task = load_task(spec)
    problem = task.problems("train", 0, 1)[0]
    text = texts_of(tokenizer, task.documents(tokenizer, np.random.default_rng(0), 1))[0]
    assert problem.prompt.split("user\n")[1][:4] == text.split("user\n")[1][:4]
    assert tokenizer.encode("".join(t for t, _ in problem.segments()), add_special_tokens=False).ids[
        0
    ] == tokenizer.token_to_id("<bos>")


@pytest.mark.parametrize("spec", SPECS)
def test_splits_do_not_share_a_problem_and_seeds_decide(tokenizer, spec):
    task = load_task(spec)
    asked = {
        split: {p.messages[-1]["content"] for p in task.problems(split, 0, 40)}
        for split in ("train", "validation", "test")
    }
    assert (
        not asked["train"] & asked["test"]
        and not asked["train"] & asked["validation"]
        and not asked["validation"] & asked["test"]
    )
    again = load_task(spec)
    assert task.problems("test", 4, 10) == again.problems("test", 4, 10) != task.problems("test", 5, 10)
    a, b = (t.documents(tokenizer, np.random.default_rng(1), 5).ids for t in (task, again))
    assert np.array_equal(a, b)


@pytest.mark.parametrize(
    "spec",
    [
        "state:kind=parity,min_steps=4,max_steps=6,max_every=2",
        "countdown:max_number=5,max_numbers=3",
        "long_add:min_digits=1,max_digits=1,max_terms=2",
    ],
)
def test_a_small_space_is_split_without_overlap(tokenizer, spec):
    """Draw nearly every problem that exists: a split by seed alone would overlap here."""
    task = load_task(spec)
    held = {p.messages[-1]["content"] for p in task.problems("test", 0, 300)}
    made = texts_of(tokenizer, task.documents(tokenizer, np.random.default_rng(0), 3000))
    asked = {t.split("user\n")[1].split("<|im_end|>")[0] for t in made}
    assert held and len(asked) > len(held) and not asked & held


@pytest.mark.parametrize("spec", SOLVED)
def test_solutions_pass_and_slips_are_refused(spec):
    """The negative control of every checker, and of every candidate that a judge is trained on."""
    task = load_task(spec)
    rng = np.random.default_rng(9)
    drawn = task.drawn(rng, "test", 60)
    problems = task.as_problems(drawn, rng)
    right, wrong = task.written(drawn, rng), task.written(drawn, rng, np.ones(60, dtype=bool))
    for problem, good, bad in zip(problems, right, wrong, strict=True):
        assert task.check(problem, problem.solution) and task.check(problem, good)
        assert not task.check(problem, bad), (problem.messages[-1]["content"], bad)
        assert "Answer:" in bad and abs(len(bad) - len(good)) < 200


@pytest.mark.parametrize("spec", SOLVED)
def test_checkers_never_raise_and_refuse_noise(spec):
    task = load_task(spec)
    problem = task.problems("test", 1, 1)[0]
    noise = (
        "",
        "\0",
        "Answer:",
        "Answer: ",
        "Answer: \n",
        "Answer: ()",
        "Answer: 1/0",
        "Answer: 9**9**9",
        "Answer: " + "(" * 5000,
        "Answer: -",
        "nan",
        "Answer: A A",
        "Answer:  ",
        "1+1=3\nAnswer: 3",
        "=\n=\n",
        "Answer: ٣",
        "Answer: " + "9" * 5000,
        problem.solution + "\n.",
        "💥" * 50,
        problem.solution + "\n" + problem.solution,
        problem.solution.replace("Answer", "answer"),
        problem.solution + " 1",
    )
    for reply in noise:
        assert not task.check(problem, reply), reply
        answer = task.answer(reply)
        assert answer is None or isinstance(answer, str)


@pytest.mark.parametrize("spec", SOLVED)
def test_equal_answers_have_one_canonical_form(spec):
    task = load_task(spec)
    for problem in task.problems("test", 2, 10):
        assert task.answer(problem.solution) == task.answer(f"  {problem.solution}\n") == problem.answer
        assert task.answer(problem.solution.rsplit("\n", 1)[0] if "\n" in problem.solution else "") is None


@pytest.mark.parametrize(
    "spec", [s for s in SPECS if s not in ("path:form=star,back=false,arms=4", "countdown:min_numbers=2,max_numbers=6")]
)
def test_the_longer_split_is_harder_than_training(spec):
    task = load_task(spec)
    trained = max(p.difficulty for p in task.problems("train", 0, 100))
    assert min(p.difficulty for p in task.problems("longer", 0, 10)) > trained or "needle" in spec


@pytest.mark.parametrize(
    "spec, named",
    [
        ("long_add:min_digits=0", "min_digits"),
        ("long_add:max_digits=40", "max_digits"),
        ("long_add:max_terms=1", "max_terms"),
        ("reflect:slip=2", "slip"),
        ("reflect:modulus=2", "reflect: modulus"),
        ("countdown:max_numbers=9", "max_numbers"),
        ("countdown:max_number=2", "max_number"),
        ("countdown:max_target=5000", "max_target"),
        ("path:form=ring", "form"),
        ("path:places=5", "places"),
        ("path:form=star,arms=12", "arms"),
        ("path:min_depth=1", "min_depth"),
        ("facts:think=maybe", "think"),
        ("facts:min_facts=2", "min_facts"),
        ("facts:max_hops=0", "max_hops"),
        ("needle:depth=2", "depth"),
        ("needle:min_length=10", "min_length"),
        ("needle:length=100", "length"),
        ("needle:filler=hay", "filler"),
        ("needle:asks=9", "asks"),
        ("needle:digits=0", "digits"),
        ("needle:keys=99", "keys"),
        ("state:kind=x", "kind"),
        ("state:items=2", "items"),
        ("state:min_every=0", "min_every"),
        ("state:max_steps=1", "max_steps"),
        ("template:choices=99", "choices"),
        ("template:min_sentences=0", "min_sentences"),
        ("template:senteces=3", "min_sentences"),
        ("coutdown", "countdown"),
    ],
)
def test_bad_dials_are_refused_by_name(spec, named):
    with pytest.raises(ConfigError, match=named):
        load_task(spec)


def test_a_task_says_when_a_dial_leaves_too_few(monkeypatch):
    task = load_task("path")
    monkeypatch.setattr(task, "key", lambda drawn: np.full(len(drawn), 5, dtype=np.uint64))
    with pytest.raises(ConfigError, match="too few"):
        task.problems("test", 0, 1)


def test_stars_too_big_for_the_letters_have_no_longer_split():
    with pytest.raises(ConfigError, match="letters"):
        load_task("path:form=star,arms=4").problems("longer", 0, 1)


def test_a_sheet_is_the_same_as_text_and_as_tokens(tokenizer):
    sheet = Sheet(3)
    sheet.put("Add ")
    sheet.put_number(np.array([7, 120, -1]))
    sheet.put_number(np.array([7, 12, 0]), np.array([True, False, True]), digits=3)
    sheet.put("!\n", np.array([False, True, True]))
    start = sheet.width
    inner = Sheet(3)
    inner.put_choice((" king", " wolf"), np.array([[0, 1], [1, -1], [-1, -1]]))
    sheet.put_sheet(inner)
    assert sheet.texts() == ["Add 7007 king wolf", "Add 120!\n wolf", "Add 000!\n"]
    made = sheet.documents(tokenizer, [(start, sheet.width)])
    assert texts_of(tokenizer, made) == sheet.texts()
    assert made.trained.sum() == 3 and made.trained[made.bounds[1] - 2 : made.bounds[1]].all()


def test_a_sheets_key_depends_on_the_text_and_not_on_the_layout():
    def key(spread: bool) -> int:
        sheet = Sheet(1)
        sheet.put("Add ")
        if spread:
            sheet.put("never", np.array([False]))
        sheet.put_number(np.array([12]))
        return int(sheet.key()[0])

    assert key(False) == key(True)
    assert len(set(fold(np.arange(4000).reshape(1000, 4)).tolist())) == 1000
    assert fold(np.array([[1, 2]]))[0] != fold(np.array([[2, 1]]))[0]


def test_only_tasks_with_candidates_may_be_judged():
    assert not Task.candidates and load_task("chain").candidates and not load_task("template").candidates
