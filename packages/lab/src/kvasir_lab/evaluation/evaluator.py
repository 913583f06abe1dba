"""Quality through the engine: a model answers unseen problems of the lab's tasks, under any switches of the engine.

The task's exact checker scores answers: one greedy reply, or a pool of samples. Prose is scored by the log-probability
of its tokens. Problems, prompts and noise depend on the plan only. So two configurations get the same problems and the
same noise, and any difference is theirs. `kvasir_lab.evaluation.scores` turns outcomes into figures.

Shape suffixes: N problems, S samples a problem.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvasir.errors import ConfigError
from kvasir.types import SamplingParams
from kvasir_lab import tokenizer as lab_tokenizer
from kvasir_lab.evaluation.replies import Replies, choose
from kvasir_lab.forms import DRAWN as MOST_CANDIDATES
from kvasir_lab.forms import FormTask
from kvasir_lab.forms import find as find_form
from kvasir_lab.lookup import load_task
from kvasir_lab.task import SPLITS, Problem, Split, Task

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from kvasir.api.offline.llm import LLM
    from kvasir.api.offline.outputs import RequestOutput

SAMPLING_TEMPERATURE = 0.8
END = "<|im_end|>"
STRETCH = 32  # Tokens of a stretch of prose, the unit in which repetition is counted.
# Most times that a stretch may occur on average. Drawing n times from n with replacement gives 1.58.
MOST_REPEATED = 1.5


@dataclass(frozen=True)
class Plan:
    """The questions of an evaluation: ``count`` problems of every task in the prompt form ``form``.

    ``samples`` > 1 draws a pool of replies to each problem. ``temperature`` None: greedy for one reply, otherwise 0.8.
    ``max_tokens`` None: twice the longest reference solution of the task, plus 32. ``own``: the candidates of a form
    are the model's own replies (`run_own`), and ``form`` may name several forms, separated by commas.
    """

    tasks: tuple[str, ...]
    count: int = 1000
    seed: int = 0
    split: Split = "test"
    form: str = "solve"
    samples: int = 1
    temperature: float | None = None
    max_tokens: int | None = None
    own: bool = False

    def __post_init__(self) -> None:
        if not self.tasks or len(set(self.tasks)) < len(self.tasks):
            raise ConfigError(f"tasks={','.join(self.tasks)!r}: name at least one task, and each once")
        for name, value in (("n", self.count), ("samples", self.samples), ("max_tokens", self.max_tokens)):
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed} must not be negative")
        if self.own and (self.samples < MOST_CANDIDATES or any(find_form(form).least == 0 for form in self.forms)):
            raise ConfigError(
                f"own candidates need a form other than 'solve', and a pool of at least {MOST_CANDIDATES} samples a "
                f"problem to choose from, not form={self.form!r} and samples={self.samples}"
            )
        if self.split not in SPLITS:
            raise ConfigError(f"no split named '{self.split}'; there are {', '.join(SPLITS)}")
        if self.heat < 0 or self.samples > 1 and self.heat == 0:
            raise ConfigError(
                f"temperature={self.heat:g} with samples={self.samples}: greedy replies are all the same; "
                "take a temperature above 0"
            )

    @property
    def specs(self) -> list[str]:
        """The tasks as `load_task` reads them, form included. A form on own candidates begins with solving."""
        return [spec if self.form == "solve" or self.own else f"{self.form}/{spec}" for spec in self.tasks]

    @property
    def forms(self) -> list[str]:
        return [form.strip() for form in self.form.split(",")]

    @property
    def heat(self) -> float:
        """The temperature to sample with."""
        return self.temperature if self.temperature is not None else SAMPLING_TEMPERATURE if self.samples > 1 else 0.0


@dataclass(frozen=True)
class Exam:
    """One task's part of a plan, as token ids.

    ``prompts``: what the model reads. ``trained``: the scored tokens of prose.
    """

    spec: str
    task: Task
    problems: list[Problem]
    prompts: list[list[int]]
    limit: int = 1
    trained: list[np.ndarray] | None = None


@dataclass(frozen=True)
class Answers:
    """Outcomes of a task with answers.

    right [N, S] bool; tokens [N, S] generated, end mark included. ``votes``: the canonical answer of every sample, None
    when none was found. ``num_cut``: number of replies that met the limit. ``texts``: the replies. alone [N]: for
    candidates of the model's own, the share of its replies that solve the same problem without candidates.
    """

    exam: Exam
    right: np.ndarray
    tokens: np.ndarray
    votes: list[list[str | None]]
    num_cut: int
    seconds: float
    texts: list[list[str]] = field(default_factory=list)
    alone: np.ndarray | None = None


@dataclass(frozen=True)
class Losses:
    """Outcomes of prose, by document: nats [N] and number [N] of the scored tokens, and bytes [N] of their text.

    known_bits [N]: bits that the source needs for the text, where the source is known. No model does better on average.
    """

    exam: Exam
    nats: np.ndarray
    tokens: np.ndarray
    bytes: np.ndarray
    seconds: float
    known_bits: np.ndarray | None = None


Outcome = Answers | Losses


def read_tokenizer(folder: Path) -> Tokenizer:
    """The lab's tokenizer as stored with a model. Raises ConfigError for a model with another vocabulary."""
    try:
        return lab_tokenizer.load(folder)
    except ConfigError as e:
        raise ConfigError(
            f"the lab's tasks need a model with the lab's vocabulary, which {folder.name} does not have: {e}"
        ) from e


