"""Traces of a model, cut at blank lines, with a label for each cut and the states that were recorded there."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvasir.api.offline.llm import LLM
from kvasir.errors import ConfigError
from kvasir.hooks.hook import Gate, Hook, write_set
from kvasir.models import checkpoint
from kvasir.models.families import build_spec
from kvasir.models.tokenizer import Tokenizer
from kvasir.progress import loading
from kvasir.types import SamplingParams
from kvasir_lab import tokenizer as lab_tokenizer
from kvasir_lab.evaluation.evaluator import noise_seed
from kvasir_lab.lookup import load_task
from kvasir_lab.task import Problem, Split, Task

BLANK = "\n\n"
RECORDER = "recorder"
# Positions that are recorded at most, which bounds the memory: 1 GiB for the heads of an 8B model.
POSITIONS = 4096
# Words that begin a check, where a task does not label its steps.
KEYWORDS = ("Wait", "Alternatively", "Let me verify", "But")


@dataclass(frozen=True, slots=True)
class Trace:
    """One sampled reply. ``ids``: prompt and reply; ``num_prompt``: where the reply begins."""

    problem: Problem
    ids: list[int]
    num_prompt: int
    reply: str


@dataclass(frozen=True, slots=True)
class Cut:
    """The end of a segment: its position, and what the segments before and after it are (1: a needless check; by
    keywords: any check)."""

    position: int
    ended: int
    follows: int


def splitting_ids(model: str) -> tuple[int, ...]:
    """The tokens of a model that hold a blank line. Raises ConfigError where none does."""
    tokenizer = Tokenizer.load(checkpoint.resolve(model))
    found = tuple(i for i in range(tokenizer.size) if BLANK in tokenizer.decode([i]))
    if not found:
        raise ConfigError(f"{model}: no token holds a blank line, so its text cannot be cut where CREST cuts it")
    return found


def sample(llm: LLM, task: Task, spec: str, split: Split, count: int, seed: int, max_tokens: int = 512) -> list[Trace]:
    """Sample one reply to each of ``count`` problems at temperature 1."""
    problems = task.problems(split, seed, count)
    tokenizer = lab_tokenizer.load(checkpoint.resolve(llm.config.model.model))
    prompts = [e.ids for e in tokenizer.encode_batch_fast([p.prompt for p in problems], add_special_tokens=False)]
    stops = tuple(tokenizer.token_to_id(t) for t in lab_tokenizer.STOPS)
    params = [
        SamplingParams(
            temperature=1.0,
            seed=noise_seed(seed, spec, i),
            stop_token_ids=stops,
            max_tokens=min(max_tokens, llm.info.max_model_len - len(prompt)),
            detokenize=False,
        )
        for i, prompt in enumerate(prompts)
    ]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
    found = []
    for problem, prompt, output in zip(problems, prompts, outputs):
        ids = output.outputs[0].token_ids
        reply = tokenizer.decode(ids, skip_special_tokens=True)
        found.append(Trace(problem, [*prompt, *ids], len(prompt), reply))
    return found


def kinds(task: Task, trace: Trace, keywords: Sequence[str] = KEYWORDS) -> list[int]:
    """A label for each paragraph of the reply: 1 for a needless check as the task's ``steps`` say, or for one of the
    ``keywords``; the answer's line is 0."""
    label = getattr(task, "steps", None)
    if label is not None:
        return [int(step.kind == "needless") for step in label(trace.problem, trace.reply)]
    return [int(any(word in part for word in keywords)) for part in trace.reply.strip().split(BLANK)]


def cuts(task: Task, trace: Trace, splits: Sequence[int], keywords: Sequence[str] = KEYWORDS) -> list[Cut]:
    """The cuts of a trace. What follows the last step counts as 0: it is the answer."""
    labels = kinds(task, trace, keywords)
    ends = [i for i in range(trace.num_prompt, len(trace.ids)) if trace.ids[i] in set(splits)]
    return [Cut(p, labels[i], labels[i + 1] if i + 1 < len(labels) else 0) for i, p in enumerate(ends[: len(labels)])]


class Recording:
    """An engine that records the states of one site, of all layers, at the tokens ``splits``. Use it in a ``with``."""

    def __init__(self, model: str, site: str, gate: Gate, **options: Any) -> None:
        self._home = tempfile.TemporaryDirectory()
        spec = build_spec(checkpoint.read_config(checkpoint.resolve(model)))
        hook = Hook(site, tuple(range(len(spec.layers))), "record", gate)
        folder = write_set(Path(self._home.name), [hook], {})
        # A prefix that is read from the cache would not be computed, and so not recorded.
        options = {"enable_prefix_caching": False, "max_model_len": min(POSITIONS, spec.max_position)} | options
        with loading(model):
            self.llm = LLM(model, hook=[f"{RECORDER}={folder}"], **options)
        self.site, self.layers = site, hook.layers

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *error: object) -> None:
        self.llm.close()
        self._home.cleanup()

    def states(self, ids: list[int], positions: list[int]) -> torch.Tensor:
        """States [P, layers * H, D] at these positions of a text, fp32."""
        params = SamplingParams(temperature=0.0, max_tokens=1, hook=RECORDER, detokenize=False)
        room = self.llm.info.max_model_len - 1
        assert max(positions) < room, "a text that fills the context leaves no room for the token that is drawn"
        self.llm.generate([{"prompt_token_ids": ids[:room]}], params)
        slots = self.llm.engine.hooks.slots
        return torch.cat([slots.recorded(layer, self.site, positions) for layer in self.layers], 1)


def task_of(spec: str) -> Task:
    """The task of a calibration. Raises ConfigError for one without answers."""
    task = load_task(spec)
    if task.scored != "answer":
        raise ConfigError(f"task '{spec}' has no answers, and so no reasoning to steer")
    return task
