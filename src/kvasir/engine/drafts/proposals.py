"""Proposals of tokens for the next step: forced chains, which are certain, go before a drafter's guesses."""

from __future__ import annotations

from collections.abc import Iterable

from kvasir.engine.drafts.drafting import Drafting
from kvasir.engine.drafts.forcing import Forcing
from kvasir.engine.part import Part
from kvasir.engine.schedule.spans import NO_TAIL, Tail
from kvasir.types import EngineStats, Plan, Sequence


class Proposals(Part):
    """Chains first, because nobody needs to guess what is forced. ``drafting``: None without a drafter.

    What is proposed continues known tokens. So before a step with proposals, the step in flight is read.
    """

    def __init__(self, forcing: Forcing, drafting: Drafting | None) -> None:
        self.forcing, self.drafting = forcing, drafting
        self.drafts = False  # whether the step that is being planned has drafts
        self._forces = False  # and chains

    def wanted(self, running: Iterable[Sequence]) -> bool:
        """Whether to propose tokens for the next step. Called once a step."""
        self.drafts = self.drafting is not None and self.drafting.wanted(running)
        self._forces = self.forcing.wanted(self.drafts)
        return self.drafts or self._forces

    def propose(self, running: Iterable[Sequence]) -> None:
        """Set the chains and drafts of the sequences that decode. Nothing may be in flight."""
        if self._forces:
            self.forcing.propose(running, self.drafts)
        if self.drafts:
            self.drafting.propose(running)

    def tail(self) -> Tail:
        """Guests that prompts of the step being planned may end with."""
        return NO_TAIL if self.drafting is None else self.drafting.tail()

    def launched(self, plan: Plan) -> None:
        self.forcing.noted(plan, self._forces, self.drafts)

    def drawn(self, plan: Plan) -> None:
        """Take note of a plan whose draw was launched behind the step before it."""
        self.forcing.watch(plan)

    def measured(self, plan: Plan, stats: EngineStats, now: float) -> None:
        self.forcing.times.ended(plan.step, now)
