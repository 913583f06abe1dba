"""A problem as strategies see it: a conversation, its answers, how to ask about candidates, and the result.

Candidate texts are data: the default prompts fence them, and a fence inside a candidate is removed. A task with prompt
forms of its own brings its own ``Prompts``. The lab's tasks do, because the lab's models were trained on their forms.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvasir.scaling.endpoint import Messages, Sample

BOXED = re.compile(r"(?:^|\n)\s*Answer:\s*(.+?)\s*(?=\n|$)", re.IGNORECASE)
RATED = re.compile(r"^\s*([AB]):\s*(\d+)\s*$", re.MULTILINE)
FENCE = re.compile(r"</?candidate[^>]*>", re.IGNORECASE)


def last_answer(text: str) -> str | None:
    """The text after the last ``Answer:``, in lower case; None when there is none."""
    found = BOXED.findall(text)
    return found[-1].strip().lower() or None if found else None


DIGITS = tuple("0123456789")


class Prompts:
    """Conversations about candidates.

    ``most``: largest number of candidates in one prompt. ``verdicts``: the words for right and wrong. ``scale``:
    highest rating.
    """

    most = 64
    verdicts = ("Yes", "No")

    def aggregate(self, problem: Problem, candidates: Sequence[str]) -> Messages:
        """Ask for a solution, given several candidates that may be wrong."""
        return self._ask(
            problem,
            candidates,
            "Some of these candidate solutions may be wrong. Use what is right in them; where they disagree, find "
            "out who is right; if all are wrong, solve it in another way. End with a line 'Answer: ...'.",
        )

    def refine(self, problem: Problem, candidate: str) -> Messages:
        """Ask for a better solution, given one that may be wrong."""
        return self._ask(
            problem,
            [candidate],
            "This candidate solution may be wrong. Check it and write a right one. End with a line 'Answer: ...'.",
        )

    def recombine(self, problem: Problem, candidates: Sequence[str]) -> Messages:
        """Ask for a solution from any number of candidates. With none, this is the problem itself."""
        if not candidates:
            return problem.messages
        return self.refine(problem, candidates[0]) if len(candidates) == 1 else self.aggregate(problem, candidates)

    def judge_pair(self, problem: Problem, first: str, second: str) -> Messages:
        """Ask for a rating of each of two candidates."""
        return self._ask(
            problem,
            [first, second],
            "Check both candidate solutions (1 is A, 2 is B). Then rate each from 1 (surely wrong) to 10 "
            "(surely right): end with two lines, 'A: rating' and 'B: rating'.",
        )

    def ratings(self, reply: str) -> tuple[int, int] | None:
        """The two ratings of a judge's reply, 1 to ``scale``; None when it holds none."""
        found = {letter: int(number) for letter, number in RATED.findall(reply)}
        if len(found) != 2:
            return None
        first, second = (min(self.scale, max(1, found[letter])) for letter in "AB")
        return first, second

    scale = 10

    def judge_one(self, problem: Problem, candidate: str) -> Messages:
        """Ask whether one candidate is right."""
        return self._ask(
            problem, [candidate], "Is this candidate solution right? Check it, then end with a line that is Yes or No."
        )

    def verdict(self, reply: str) -> bool | None:
        """Whether a judge's reply calls the candidate right; None when it says neither."""
        last = reply.strip().rsplit("\n", 1)[-1].strip().strip(".").lower()
        return {word.lower(): good for word, good in zip(self.verdicts, (True, False))}.get(last)

    def self_evaluate(self, problem: Problem, reply: str) -> Messages:
        """Ask about the assistant's own reply, which may be unfinished; the next token is one of ``verdicts``."""
        return (
            *problem.messages,
            {"role": "assistant", "content": reply},
            {"role": "user", "content": "Is your answer right, or will it be? Reply Yes or No, nothing else."},
        )

    def judge_step(self, problem: Problem, steps: str) -> Messages:
        """Ask about the beginning of a solution; the next token is one of ``verdicts``."""
        return self.self_evaluate(problem, steps)

    def rate_step(self, problem: Problem, steps: str) -> Messages:
        """Ask for a rating of the last step of a solution's beginning; the next token is one of DIGITS."""
        return (
            *problem.messages,
            {"role": "assistant", "content": steps},
            {
                "role": "user",
                "content": "Rate your last step from 0 (wrong or useless) to 9 (right and needed). Reply with one "
                "digit, nothing else.",
            },
        )

    def solution(self, reply: str) -> str:
        """The solution in a reply to one of these conversations, without what was written before it."""
        return reply

    def plan(self, problem: Problem) -> Messages:
        """Ask for a plan as JSON: ``level`` of the problem, and ``steps`` with their difficulty and credits."""
        return self._ask(
            problem,
            [],
            "Do not solve this. Decompose it into steps: a short description of each, its difficulty from 1 to 5, and "
            "credits for the work that it needs, which sum to 100. Rate the difficulty of the whole from 1 to 5 as "
            "'level'. Reply with JSON.",
        )

    def budgeted(self, problem: Problem, steps: Sequence[str], budgets: Sequence[int]) -> Messages:
        """Ask for a solution of at most so many words a step. Without steps, ``budgets`` holds that of the whole."""
        lines = [f"### {i}\n{text}: use up to {b} words" for i, (text, b) in enumerate(zip(steps, budgets), start=1)]
        how = f"Use less than {budgets[0]} words." if not steps else "Solve it in these steps, under these headings."
        return self._ask(problem, [], "\n".join([how, *lines, "End with a line 'Answer: ...'."]))

    def section_end(self, number: int, count: int) -> str:
        """The text that ends step ``number`` (from 1) of ``count`` in a budgeted solution."""
        return f"\n### {number + 1}\n" if number < count else "\nAnswer: "

    @staticmethod
    def _ask(problem: Problem, candidates: Sequence[str], request: str) -> Messages:
        *before, question = problem.messages
        blocks = [
            f"<candidate {i}>\n{FENCE.sub('', text).strip()}\n</candidate {i}>"
            for i, text in enumerate(candidates, start=1)
        ]
        return (*before, {"role": "user", "content": "\n\n".join([str(question["content"]), *blocks, request])})


