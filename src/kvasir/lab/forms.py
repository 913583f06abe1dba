"""Prompt forms on the tasks' problems: besides solving, a model is asked to aggregate, judge, rate or refine solutions.

``aggregate/chain:max_steps=8`` is a task like any other (`load_task`). Its candidates are the task's own right solutions and
slips, in every mix of right and wrong; `FormTask.case` does the same with real replies of a model. A form's ``difficulty`` is
the number of right candidates, so that scores can be told apart by it: a pair is mixed where it is 1.

All forms but one are answered with a written check first (`Task.verify`): judging ends with a verdict after it, aggregating and
refining with a whole solution below an empty line (`solution` takes it out). A small model that is to write a solution at once copies a
candidate, right or not.

Shape suffixes: N problems, J candidates of a problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvasir.errors import ConfigError, nearest
from kvasir.lab.chat import Message, Segment
from kvasir.lab.sheet import SYSTEMS
from kvasir.lab.task import VERDICTS, Documents, Problem, Split, Task, encode, generator

if TYPE_CHECKING:
    from tokenizers import Tokenizer

RATINGS = ("2", "9")  # of a wrong and of a right solution
YES_NO = ("No", "Yes")


@dataclass(frozen=True, slots=True)
class Form:
    """How candidates stand in the prompt. ``heads``: the line above each candidate; ``tail``: the request after the last.

    ``least``: fewest candidates. ``own``: the candidate is the assistant's own turn, and the request the user's next one.
    ``names``: what the check calls the candidates; none where the reply has no check.
    """

    heads: tuple[str, ...]
    tail: str
    least: int = 1
    own: bool = False
    names: tuple[str, ...] = ()

    @property
    def most(self) -> int:
        return len(self.heads)


FORMS: dict[str, Form] = {
    "solve": Form((), "", 0),
    "aggregate": Form(
        tuple(f"Candidate {i}:" for i in range(1, 9)),
        "Candidates may be wrong. Check them, then solve the problem.",
        2,
        names=tuple("12345678"),
    ),
    "judge_one": Form(("Solution:",), "Is this solution right? Check it, then write Yes or No.", names=("A",)),
    "judge_pair": Form(
        ("Solution A:", "Solution B:"), "Check both solutions, then rate them from 1 to 9.", 2, names=("A", "B")
    ),
    "self_evaluate": Form(("",), "Is your answer right? Reply Yes or No.", own=True),
    "refine": Form(("Attempt:",), "This attempt may be wrong. Check it, then write a right solution.", names=("A",)),
}
SOLVING = ("solve", "aggregate", "refine")  # the forms whose reply holds a solution
POOL = 5000  # training documents of a form, written once: checks are text, not a sheet
DRAWN = 4  # candidates of an aggregate prompt in training and by default: 2 to this many


@dataclass(frozen=True, slots=True)
class FormProblem(Problem):
    """``origin``: the task's problem; ``candidates`` and which of them are ``right``."""

    origin: Problem | None = None
    candidates: tuple[str, ...] = ()
    right: tuple[bool, ...] = ()


def find(name: str) -> Form:
    """The form of that name. Raises ConfigError with the names there are."""
    if name not in FORMS:
        raise ConfigError(f"no prompt form named '{name}'; there are {', '.join(FORMS)}.{nearest(name, FORMS)}")
    return FORMS[name]


def render(name: str, problem: Problem, candidates: Sequence[str]) -> tuple[Message, ...]:
    """The messages that ask ``name`` about ``problem`` and the candidates' texts, of which only the solutions are shown. Raises
    ConfigError for a wrong number of them."""
    form, candidates = find(name), [solution(text) for text in candidates]
    if not form.least <= len(candidates) <= form.most:
        raise ConfigError(f"the form '{name}' takes {form.least} to {form.most} candidates, got {len(candidates)}")
    *before, question = problem.messages
    if name == "solve":
        return problem.messages
    if form.own:
        return (
            *problem.messages,
            {"role": "assistant", "content": candidates[0]},
            {"role": "user", "content": form.tail},
        )
    parts = [
        question["content"],
        *(f"{head}\n{text}" for head, text in zip(form.heads, candidates, strict=False)),
        form.tail,
    ]
    return (*before, {"role": "user", "content": "\n\n".join(parts)})


def target(name: str, problem: Problem, candidates: Sequence[str], right: Sequence[bool]) -> str:
    """The reply to learn, after its check: a verdict, or a right solution: a right candidate if there is one, else the task's own."""
    if name in ("judge_one", "self_evaluate"):
        return YES_NO[right[0]]
    if name == "judge_pair":
        return "\n".join(f"{letter}: {RATINGS[ok]}" for letter, ok in zip("AB", right, strict=True))
    return next((text for text, ok in zip(candidates, right, strict=True) if ok), problem.solution)


def solution(reply: str) -> str:
    """A reply without the check before it: what is read of it, and what a further prompt shows. Any other text stays as it is."""
    check, gap, rest = reply.strip().partition("\n\n")
    return rest.strip() if gap and any(line.endswith(VERDICTS) for line in check.split("\n")[-2:]) else reply


def verdict(reply: str) -> str:
    """The last line: what a judgement comes to."""
    return reply.strip().rsplit("\n", 1)[-1]


