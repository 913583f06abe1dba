"""Train a model to solve problems and to judge pairs of its own solutions: V1-PairRL (arXiv 2603.04304).

Every step samples the weights as they are: a group of replies to each problem, then a group of judgements of a pair of
these replies. One step of policy gradient follows on J = J_write + ``weight`` x J_judge. A reply earns 1 where it is
right. A judgement earns 1 where both ratings, brought to 0 to 1, lie within 0.2 of the truth, so a judge must be sure
and right. Every pair holds a right reply, and half of the pairs hold two: a writer gains nothing by bad pairs.

Advantages are those of GRPO, the reward's distance from its group's mean in standard deviations. As in DAPO, groups
whose rewards are equal are left out, every token counts alike, and nothing holds the weights to their start. Each reply
is used for one step, so there is no ratio to clip. ``judge=one`` trains on judgements of single replies, the paper's
PointRL, and ``none`` on solutions alone. The paper's weight, bound and mix of pairs are not public; ours are guesses.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch

from kvasir.errors import ConfigError
from kvasir.models import checkpoint
from kvasir.progress import Progress
from kvasir_lab import export, forms, sample
from kvasir_lab import tokenizer as lab_tokenizer
from kvasir_lab.drafters.data import BATCH_TOKENS, Texts, batches, reply_rows
from kvasir_lab.forms import YES_NO, FormProblem, FormTask
from kvasir_lab.lookup import load_task
from kvasir_lab.model import Model, losses
from kvasir_lab.rewards.beginnings import ROOM
from kvasir_lab.sample import serving_copy
from kvasir_lab.task import Problem, Split, Task
from kvasir_lab.tokenizer import STOPS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Judge = Literal["pair", "one", "none"]
PROBLEMS = {"cuda": 96, "cpu": 4}  # Problems of a step by default.
NEAR = 0.2  # Largest distance of a rating from the truth that earns the reward.
BOTH_RIGHT = 0.5  # Share of pairs with two right replies, where a problem has both kinds.
RATED = 8  # Ratings go from 1 to 9: this brings them to 0 to 1.
WARMUP = 5  # Steps.
LOOK = 10  # Steps between two reports.
EACH = 8  # Replies to a held-out problem.


@dataclass(frozen=True)
class Plan:
    """A training run.

    ``problems``: of a step, shared by ``tasks``; ``group``: replies to each of them, and judgements of each pair.
    ``weight``: of the judgements in the objective. ``lr``: largest learning rate. ``held_out``: problems to measure on.
    ``minutes``: the most that the steps may take; the rate falls as fast as time passes, and fewer steps are done.
    """

    tasks: tuple[str, ...] = ("countdown",)
    judge: Judge = "pair"
    steps: int = 100
    problems: int = PROBLEMS["cpu"]
    group: int = 8
    weight: float = 1.0
    lr: float = 2e-5
    held_out: int = 256
    seed: int = 0
    minutes: float | None = None

    def __post_init__(self) -> None:
        if self.judge not in get_args(Judge):
            raise ConfigError(f"judge={self.judge} is not one of {', '.join(get_args(Judge))}")
        if not (self.tasks and self.group >= 2 and self.problems >= len(self.tasks) and self.steps >= 1):
            raise ConfigError("group must be at least 2, problems at least 1 for each task, and steps at least 1")
        for spec in self.tasks:
            task = load_task(spec)
            if task.scored != "answer" or not task.candidates:
                raise ConfigError(f"task '{spec}' has no solutions to judge: 'kvasir lab tasks' lists those that have")


@dataclass(frozen=True, slots=True)
class Rollouts:
    """N sampled replies.

    ``prompts`` and ``replies``: token ids, with the end mark of a reply that ended; ``texts``: the replies as text;
    ``group`` [N]: number of the prompt that a reply answers, in order; ``reward`` [N].
    """

    prompts: list[list[int]]
    replies: list[list[int]]
    texts: list[str]
    group: np.ndarray
    reward: np.ndarray

    def advantages(self) -> np.ndarray:
        """Distance of each reward from its group's mean in standard deviations [N]; 0 where all rewards are equal."""
        found = np.zeros(len(self.reward))
        for number in np.unique(self.group):
            members = self.group == number
            rewards = self.reward[members]
            if spread := rewards.std():
                found[members] = (rewards - rewards.mean()) / spread
        return found