@dataclass(frozen=True)
class Problem:
    """A conversation to answer.

    ``answer``: the canonical answer of a reply, equal for equal answers; None when the reply has none. Votes compare
    these answers and never texts.
    """

    id: str
    messages: tuple[Mapping[str, Any], ...]
    answer: Callable[[str], str | None] = last_answer
    prompts: Prompts = field(default_factory=Prompts)


@dataclass(slots=True)
class Result:
    """The result of one problem.

    ``sample``: the chosen reply; None when there is none. ``votes``: number of replies by canonical answer. ``stats``:
    JSON. ``populations``: the texts alive after each loop, for studies. ``why``: what ended the run early; "" for
    nothing.
    """

    sample: Sample | None = None
    answer: str | None = None
    votes: dict[str, int] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)
    populations: list[list[str]] = field(default_factory=list)
    why: str = ""

    @property
    def text(self) -> str:
        return self.sample.text if self.sample else ""

    @property
    def agreement(self) -> float:
        """The answer's share of the votes."""
        return self.votes.get(self.answer or "", 0) / total if (total := sum(self.votes.values())) else 0.0


def votes(problem: Problem, samples: Sequence[Sample]) -> Counter[str]:
    """Count of each answer, in order of first appearance. A reply without an answer casts no vote."""
    answers = [problem.answer(s.text) for s in samples]
    return Counter(a for a in answers if a is not None)


def own_confidences(samples: Sequence[Sample]) -> list[float]:
    """The samples' confidences where they are comparable.

    All are 0 when two models wrote the samples, because models' confidences have different scales.
    """
    alike = len({s.endpoint for s in samples}) == 1
    return [(s.confidence or 0.0) if alike else 0.0 for s in samples]


def majority(problem: Problem, samples: Sequence[Sample], weights: Sequence[float] | None = None) -> Sample | None:
    """A sample with the most frequent answer, or with ``weights`` the heaviest one.

    Ties go to the higher mean confidence, then to the shorter reply, then to the first. Of the samples with that
    answer, the one with the highest confidence is returned. Confidences count only when one model wrote all samples.
    Without any answer, it is the shortest reply that ended; without samples, None.
    """
    if not samples:
        return None
    sure = own_confidences(samples)
    groups: dict[str, list[int]] = {}
    for i, sample in enumerate(samples):
        answer = problem.answer(sample.text)
        if answer is not None:
            groups.setdefault(answer, []).append(i)
    if not groups:
        return min(samples, key=lambda s: (s.finish != "stop", s.tokens))

    def rank(members: list[int]) -> tuple[float, float, float]:
        weight = float(len(members)) if weights is None else sum(weights[i] for i in members)
        return weight, sum(sure[i] for i in members) / len(members), -min(samples[i].tokens for i in members)

    best = max(groups.values(), key=rank)
    return samples[max(best, key=lambda i: (sure[i], -samples[i].tokens, -i))]


def ended(samples: Sequence[Sample]) -> list[Sample]:
    """The samples that count: those that no group's rule and no cancellation cut off."""
    return [s for s in samples if s.finish in ("stop", "length")]
