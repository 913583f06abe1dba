"""Forced chains in the step loop: tokens that a request's own constraints force are appended in one step.

A grammar often leaves one token only: the keys of a JSON schema, a tool's name. A logit processor may force tokens,
too: the end of thinking. Such a run becomes the sequence's draft, with ``Sequence.num_forced`` set, so the row before
each of its tokens allows no other, and the ordinary sampler verifies it. Tokens and log-probabilities are those of
decoding one by one; only the number of steps is smaller.

A run is known once the tokens before it are, so a step with chains is planned after the step before was read. Where
steps overlap that costs the device a pause. Whether it is worth it is measured (``chain_times.py``).
"""

from __future__ import annotations

from collections.abc import Iterable

from kvasir.engine.drafts.chain_times import ChainTimes
from kvasir.engine.part import Part
from kvasir.engine.schedule.spans import rows_left
from kvasir.engine.ways.chain_graphs import MAX_CHAIN, MAX_ROWS
from kvasir.engine.ways.runner import Runner
from kvasir.types import EngineStats, Plan, Sequence, Span, SpanResult, Status

# Least tokens of a chain that takes the place of a drafter's draft: a good draft has about as many.
LEAST_FOR_DRAFT = 4
# Number of steps over which the share is averaged.
HORIZON = 8


def forced_places(index: int, chain: int, pushed: Iterable[int]) -> list[int]:
    """Return the places in an output of the forced ones of tokens from place ``index`` on: the first ``chain`` came in
    a forced chain, and a processor forced those numbered ``pushed``."""
    if not chain and not pushed:
        return []
    return [index + i for i in sorted({*range(chain), *pushed})]


class Forcing(Part):
    """Proposes forced chains. ``overlap``: whether steps are launched before the step before is read."""

    def __init__(self, runner: Runner, overlap: bool) -> None:
        self._runner, self._sampler, self._overlap = runner, runner.sampler, overlap
        self.times = ChainTimes()
        self._share = 1.0  # recent share of forced tokens among those decoded
        self._decodes = 1  # of the last step
        self.num_forced = 0  # tokens that were committed as part of a chain

    @property
    def most_rows(self) -> int:
        """Most rows of decodes and chains in a step: not more than its graphs hold. A chain that is cut goes on in the
        next step."""
        chains = self._runner.chains
        return MAX_ROWS if chains is None else min(MAX_ROWS, chains.most_drafted)

    def wanted(self, drafting: bool) -> bool:
        """Whether to read the step in flight before the next is planned, and to propose chains. ``drafting``: it is
        read first in any case."""
        if self._sampler.num_forcing == 0:
            return False
        if drafting or not self._overlap or self._sampler.forcing_soon:
            return True
        return self.times.pays(self._decodes, min(self._share, 1 - self._decodes / max(self.most_rows, self._decodes)))

    def propose(self, running: Iterable[Sequence], drafting: bool) -> None:
        """Set the chains of all sequences that decode. Nothing may be in flight. ``drafting``: a drafter proposes
        drafts for the other sequences."""
        least, seqs = LEAST_FOR_DRAFT if drafting else 1, list(running)
        decodes = [seq for seq in seqs if seq.status is Status.RUNNING and rows_left(seq) == 1]
        spare, forced = self.most_rows - len(seqs), 0
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
        self._average(forced, len(decodes), forced + len(decodes))

    def committing(self, span: Span, result: SpanResult, tokens: list[int]) -> None:
        """Count the tokens that came in the sequence's chain."""
        result.forced = min(span.seq.num_forced, len(tokens))
        self.num_forced += result.forced

    def fill_stats(self, stats: EngineStats) -> None:
        stats.forced_tokens = self.num_forced

    def watch(self, plan: Plan) -> None:
        """Count the draws of a launched plan that are forced while no chains are proposed."""
        forced = sum(bool(self._sampler.forced(s.seq)) for s in plan.spans if s.valid)
        self._average(forced, len(plan.spans), len(plan.spans))

    def noted(self, plan: Plan, chains: bool, drafting: bool) -> None:
        """Note how ``plan`` was launched: read first for ``chains``, or not. Steps with prompts or drafts tell nothing,
        nor do those that will run in a graph later."""
        if not self._overlap or not self._sampler.num_forcing:
            return
        rows = sum(span.length for span in plan.spans)
        way = self._runner.graphs if rows == len(plan.spans) else self._runner.chains
        usual = rows == sum(len(span.want.get("sample", ())) for span in plan.spans) and not drafting
        usual &= way is None or not way.warming
        self.times.launched(plan.step, len(plan.spans) if usual else 0, chains, self._runner.captures)

    def _average(self, forced: int, decodes: int, tokens: int) -> None:
        if tokens:
            self._share += (forced / tokens - self._share) / HORIZON
            self._decodes = decodes
