"""The seam of step scorers: how likely a reply that begins like this becomes right, from 0 to 1.

`Judge` asks a language model for its next token, Yes or No, after a question about the beginning. `RewardModel` reads
the score of a process reward model at the last token of the beginning, which costs the new step alone: the steps before
it are in that model's prefix cache. Strategies take ``judge=NAME`` or ``prm=NAME`` and ask `scorer` for the one to use.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Any

from kvasir.errors import ConfigError
from kvasir.scaling.endpoint import Endpoint, find
from kvasir.scaling.primitives import Context, Seq
from kvasir.scaling.problem import Problem

UNKNOWN = 0.5  # The belief in a beginning that the scorer refuses, for example because it is too long.


class StepScorer(abc.ABC):
    """``endpoint``: the model that is asked."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint

    @abc.abstractmethod
    async def belief(self, context: Context, problem: Problem, seq: Seq) -> float:
        """The score of the beginning ``seq``; 1/2 when the model refuses it. Raises BudgetExceeded."""


async def belief(context: Context, judge: Endpoint, problem: Problem, text: str) -> float:
    """P(the solution that begins like this is right), from the judge's next token; 1/2 when the judge refuses."""
    words = problem.prompts.verdicts
    found = await context.choose(judge, problem.prompts.judge_step(problem, text), words)
    return UNKNOWN if not found else math.exp(found[words[0]])


class Judge(StepScorer):
    """P(Yes) as the next token after the question of `Prompts.judge_step`."""

    async def belief(self, context: Context, problem: Problem, seq: Seq) -> float:
        return await belief(context, self.endpoint, problem, seq.text)


class RewardModel(StepScorer):
    """The score of a process reward model, whose prompt is the problem and the beginning, token by token."""

    async def belief(self, context: Context, problem: Problem, seq: Seq) -> float:
        found = await context.score(self.endpoint, problem.messages, seq.sample())
        return UNKNOWN if found is None or found.reward is None else found.reward


def scorer(context: Context, config: Any) -> StepScorer:
    """The scorer that a strategy's options name: ``prm``, or ``judge``, or else the writer judges itself."""
    if config.prm:
        return RewardModel(context.endpoint(config.prm))
    return Judge(context.endpoint(getattr(config, "judge", "") or config.model))


def check_scorer(name: str, config: Any, endpoints: Sequence[Endpoint]) -> None:
    """Raise ConfigError when strategy ``name`` cannot ask the scorer of its options."""
    judge = getattr(config, "judge", "")
    if config.prm and judge:
        raise ConfigError(f"{name}: prm={config.prm} and judge={judge} are two scorers; give one")
    if config.prm:
        found = find(endpoints, config.prm)
        if not found.caps.reward:
            raise ConfigError(
                f"{name}:prm={config.prm}: that model writes and is no reward model; name it as judge={config.prm}, or "
                "make a reward model of it with 'kvasir train prm'"
            )
    elif judge and not find(endpoints, judge).caps.choose:
        raise ConfigError(
            f"{name}:judge={judge}: that model cannot choose; name it as prm={judge} if it is a reward model"
        )