def prepare(plan: Plan, tokenizer: Tokenizer) -> list[Exam]:
    """Draw and encode every problem.

    Raises ConfigError for an unknown task, form or dial, or when a split has too few problems.
    """
    tasks = {spec: load_task(spec) for spec in plan.specs}
    return [
        _documents(spec, task, plan, tokenizer) if task.scored == "loss" else _questions(spec, task, plan, tokenizer)
        for spec, task in tasks.items()
    ]


def _questions(spec: str, task: Task, plan: Plan, tokenizer: Tokenizer) -> Exam:
    problems = task.problems(plan.split, plan.seed, plan.count)
    different = len({p.prompt for p in problems})
    if different < plan.count / 2:  # some tasks repeat themselves; one problem asked often says little
        raise ConfigError(
            f"split '{plan.split}' of '{spec}' holds about {different} different problems, too few for n={plan.count}: "
            "take a smaller n, or turn its dial up"
        )

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    longest = max(map(len, encode([p.solution + END for p in problems])))
    return Exam(spec, task, problems, encode([p.prompt for p in problems]), plan.max_tokens or 2 * longest + 32)


def _documents(spec: str, task: Task, plan: Plan, tokenizer: Tokenizer) -> Exam:
    """Draw documents of held-out prose.

    There is little of it, and scoring the same passage again and again would feign certainty: refuse that.
    """
    drawn = task.documents(
        tokenizer, np.random.default_rng([SPLITS.index(plan.split), plan.seed]), plan.count, plan.split
    )
    parts = [slice(first, last) for first, last in zip(drawn.bounds, drawn.bounds[1:])]
    times = repetition([drawn.ids[part][drawn.trained[part]] for part in parts])
    if times > MOST_REPEATED:
        raise ConfigError(
            f"split '{plan.split}' of '{spec}' is small: {plan.count} documents hold every passage {times:.1f} times; "
            f"take n={max(1, int(plan.count / times / 2))} or shorter documents"
        )
    return Exam(
        spec, task, [], [drawn.ids[part].tolist() for part in parts], trained=[drawn.trained[part] for part in parts]
    )


def repetition(texts: Sequence[np.ndarray]) -> float:
    """Mean number of times that a stretch of ``texts`` (token ids) occurs in them: 1 when no two overlap."""
    factors = np.random.default_rng(0).integers(1, 1 << 62, STRETCH, dtype=np.uint64) | np.uint64(1)
    hashes = []
    for ids in texts:
        padded = np.concatenate([ids, np.zeros(max(0, STRETCH - len(ids)), dtype=ids.dtype)]).astype(np.uint64)
        hashes.append((np.lib.stride_tricks.sliding_window_view(padded, STRETCH) * factors).sum(1))
    stretches = np.concatenate(hashes)
    return len(stretches) / len(np.unique(stretches))


def run(llm: LLM, exam: Exam, plan: Plan, tokenizer: Tokenizer, *, progress: bool = False) -> Outcome:
    """Run one exam on an engine. Raises ConfigError when its context is too short for the problems."""
    context = llm.info.max_model_len
    needed = max(len(p) for p in exam.prompts) + 1
    if exam.trained is None:
        needed = max(
            len(prompt) + len(tokenizer.encode(problem.solution, add_special_tokens=False).ids) + 1
            for prompt, problem in zip(exam.prompts, exam.problems)
        )
    if needed > context:
        raise ConfigError(
            f"task '{exam.spec}' needs {needed} tokens of context with its solution, and the model serves {context}: "
            "turn its dial down, or raise --max-model-len where the model allows it"
        )
    started = time.perf_counter()
    prompts = [{"prompt_token_ids": p} for p in exam.prompts]
    if exam.trained is not None:
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0, detokenize=False)
        return _losses(exam, llm.generate(prompts, params, use_tqdm=progress), tokenizer, started)
    stops = tuple(tokenizer.token_to_id(t) for t in lab_tokenizer.STOPS)
    params = [
        SamplingParams(
            n=plan.samples,
            temperature=plan.heat,
            seed=noise_seed(plan.seed, exam.spec, i),
            stop_token_ids=stops,
            max_tokens=min(exam.limit, context - len(prompt)),
            detokenize=False,
        )
        for i, prompt in enumerate(exam.prompts)
    ]
    return _answers(exam, llm.generate(prompts, params, use_tqdm=progress), tokenizer, started)