@dataclass(frozen=True, slots=True)
class Case:
    """A solution to write or a judgement to make: ``problem``, and the task or form that knows its prompt."""

    task: Task
    problem: Problem

    def reward(self, text: str) -> float:
        """The reward of a reply, 0 or 1."""
        problem = self.problem
        if not isinstance(problem, FormProblem):
            return float(self.task.check(problem, text))
        if len(problem.right) == 1:
            return float(forms.verdict(text) == YES_NO[problem.right[0]])
        rated = forms.ratings(text)
        return float(
            rated is not None
            and all(abs((r - 1) / RATED - ok) <= NEAR for r, ok in zip(rated, problem.right, strict=True))
        )


def problems_of(tasks: Sequence[str], split: Split, seed: int, count: int) -> list[Case]:
    """About ``count`` problems, as many of each task."""
    found = []
    for i, spec in enumerate(tasks):
        share = count // len(tasks) + (i < count % len(tasks))
        task = load_task(spec)
        found += [Case(task, problem) for problem in task.problems(split, seed, share)] if share else []
    return found


def rollouts(model: Model, tokenizer: Tokenizer, cases: Sequence[Case], each: int, seed: int) -> Rollouts:
    """Sample ``each`` replies to every case at temperature 1. A prompt without room for a reply has none."""
    prompts = [e.ids for e in tokenizer.encode_batch_fast([c.problem.prompt for c in cases], add_special_tokens=False)]
    longest = max(len(e.ids) for e in tokenizer.encode_batch_fast([c.problem.solution for c in cases]))
    room, end = int(ROOM * longest) + 32, tokenizer.token_to_id("<|im_end|>")
    asked = [prompt for prompt in prompts for _ in range(each)]
    stops = [tokenizer.token_to_id(t) for t in STOPS]
    found = sample.continue_all(model, asked, room, stops, temperature=1.0, seed=seed)
    kept = [i for i, reply in enumerate(found) if reply is not None]
    texts = tokenizer.decode_batch([found[i] or [] for i in kept], skip_special_tokens=True)
    replies = [[*(found[i] or []), *[end][: int(len(found[i] or []) < room)]] for i in kept]
    group = np.array([i // each for i in kept], np.int64)
    reward = np.array([cases[g].reward(text) for g, text in zip(group, texts, strict=True)])
    return Rollouts([asked[i] for i in kept], replies, texts, group, reward)


def pairs(cases: Sequence[Case], written: Rollouts, rng: np.random.Generator, both: float = BOTH_RIGHT) -> list[Case]:
    """One pair to judge for each problem with a right reply and another text; ``both``: share with two right ones."""
    found, by_name = [], {}
    for number in np.unique(written.group):
        case, members = cases[number], np.flatnonzero(written.group == number)
        kinds: tuple[list[str], list[str]] = ([], [])
        for i in rng.permutation(members):
            text = written.texts[i].strip()
            if text and text not in kinds[0] + kinds[1]:
                kinds[int(written.reward[i] == 1)].append(text)
        wrong, right = kinds
        if not right or len(right) + len(wrong) < 2:
            continue
        two = not wrong or (len(right) > 1 and rng.random() < both)
        chosen = [right[0], right[1] if two else wrong[0]]
        form = by_name.setdefault(case.task, FormTask("judge_pair", case.task))
        found.append(Case(form, form.case(case.problem, [chosen[j] for j in rng.permutation(2)])))
    return found


def apart(judged: Sequence[Case]) -> list[Case]:
    """The replies of pairs as single ones to judge."""
    found = []
    for case in judged:
        assert isinstance(case.problem, FormProblem) and isinstance(case.task, FormTask)
        form, origin = FormTask("judge_one", case.task.inner), case.problem.origin
        assert origin is not None
        found += [Case(form, form.case(origin, [text])) for text in case.problem.candidates]
    return found


def gradient(model: Model, found: Rollouts, weight: float) -> None:
    """Add the gradient of -``weight`` x the mean over tokens of advantage x log-probability to the model's own."""
    advantages = found.advantages()
    kept = np.flatnonzero(advantages)
    if not len(kept):
        return
    sizes = [len(found.prompts[i]) + len(found.replies[i]) for i in kept]
    texts = Texts(
        np.array([t for i in kept for t in (*found.prompts[i], *found.replies[i])], np.int32),
        np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        np.array([len(found.prompts[i]) for i in kept]),
        np.zeros(len(kept), np.int64),
        (),
    )
    device = model.model.embed_tokens.weight.device
    scale = torch.from_numpy(advantages[kept] * weight / texts.num_replied).float()
    for batch in batches(texts, BATCH_TOKENS[device.type], 0, 0):
        text_of, at = reply_rows(batch, torch.device("cpu"))
        weights = torch.zeros(batch.ids.shape)
        weights[text_of, at + 1] = scale[batch.texts][text_of]
        places = (text_of * batch.ids.shape[1] + at + 1).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            losses(model, batch.ids.to(device), None, weights.to(device), chosen=places)[0].backward()


@torch.no_grad()
def likelihoods(model: Model, found: Rollouts) -> list[float]:
    """Log-probability of every reply in nats, its end mark included."""
    device = model.model.embed_tokens.weight.device
    told = []
    for prompt, reply in zip(found.prompts, found.replies, strict=True):
        ids = torch.tensor([[*prompt, *reply]], device=device)
        places = torch.arange(len(prompt), ids.shape[1], device=device)
        told.append(-float(losses(model, ids, None, torch.ones_like(ids), chosen=places)[0]))
    return told


def fit(model: Model, tokenizer: Tokenizer, plan: Plan) -> list[dict[str, Any]]:
    """Train ``model`` in place. Returns rewards and shares of groups that teach something, every LOOK steps."""
    model.train().requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.lr, betas=(0.9, 0.95), weight_decay=0.0)
    history, began, seen, note = [], time.monotonic(), [], ""
    with Progress("pair_rl") as progress:
        for step in range(plan.steps):
            passed = 0.0 if plan.minutes is None else (time.monotonic() - began) / (60 * plan.minutes)
            done = min(1.0, max(step / plan.steps, passed))
            seed = (plan.seed + 1) * 1_000_003 + step
            policy, rng = serving_copy(model), np.random.default_rng([plan.seed, step])
            cases = problems_of(plan.tasks, "train", seed, plan.problems)
            written = rollouts(policy, tokenizer, cases, plan.group, seed)
            judged: Rollouts | None = None
            asked = pairs(cases, written, rng) if plan.judge != "none" else []
            if plan.judge == "one":
                asked = apart(asked)
            if asked:  # as many judgements of single replies as of pairs
                each = plan.group if plan.judge == "pair" else max(2, plan.group // 2)
                judged = rollouts(policy, tokenizer, asked, each, seed + 1)
            share = min(1.0, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * done))
            for group in optimizer.param_groups:
                group["lr"] = plan.lr * share
            gradient(model, written, 1.0)
            if judged is not None:
                gradient(model, judged, plan.weight)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            seen.append([part for told in (written, judged) for part in _told(told)])
            seconds = time.monotonic() - began
            last = step + 1 == plan.steps or (plan.minutes is not None and seconds > 60 * plan.minutes)
            if (step + 1) % LOOK == 0 or last:
                now: dict[str, Any] = {"step": step + 1}
                for name, values in zip(("right", "taught", "judged", "judged_taught"), zip(*seen)):
                    if known := [value for value in values if value is not None]:
                        now[name] = round(float(np.mean(known)), 4)
                history.append(now)
                seen.clear()
                note = ", ".join(f"{k} {v}" for k, v in now.items() if k != "step")
            past = max((step + 1) / plan.steps, 0.0 if plan.minutes is None else seconds / (60 * plan.minutes))
            total = step + 1 if last else max(step + 2, round((step + 1) / past))
            progress.show(step + 1, total, f"{note}, {seconds:.0f} s".removeprefix(", "))
            if last:
                break
    model.eval().requires_grad_(False)
    return history


def _told(found: Rollouts | None) -> tuple[float, float] | tuple[None, None]:
    """Mean reward, and share of replies whose group's rewards differ; None where nothing was sampled."""
    if found is None or not len(found.reward):
        return None, None
    return float(found.reward.mean()), float((found.advantages() != 0).mean())


@dataclass(frozen=True, slots=True)
class Held:
    """Measuring data of a judge: problems, and pairs of the untrained model's replies to them."""

    cases: list[Case]
    judged: list[Case]


def held_out(model: Model, tokenizer: Tokenizer, plan: Plan) -> Held:
    """Problems that are not trained on, and a mixed pair of ``model``'s replies to each that it sometimes solves."""
    cases = problems_of(plan.tasks, "validation", plan.seed, plan.held_out)
    written = rollouts(model, tokenizer, cases, EACH, plan.seed)
    return Held(cases, pairs(cases, written, np.random.default_rng(plan.seed), 0.25))


def measure(model: Model, tokenizer: Tokenizer, held: Held, seed: int = 0) -> dict[str, Any]:
    """Measure solving and judging at temperature 1, as a tournament asks.

    ``right``: share of right solutions. ``pair``: share of mixed pairs whose right reply is rated higher, ties half.
    ``near``: share of judgements that earn the reward. ``silent``: those without ratings. ``one``: share of the same
    replies that a written check of each calls rightly right or wrong. ``tokens``: of a judgement of a pair.
    """
    found: dict[str, Any] = {"right": round(float(rollouts(model, tokenizer, held.cases, 2, seed).reward.mean()), 4)}
    if not held.judged:
        return found
    told, checked = rollouts(model, tokenizer, held.judged, 1, seed), apart(held.judged)
    won = []
    for number, text in zip(told.group, told.texts, strict=True):
        problem, rated = held.judged[number].problem, forms.ratings(text)
        assert isinstance(problem, FormProblem)
        if problem.right[0] != problem.right[1]:
            a, b = rated or (0, 0)
            won.append(0.5 if a == b else float((a > b) == problem.right[0]))
    found |= {
        "mixed_pairs": len(won),
        "pair": round(float(np.mean(won)), 4) if won else None,
        "near": round(float(told.reward.mean()), 4),
        "silent": round(float(np.mean([forms.ratings(text) is None for text in told.texts])), 4),
        "one": round(float(rollouts(model, tokenizer, checked, 1, seed).reward.mean()), 4),
        "tokens": round(float(np.mean([len(reply) for reply in told.replies])), 1),
    }
    return found


def train(
    plan: Plan, target: str, out: Path, say: Callable[[str], None] = print, device: str = "cpu"
) -> dict[str, Any]:
    """Train ``target`` by the plan and write the model to ``out``. Returns the record, which is also in
    ``reward.json``. Raises ConfigError for a plan that cannot work."""
    source = checkpoint.resolve(target)
    model, tokenizer, began = export.load(source, device), lab_tokenizer.load(source), time.monotonic()
    say(f"{source.name} on {', '.join(plan.tasks)}, judging {plan.judge}")
    untrained = serving_copy(model)
    held = {spec: held_out(untrained, tokenizer, replace(plan, tasks=(spec,))) for spec in plan.tasks}
    before = {spec: measure(untrained, tokenizer, told) for spec, told in held.items()}
    history = fit(model, tokenizer, plan)
    export.export(model, tokenizer, out)
    trained = serving_copy(export.load(out, device))
    record: dict[str, Any] = {
        "kind": "pair_rl",
        "base": source.name,
        "plan": asdict(plan),
        "history": history,
        "before": before,
        "after": {spec: measure(trained, tokenizer, told) for spec, told in held.items()},
        "seconds": round(time.monotonic() - began, 1),
    }
    for spec in plan.tasks:
        for name in ("right", "pair", "one"):
            say(f"{spec}, {name}: {record['before'][spec].get(name)} before, {record['after'][spec].get(name)} after")
    (out / "reward.json").write_text(json.dumps(record, indent=2) + "\n")
    return record
