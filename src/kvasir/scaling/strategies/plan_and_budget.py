"""Plan the steps of a solution, share a token budget out between them, then answer once (Plan-and-Budget, 2505.16122).

The plan is JSON under a grammar: the difficulty of the whole, which sets the total, and steps with credits. Each step
gets its share of the total by its credits times a decay. ``enforce=prompt`` asks for so many words a step, as is
published; nothing holds the model to it. ``enforce=hard`` is ours: it forces the end of a step once its tokens are
spent. The plan's tokens are on the ledger, and E3 (accuracy squared over tokens) counts them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvasir.errors import ConfigError
from kvasir.scaling.endpoint import Endpoint, Sample, Shape
from kvasir.scaling.primitives import Context
from kvasir.scaling.problem import Problem
from kvasir.scaling.strategy import Result, Strategy, at_least, result

# Tokens of a solution by the difficulty of its problem, 1 to 5, as in the published code.
TOTALS = {1: 200, 2: 250, 3: 350, 4: 450, 5: 600}
MARK_TOKENS = 32  # Room for the text that ends a step.
ONE_TO_FIVE = {"type": "integer", "minimum": 1, "maximum": 5}
STEP = {
    "type": "object",
    "properties": {
        "step": {"type": "string", "minLength": 1, "maxLength": 200},
        "difficulty": ONE_TO_FIVE,
        "credits": {"type": "integer", "minimum": 1, "maximum": 100},
    },
    "required": ["step", "difficulty", "credits"],
    "additionalProperties": False,
}
PLAN = json.dumps(
    {
        "type": "object",
        "properties": {"level": ONE_TO_FIVE, "steps": {"type": "array", "items": STEP, "minItems": 1, "maxItems": 8}},
        "required": ["level", "steps"],
        "additionalProperties": False,
    }
)


@dataclass(frozen=True)
class Config:
    """Options of the plan and of the budget.

    ``decay``: how a step's share falls with its place. ``share``: by credits, an even share a step, or one global
    budget without a plan (the controls). ``budget``: tokens of a solution; 0: by the plan's difficulty, and with
    ``share=global`` those of difficulty 3. ``plan_tokens``: most tokens of the plan.
    """

    decay: Literal["constant", "linear", "polynomial", "exponential", "cosine"] = "constant"
    enforce: Literal["prompt", "hard"] = "prompt"
    share: Literal["credits", "even", "global"] = "credits"
    budget: int = 0
    plan_tokens: int = 2048
    model: str = ""

    def __post_init__(self) -> None:
        at_least(0, budget=self.budget)
        at_least(1, plan_tokens=self.plan_tokens)
        if self.share == "global" and self.enforce == "hard":
            raise ConfigError(
                "plan_and_budget:share=global has no steps to end, so enforce=hard cannot work; use enforce=prompt, or "
                "share=even"
            )


def weight(decay: str, i: int, count: int) -> float:
    """The factor of step ``i`` (from 0) of ``count``."""
    if decay == "linear":
        return count - i
    if decay == "polynomial":
        return (count - i) ** 2
    if decay == "exponential":
        return 0.9**i
    if decay == "cosine":
        return 0.5 * (1 + math.cos(math.pi * i / (count - 1))) + 0.1 if count > 1 else 1.1
    return 1.0


def allocate(total: int, credits: Sequence[float], decay: str) -> list[int]:
    """Share ``total`` tokens out by credit times decay: whole numbers, the remainder to the largest fractions."""
    parts = [c * weight(decay, i, len(credits)) for i, c in enumerate(credits)]
    exact = [total * part / sum(parts) for part in parts]
    tokens = [math.floor(x) for x in exact]
    left = sorted(range(len(exact)), key=lambda i: (tokens[i] - exact[i], i))
    for i in left[: total - sum(tokens)]:
        tokens[i] += 1
    return tokens


def read_plan(text: str) -> tuple[int, list[str], list[int]] | None:
    """The level, the steps and the credits of a plan; None for a text that is none, such as one that was cut off."""
    try:
        plan = json.loads(text)
        steps = [(str(s["step"]), int(s["credits"])) for s in plan["steps"]]
        level = min(5, max(1, int(plan["level"])))
    except (ValueError, TypeError, KeyError):
        return None
    return (level, [s for s, _ in steps], [c for _, c in steps]) if steps and all(c > 0 for _, c in steps) else None


class PlanAndBudget(Strategy):
    """The strategy."""

    def __init__(self, config: Config = Config()) -> None:
        super().__init__(config)
        self.needs = () if config.share == "global" else ("schema",)  # type: ignore[misc]
        if config.enforce == "hard":
            self.needs += ("tokens", "bound")  # type: ignore[misc]

    async def run(self, context: Context, problem: Problem) -> Result:
        c, endpoint = self.config, context.endpoint(self.config.model)
        if c.share == "global":
            total = c.budget or TOTALS[3]
            messages = problem.prompts.budgeted(problem, [], [total])
            return self._result(problem, await self._ask(context, endpoint, messages), asked=[total])
        drawn = await context.sample(
            endpoint, problem.prompts.plan(problem), max_tokens=c.plan_tokens, shape=Shape(schema=PLAN)
        )
        plan = read_plan(drawn[0].text) if drawn else None
        if plan is None:  # nothing to share out
            return self._result(problem, await self._ask(context, endpoint, problem.messages), planned=False)
        level, steps, credits = plan
        if c.share == "even":
            credits = [1] * len(steps)
        budgets = allocate(c.budget or TOTALS[level], credits, c.decay)
        messages = problem.prompts.budgeted(problem, steps, budgets)
        told = {"planned": True, "level": level, "asked": budgets, "plan_tokens": drawn[0].tokens}
        if c.enforce == "prompt":
            return self._result(problem, await self._ask(context, endpoint, messages), **told)
        return await self._bounded(context, endpoint, problem, messages, budgets, told)

    @staticmethod
    async def _ask(context: Context, endpoint: Endpoint, messages: Any) -> Sample | None:
        found = await context.sample(endpoint, messages)
        return found[0] if found else None

    @staticmethod
    async def _bounded(
        context: Context,
        endpoint: Endpoint,
        problem: Problem,
        messages: Any,
        budgets: Sequence[int],
        told: dict[str, Any],
    ) -> Result:
        """Write step by step; each ends at its mark, which is forced when its tokens are spent. The end is free."""
        seq, used = context.open(endpoint, messages), []
        for number, tokens in enumerate(budgets, start=1):
            left = context.run.sampling.max_tokens - seq.tokens
            if seq.done or left <= 0:
                break
            mark = problem.prompts.section_end(number, len(budgets))
            piece = await seq.generate((mark,), min(left, tokens + MARK_TOKENS), shape=Shape(limit=tokens, mark=mark))
            if piece is None:
                break
            used.append(piece.tokens)
        left = context.run.sampling.max_tokens - seq.tokens
        if not seq.done and left > 0:
            await seq.generate(max_tokens=left)
        return PlanAndBudget._result(problem, seq.sample() if seq.pieces else None, used=used, **told)

    @staticmethod
    def _result(problem: Problem, sample: Sample | None, **stats: Any) -> Result:
        return result(problem, [sample] if sample else [], sample, **stats)
