"""Prompt forms on the tasks' problems: besides solving, a model aggregates, judges, rates or refines solutions.

``aggregate/chain:max_steps=8`` is a task like any other (`load_task`). Its candidates are right solutions and slips
written by the task, in every mix of right and wrong. `FormTask.case` takes a model's real replies instead. A form's
``difficulty`` is the number of right candidates, so scores can be split by it: a pair of difficulty 1 is mixed.

``judge_step`` asks what ``self_evaluate`` asks, about the first lines of a solution: its documents train a process
reward model.

Replies start with a written check (`Task.verify`), except in ``solve``, ``self_evaluate`` and ``judge_step``. After it,
a judge writes a verdict; aggregating and refining write a whole solution below an empty line (`solution` extracts it).
Without the check, a small model copies a candidate, right or wrong.

Shape suffixes: N problems, J candidates of a problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvasir.errors import ConfigError, nearest
from kvasir_lab.chat import Message, Segment
from kvasir_lab.sheet import SYSTEMS
from kvasir_lab.task import VERDICTS, Documents, Problem, Split, Task, encode, generator

if TYPE_CHECKING:
    from tokenizers import Tokenizer

RATINGS = ("2", "9")  # The rating of a wrong solution and of a right one, from 1 to 9.
YES_NO = ("No", "Yes")


@dataclass(frozen=True, slots=True)
class Form:
    """Layout of candidates in the prompt.

    ``heads``: the line above each candidate. ``tail``: the request after the last candidate. ``least``: smallest number
    of candidates. ``own``: the candidate is the assistant's own turn, and the request is the user's next turn.
    ``names``: what the check calls the candidates; empty when the reply has no check.
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
    "judge_step": Form(("",), "Is your answer right? Reply Yes or No.", own=True),
    "refine": Form(("Attempt:",), "This attempt may be wrong. Check it, then write a right solution.", names=("A",)),
}
SOLVING = ("solve", "aggregate", "refine")  # Forms whose reply holds a solution.
POOL = 5000  # Training documents of a form, made once: checks are written as text, which is slower than a sheet.
DRAWN = 4  # Largest number of candidates in an aggregate prompt of the task's own making; the smallest is 2.


@dataclass(frozen=True, slots=True)
class FormProblem(Problem):
    """A form's problem: ``origin`` is the task's problem; ``right`` says which of the ``candidates`` are right."""

    origin: Problem | None = None
    candidates: tuple[str, ...] = ()
    right: tuple[bool, ...] = ()


def find(name: str) -> Form:
    """The form called ``name``. Raises ConfigError with the names that exist."""
    if name not in FORMS:
        raise ConfigError(f"no prompt form named '{name}'; there are {', '.join(FORMS)}.{nearest(name, FORMS)}")
    return FORMS[name]


def render(name: str, problem: Problem, candidates: Sequence[str]) -> tuple[Message, ...]:
    """The messages that ask about ``problem`` and the candidates in the form ``name``.

    Of each candidate only its solution is shown. Raises ConfigError for a wrong number of candidates.
    """
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
    """The reply to learn, after its check: a verdict or a right solution.

    The solution is a right candidate if there is one, otherwise the task's own.
    """
    if name in ("judge_one", "self_evaluate", "judge_step"):
        return YES_NO[right[0]]
    if name == "judge_pair":
        return "\n".join(f"{letter}: {RATINGS[ok]}" for letter, ok in zip("AB", right, strict=True))
    return next((text for text, ok in zip(candidates, right, strict=True) if ok), problem.solution)


def solution(reply: str) -> str:
    """Remove the check from a reply. A text without a check stays as it is.

    Answers are read from the result, and further prompts show it.
    """
    check, gap, rest = reply.strip().partition("\n\n")
    return rest.strip() if gap and any(line.endswith(VERDICTS) for line in check.split("\n")[-2:]) else reply


def verdict(reply: str) -> str:
    """The last line of a judgement."""
    return reply.strip().rsplit("\n", 1)[-1]


def ratings(reply: str) -> tuple[int, int] | None:
    """The two ratings (1 to 9) at the end of a pair's judgement; None when it ends otherwise."""
    lines = reply.strip().split("\n")[-2:]
    if len(lines) != 2:
        return None
    numbers = [line.removeprefix(head) for line, head in zip(lines, ("A: ", "B: "), strict=True)]
    if all(n in tuple("123456789") and line != n for n, line in zip(numbers, lines, strict=True)):
        return int(numbers[0]), int(numbers[1])
    return None


def opened(case: Problem, rng: np.random.Generator) -> list[Segment]:
    """A case as the segments of a training document; some get a system prompt, as in all other documents."""
    system = SYSTEMS[rng.integers(len(SYSTEMS))]
    if system:
        case = replace(case, messages=({"role": "system", "content": system}, *case.messages))
    return case.segments()[:-1]


def _begun(rng: np.random.Generator, text: str) -> str:
    """The first lines of a solution, at least one."""
    lines = text.splitlines(keepends=True)
    return "".join(lines[: rng.integers(1, len(lines) + 1)])


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
        """The form's problem for real candidate texts, labelled by the task's checker.

        Raises ConfigError for a wrong number of candidates.
        """
        messages, candidates = render(self.form, problem, candidates), [solution(text) for text in candidates]
        right = tuple(
            self.inner.check(problem, text) or self.form == "judge_step" and problem.solution.startswith(text)
            for text in candidates
        )
        reply = target(self.form, problem, candidates, right)
        if self.shape.names:
            check = self.inner.verify(problem, candidates, self.shape.names)
            if self.form in SOLVING and not any(right) and not self.inner.work_out(problem):
                # There is nothing to copy and nothing was worked out. Repeating the question lets solving begin as it
                # does without candidates.
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
        if self.form == "judge_step":
            return [self.case(origin, [_begun(rng, text)]) for origin, text in zip(origins, texts[0], strict=True)]
        return [self.case(origin, [column[i] for column in texts[: size[i]]]) for i, origin in enumerate(origins)]

    def draw(self, rng: np.random.Generator, split: Split) -> Problem:
        return self.problems(split, int(rng.integers(1 << 62)), 1)[0]

    def belongs(self, problem: Problem, split: Split) -> bool:
        return True  # the inner task's problems are split

    def _mix(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Number of candidates of each problem [N], and which are wrong [N, J], in random order.

        Every number of right candidates is equally likely, except that half of the pairs to judge are mixed, and that
        most solutions whose beginning is judged end wrong.
        """
        most = min(self.shape.most, DRAWN)
        size = rng.integers(self.shape.least, most + 1, count)
        right = rng.integers(0, size + 1)
        if self.form == "judge_pair":
            right = np.where(rng.random(count) < 0.25, 1, right)
        if self.form == "judge_step":  # half of the beginnings of a wrong solution are right
            right = (rng.random(count) < 0.15).astype(np.int64)
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
        """Whether ``reply`` is right in this form.

        The task's own checker decides about solutions. A verdict must be right. In a mixed pair the right solution must
        get the higher rating; two right ones must both be above 5, two wrong ones both below.
        """
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