def ratings(reply: str) -> tuple[int, int] | None:
    """The two ratings, 1 to 9, that end a pair's judgement; None when it ends otherwise."""
    lines = reply.strip().split("\n")[-2:]
    if len(lines) != 2:
        return None
    numbers = [line.removeprefix(head) for line, head in zip(lines, ("A: ", "B: "), strict=True)]
    if all(n in tuple("123456789") and line != n for n, line in zip(numbers, lines, strict=True)):
        return int(numbers[0]), int(numbers[1])
    return None


def opened(case: Problem, rng: np.random.Generator) -> list[Segment]:
    """A case as a training document; some have a system prompt before the question, as everywhere."""
    system = SYSTEMS[rng.integers(len(SYSTEMS))]
    if system:
        case = replace(case, messages=({"role": "system", "content": system}, *case.messages))
    return case.segments()[:-1]


class FormTask(Task):
    """One prompt form on one task's problems."""

    def __init__(self, form: str, inner: Task) -> None:
        super().__init__(inner.config)
        self.form, self.inner = form, inner
        self.pool = POOL if form != "solve" else 0  # type: ignore[misc]
        self.shape = find(form)
        self.name = f"{form}/{inner.name}"  # type: ignore[misc]
        if not inner.candidates:
            raise ConfigError(
                f"the task '{inner.name}' has no prompt forms: it cannot write right and wrong candidates of its own"
            )

    # -------------------------------------------------------------------------------------------------------- problems

    def case(self, problem: Problem, candidates: Sequence[str]) -> FormProblem:
        """The form's problem for real candidate texts, labelled by the task's checker. Raises ConfigError for a wrong number."""
        messages, candidates = render(self.form, problem, candidates), [solution(text) for text in candidates]
        right = tuple(self.inner.check(problem, text) for text in candidates)
        reply = target(self.form, problem, candidates, right)
        if self.shape.names:
            check = self.inner.verify(problem, candidates, self.shape.names)
            if self.form in SOLVING and not any(right) and not self.inner.work_out(problem):
                # Nothing to copy and nothing worked out: the question, said again, is where solving begins as it does alone.
                check = f"{check}\n{problem.messages[-1]['content']}"
            reply = check + ("\n\n" if self.form in SOLVING else "\n") + reply
        return FormProblem(
            messages,
            reply,
            self.answer(reply) or "",
            sum(right),
            problem.tools,
            self.shape.own,
            problem,
            tuple(candidates),
            right,
        )

    def problems(self, split: Split, seed: int, count: int) -> list[Problem]:
        return self._cases(generator(split, seed), split, count)

    def _cases(self, rng: np.random.Generator, split: Split, count: int) -> list[Problem]:
        drawn = self.inner.drawn(rng, split, count)
        origins = self.inner.as_problems(drawn, rng)
        size, wrong = self._mix(rng, count)
        texts = [self.inner.written(drawn, rng, wrong[:, j]) for j in range(wrong.shape[1])]
        return [self.case(origin, [column[i] for column in texts[: size[i]]]) for i, origin in enumerate(origins)]

    def draw(self, rng: np.random.Generator, split: Split) -> Problem:
        return self.problems(split, int(rng.integers(1 << 62)), 1)[0]

    def belongs(self, problem: Problem, split: Split) -> bool:
        return True  # the inner task's problems are split

    def _mix(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """How many candidates [N], and which are wrong [N, J]: every number of right ones equally likely, in any order; of the pairs
        to judge, half are mixed."""
        most = min(self.shape.most, DRAWN)
        size = rng.integers(self.shape.least, most + 1, count)
        right = rng.integers(0, size + 1)
        if self.form == "judge_pair":
            right = np.where(rng.random(count) < 0.25, 1, right)
        order = np.argsort(np.where(np.arange(most) < size[:, None], rng.random((count, most)), 2.0), axis=1)
        wrong = np.ones((count, most), dtype=bool)
        np.put_along_axis(wrong, order, np.arange(most) >= right[:, None], 1)
        return size, wrong

    # ---------------------------------------------------------------------------------------------------------- checks

    def answer(self, reply: str) -> str | None:
        if self.form in SOLVING:
            return self.inner.answer(solution(reply))
        if self.form == "judge_pair":
            rated = ratings(reply)
            return None if rated is None else f"{rated[0]} {rated[1]}"
        last = verdict(reply)
        return last if last in YES_NO else None

    def check(self, problem: Problem, reply: str) -> bool:
        """Solutions by the task's own checker; verdicts must be right; of a mixed pair the right one must be rated higher,
        two right ones both above 5, two wrong ones both below."""
        assert isinstance(problem, FormProblem) and problem.origin is not None
        if self.form in SOLVING:
            return self.inner.check(problem.origin, solution(reply))
        if self.form != "judge_pair":
            return verdict(reply) == YES_NO[problem.right[0]]
        rated = ratings(reply)
        if rated is None:
            return False
        if problem.right[0] == problem.right[1]:
            return all((r > 5) == problem.right[0] and r != 5 for r in rated)
        return (rated[0] > rated[1]) == problem.right[0] and rated[0] != rated[1]

    def notes(self, problem: Problem) -> list[str]:
        return self.inner.notes(problem) if self.form == "solve" else []

    # ------------------------------------------------------------------------------------------------------- documents

    def documents(
        self, tokenizer: Tokenizer, rng: np.random.Generator, count: int, split: Split = "train"
    ) -> Documents:
        if self.form == "solve":
            return self.inner.documents(tokenizer, rng, count, split)
        return encode(tokenizer, [opened(case, rng) for case in self._cases(rng, split, count)])
