"""The trained self-evaluation of adaptive inference-time compute (Manvi et al. 2024, arXiv 2410.02725).

A lab model learns to answer its question about its own reply, whole or unfinished, with one token: Yes where starting
again would do no better. It learns from its own replies to a task, whose labels (``restart``) come from the other
replies to the same problem, and stays the model that writes: a LoRA, merged. The paper fine-tunes all weights; its
wording of the question is not public, and ours is that of the form ``self_evaluate``.

With ``digits`` it also learns to rate the last step of a beginning from 0 to 9, as the judge of SpecReason does (arXiv
2504.07891). The digit stands for the share of right replies among fresh continuations.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvasir.convert.checkpoint import convert
from kvasir.convert.converter import load_converter
from kvasir.models import checkpoint
from kvasir.scaling.problem import Problem as Asked
from kvasir.scaling.problem import Prompts
from kvasir_lab import export
from kvasir_lab import tokenizer as lab_tokenizer
from kvasir_lab.adapters import training
from kvasir_lab.chat import segments
from kvasir_lab.forms import YES_NO, render
from kvasir_lab.rewards.beginnings import Beginnings, Replies, label, sample_replies
from kvasir_lab.rewards.score import untrained
from kvasir_lab.sample import serving_copy
from kvasir_lab.task import Documents, encode
from kvasir_lab.training.data import OWN

if TYPE_CHECKING:
    from tokenizers import Tokenizer

REPLIES = {"cuda": 16384, "cpu": 256}  # Replies to learn from by default; each gives about five questions.
FORM = "self_evaluate"
NAME = OWN + FORM


@dataclass(frozen=True)
class Plan:
    """A training run. ``replies``: to learn from, ``each`` of a problem. ``rows``: of a batch, of 512 tokens.
    ``digits``: learn to rate steps as well."""

    task: str = "countdown"
    rank: int = 16
    steps: int = 300
    rows: int = 32
    replies: int = REPLIES["cpu"]
    each: int = 8
    held_out: int = 1024
    seed: int = 0
    length: int = 512
    digits: bool = False


def ratings(beginnings: Beginnings, tokenizer: Tokenizer) -> Documents:
    """One request to rate the last step for each line's end, answered with the digit of its label."""
    replies, cases = beginnings.replies, []
    for i, begin in enumerate(replies.texts.bounds[:-1]):
        problem = Asked("p", replies.problems[replies.problem_of[i]].messages)
        for place in replies.lines[i].tolist():
            digit = str(round(9 * float(beginnings.label[begin + place])))
            asked = Prompts().rate_step(problem, replies.written(tokenizer, i, place))
            pieces = segments([*map(dict, asked), {"role": "assistant", "content": digit}])
            cases.append([(text, learnt and n == len(pieces) - 2) for n, (text, learnt) in enumerate(pieces)][:-1])
    return encode(tokenizer, cases)


def documents(beginnings: Beginnings, tokenizer: Tokenizer, seed: int) -> Documents:
    """One question for each labelled place, answered Yes with the chance that its label gives."""
    replies, rng, cases = beginnings.replies, np.random.default_rng([seed, 2]), []
    for i, begin in enumerate(replies.texts.bounds[:-1]):
        problem = replies.problems[replies.problem_of[i]]
        for place in np.union1d(replies.lines[i], replies.between[i]).tolist():
            yes = rng.random() < beginnings.label[begin + place]
            asked = render(FORM, problem, [replies.written(tokenizer, i, place)])
            pieces = segments([*asked, {"role": "assistant", "content": YES_NO[int(yes)]}])
            # Only the answer to the question is learnt: the reply before it may be wrong.
            cases.append([(text, learnt and n == len(pieces) - 2) for n, (text, learnt) in enumerate(pieces)][:-1])
    return encode(tokenizer, cases)


def train(
    plan: Plan, target: str, out: Path, say: Callable[[str], None] = print, device: str = "cpu"
) -> dict[str, Any]:
    """Train the self-evaluation of ``target`` into a copy of it, in ``out``. Returns the record, also in
    ``reward.json``. Raises ConfigError for a plan that cannot work."""
    source = checkpoint.resolve(target)
    model, tokenizer, began = serving_copy(export.load(source, device)), lab_tokenizer.load(source), time.monotonic()
    replies = sample_replies(model, tokenizer, plan.task, plan.replies, plan.each, "train", plan.seed, say)
    held: Replies = sample_replies(model, tokenizer, plan.task, plan.held_out, 4, "validation", plan.seed, say)
    made = documents(label(replies, "restart", model, tokenizer), tokenizer, plan.seed)
    if plan.digits:
        rated = label(replies, "rollouts", model, tokenizer, seed=plan.seed, say=say)
        made = Documents.join([made, ratings(rated, tokenizer)])
    how = training.Plan(
        "lora", NAME, rank=plan.rank, steps=plan.steps, rows=plan.rows, length=plan.length, seed=plan.seed
    )
    with tempfile.TemporaryDirectory() as home:
        history = training.train(how, source, Path(home) / "trained", say, device, {NAME: made})["history"]
        for spec, folder in (
            (f"to_lora:method=lora,trained={home}/trained", Path(home) / "adapter"),
            (f"merge_lora:adapter={home}/adapter", out),
        ):
            convert(load_converter(spec), spec, source, folder)
    record: dict[str, Any] = {"kind": "self_evaluation", "base": source.name, "plan": asdict(plan), "history": history}
    record["before"], record["after"] = (untrained(folder, tokenizer, held, device) for folder in (source, out))
    record["seconds"] = round(time.monotonic() - began, 1)
    say(f"area under the curve: {record['before']['auc']} before, {record['after']['auc']} after")
    (out / "reward.json").write_text(json.dumps(record, indent=2) + "\n")
    return record
