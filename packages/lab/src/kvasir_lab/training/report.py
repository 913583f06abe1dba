"""Measure in plain torch what a lab model does with candidates: pass@k, majority, aggregation and judging.

One pool of sampled replies to unseen problems serves all measurements. "Alone" is the share of right replies to the
same problems as in its row. Problems with four wrong replies are harder than the rest, so aggregation needs this
comparison.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from kvasir_lab.evaluation.replies import Replies, choose, sample_replies
from kvasir_lab.evaluation.statistics import majority_at_k, pass_at_k, wilson
from kvasir_lab.forms import FormTask
from kvasir_lab.lookup import load_task
from kvasir_lab.model import Model
from kvasir_lab.sample import complete_all
from kvasir_lab.training.recipe import Recipe

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def curves(model: Model, tokenizer: Tokenizer, recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Yield rows of figures: ``what`` was measured on which ``task``, over how many ``problems``. Shares are floats."""
    plan = recipe.curves
    for spec in plan.tasks if plan.problems else ():
        task = load_task(spec)
        pool = sample_replies(
            model,
            tokenizer,
            task,
            "test",
            problems=plan.problems,
            samples=plan.samples,
            temperature=plan.temperature,
            max_new=recipe.reply_tokens,
            seed=recipe.seed,
        )
        k = plan.samples
        yield {
            "what": "samples",
            "task": spec,
            "problems": len(pool),
            "pass@1": float(np.mean([r.right for r in pool])),
            f"pass@{k}": float(np.mean([pass_at_k(sum(r.right), k, k) for r in pool])),
            f"majority@{k}": float(np.mean([majority_at_k(r.answers, r.right, k) for r in pool])),
        }
        for form, count in (("aggregate", plan.candidates), ("judge_pair", 2), ("judge_one", 1), ("refine", 1)):
            for right in range(count + 1):
                row = _asked(model, tokenizer, FormTask(form, task), pool, right, count, recipe)
                if row is not None:
                    yield {"what": form, "task": spec, **row}


def _asked(
    model: Model, tokenizer: Tokenizer, task: FormTask, pool: list[Replies], right: int, count: int, recipe: Recipe
) -> dict[str, Any] | None:
    """Ask one form with ``right`` right candidates of ``count``, for every problem of the pool that has them."""
    rng = np.random.default_rng([recipe.seed, right, count])
    chosen = [
        (replies, candidates) for replies in pool if (candidates := choose(rng, replies, right, count)) is not None
    ]
    if not chosen:
        return None
    problems = [task.case(replies.problem, candidates) for replies, candidates in chosen]
    written = complete_all(model, tokenizer, [p.prompt for p in problems], recipe.reply_tokens)
    good = [text is not None and task.check(p, text) for p, text in zip(problems, written, strict=True)]
    low, high = wilson(sum(good), len(good))
    return {
        "right candidates": f"{right} of {count}",
        "problems": len(good),
        "correct": float(np.mean(good)),
        "low": low,
        "high": high,
        "alone": float(np.mean([r.right for r, _ in chosen])),
    }