def run_own(llm: LLM, exam: Exam, plan: Plan, tokenizer: Tokenizer, *, progress: bool = False) -> list[Outcome]:
    """The outcome of an exam, then one outcome for each form on candidates from the model's own pool of replies.

    A form is asked in every mix of right and wrong that a problem's pool holds, with one greedy reply each. A form for
    which no pool holds the candidates is left out.
    """
    solved = run(llm, exam, plan, tokenizer, progress=progress)
    assert isinstance(solved, Answers), "only a task with answers has forms"
    pool = [
        Replies(problem, tuple(texts), tuple(map(bool, right)), tuple(votes))
        for problem, texts, right, votes in zip(exam.problems, solved.texts, solved.right, solved.votes)
    ]
    found: list[Outcome] = [solved]
    once = dataclasses.replace(plan, samples=1, temperature=None, own=False, form="solve")
    for form in plan.forms:
        task = FormTask(form, exam.task)
        rng = np.random.default_rng(plan.seed)
        count = min(task.shape.most, MOST_CANDIDATES)
        drawn = [(choose(rng, replies, right, count), replies) for replies in pool for right in range(count + 1)]
        cases = [
            (task.case(replies.problem, texts), float(np.mean(replies.right)))
            for texts, replies in drawn
            if texts is not None
        ]
        # A long candidate may leave no room for a reply.
        coded = [
            e.ids for e in tokenizer.encode_batch_fast([case.prompt for case, _ in cases], add_special_tokens=False)
        ]
        wanted = [
            len(e.ids) + 1
            for e in tokenizer.encode_batch_fast([case.solution for case, _ in cases], add_special_tokens=False)
        ]
        fits = [i for i in range(len(cases)) if len(coded[i]) + wanted[i] < llm.info.max_model_len]
        if not fits:
            continue
        asked = Exam(
            f"{form}/{exam.spec}",
            task,
            [cases[i][0] for i in fits],
            [coded[i] for i in fits],
            2 * max(wanted[i] for i in fits) + 32,
        )
        outcome = run(llm, asked, once, tokenizer, progress=progress)
        found.append(dataclasses.replace(outcome, alone=np.array([cases[i][1] for i in fits])))
    return found


def noise_seed(seed: int, spec: str, number: int) -> int:
    """Seed of one problem's samples: 63 bits that differ for every seed, task and problem."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{spec}/{number}".encode(), digest_size=8).digest(), "little") >> 1


def _answers(exam: Exam, outputs: list[RequestOutput], tokenizer: Tokenizer, started: float) -> Answers:
    seconds = time.perf_counter() - started
    replies = [[tokenizer.decode(o.token_ids, skip_special_tokens=True) for o in output.outputs] for output in outputs]
    right = np.array(
        [[exam.task.check(problem, reply) for reply in texts] for problem, texts in zip(exam.problems, replies)]
    )
    tokens = np.array([[len(o.token_ids) for o in output.outputs] for output in outputs])
    votes = [[exam.task.answer(reply) for reply in texts] for texts in replies]
    num_cut = sum(o.finish_reason == "length" for output in outputs for o in output.outputs)
    return Answers(exam, right, tokens, votes, num_cut, seconds, replies)


def _losses(exam: Exam, outputs: list[RequestOutput], tokenizer: Tokenizer, started: float) -> Losses:
    seconds = time.perf_counter() - started
    nats, tokens, texts = [], [], []
    for ids, trained, output in zip(exam.prompts, exam.trained or [], outputs):
        counted = np.flatnonzero(trained)
        nats.append(-sum(output.prompt_logprobs[i][ids[i]].logprob for i in counted))  # type: ignore[index]
        tokens.append(len(counted))
        texts.append(tokenizer.decode([ids[i] for i in counted], skip_special_tokens=True))
    surprisal, known = getattr(exam.task, "surprisal", None), None
    if surprisal is not None:  # such a task gives the bits of each sentence, one a line
        known = np.array([sum(surprisal(sentence) for sentence in text.split("\n")) for text in texts])
    return Losses(exam, np.array(nats), np.array(tokens), np.array([len(t.encode()) for t in texts]), seconds, known)
