"""Forced chains in the step loop: tokens that a request's own constraints force are appended in one step.

A grammar often leaves one token only: the keys of a JSON schema, a tool's name. A logit processor may force tokens,
too: the end of thinking. Such a run becomes the sequence's draft, with ``Sequence.num_forced`` set, so the row before
each of its tokens allows no other, and the ordinary sampler verifies it. Tokens and log-probabilities are those of
decoding one by one; only the number of steps is smaller.

A run is known once the tokens before it are, so a step with chains is planned after the step before was read. Where
steps overlap that costs the device a pause, which must be worth it: see ``EAGER_SHARE``.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvasir.decoding.sampler import Sampler
from kvasir.engine.spans import rows_left
from kvasir.types import Plan, Sequence, Status

# Most tokens of a chain, and most rows of decodes and chains in a step: about as many as an H200 computes while it
# reads an 8B model's weights once, so that a forced token costs next to nothing.
MAX_CHAIN, MAX_ROWS = 32, 256
# Least tokens of a chain that takes the place of a drafter's draft: a good draft has about as many.
LEAST_FOR_DRAFT = 4
# Steps are read before the next is planned while at least this share of the decoded tokens is forced. Reading first
# costs a GPU about a tenth of a step.
EAGER_SHARE = 1 / 8
# Number of steps over which the share is averaged.
HORIZON = 8


class Forcing:
    """Proposes forced chains. ``overlap``: whether steps are launched before the step before is read."""

    def __init__(self, sampler: Sampler, overlap: bool) -> None:
        self._sampler, self._overlap = sampler, overlap
        self._share = 1.0  # recent share of forced tokens among those decoded
        self.num_forced = 0  # tokens that were committed as part of a chain

    def wanted(self, drafting: bool) -> bool:
        """Whether to read the step in flight before the next is planned, and to propose chains. ``drafting``: it is
        read first in any case."""
        sampler = self._sampler
        return sampler.num_forcing > 0 and (
            drafting or not self._overlap or self._share >= EAGER_SHARE or sampler.forcing_soon
        )

    def propose(self, running: Iterable[Sequence], drafting: bool) -> None:
        """Set the chains of all sequences that decode. Nothing may be in flight. ``drafting``: a drafter proposes
        drafts for the other sequences."""
        least = LEAST_FOR_DRAFT if drafting else 1
        decodes = [seq for seq in running if seq.status is Status.RUNNING and rows_left(seq) == 1]
        spare, forced = MAX_ROWS - len(decodes), 0
        for seq in decodes:
            if seq.num_forced:
                seq.drop_draft()
            if seq.open_seat != seq.seat:
                continue
            run = self._sampler.forced(seq)[: max(0, min(MAX_CHAIN, spare))]
            if len(run) >= least:
                seq.drop_draft()
                seq.draft, seq.num_forced = run, len(run)
                spare, forced = spare - len(run), forced + len(run)
        self._average(forced, forced + len(decodes))

    def watch(self, plan: Plan) -> None:
        """Count the draws of a launched plan that are forced while no chains are proposed."""
        self._average(sum(bool(self._sampler.forced(s.seq)) for s in plan.spans if s.valid), len(plan.spans))

    def _average(self, forced: int, tokens: int) -> None:
        if tokens:
            self._share += (forced / tokens - self._share) / HORIZON
