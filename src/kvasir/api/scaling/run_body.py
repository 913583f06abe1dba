"""The body of a scaling run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvasir.api.http.body import Body, Part
from kvasir.api.protocols.openai import MAX_MESSAGES, Message, ScalingBudget

MAX_RUN_PROBLEMS = 256


class RunProblem(Part):
    """One problem of a run. Without an id, its place is its id."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    id: str | None = Field(None, pattern=r"^[A-Za-z0-9._-]{1,64}$")


class RunBody(Body):
    """A strategy on many problems, in the background. ``budget`` bounds the run, ``problem_budget`` each problem."""

    strategy: str = Field(max_length=400)
    problems: list[RunProblem] = Field(min_length=1, max_length=MAX_RUN_PROBLEMS)
    answer: Literal["marked", "last_line", "text"] = "marked"
    seed: int | None = None
    max_tokens: int | None = Field(None, gt=0)
    temperature: float | None = Field(None, ge=0, le=10)
    budget: ScalingBudget | None = None
    problem_budget: ScalingBudget | None = None
