"""Drafts in the step loop: asks the drafter for drafts of decoding sequences, lets the controller cut them, hands the
rest to the scheduler, and tells drafter and controller which were accepted. Rows with drafts are ordinary rows: see
``Span``.

A draft continues the committed tokens, so a step with drafts is planned only after the step before it was read. Where
the controller finds that this does not pay, only a counter runs here, and the engine overlaps steps as it does without
a drafter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from kvasir.config import SpeculationConfig
from kvasir.engine.drafts.chained_drafts import STATE_DRAFTS, check_exact, check_states, in_one_chain
from kvasir.engine.drafts.draft_savings import Savings
from kvasir.engine.drafts.draft_times import DraftTimes
from kvasir.engine.part import LiveRequests, Part
from kvasir.engine.schedule.spans import NO_TAIL, ONE_SAMPLE, Tail, rows_left
from kvasir.engine.schedule.step_time import Roofline
from kvasir.engine.ways.runner import Runner
from kvasir.engine.ways.taps import Listener
from kvasir.errors import ConfigError
from kvasir.logs import log
from kvasir.models import cost
from kvasir.speculation.budgets import Optimal
from kvasir.speculation.controller import TRIAL_SEQS, Controller
from kvasir.speculation.drafter import Ask, Drafter, check_trees
from kvasir.speculation.forest import Forest
from kvasir.speculation.lengths import Lengths
from kvasir.speculation.router import load_drafter
from kvasir.speculation.tree import DraftTree
from kvasir.types import EngineStats, FinishReason, Plan, Sequence, Span, SpanResult, Status

# One in PLAIN_SAMPLES plain steps is measured, and each of the first FIRST_PLAIN after a drafted step or the start.
PLAIN_SAMPLES, FIRST_PLAIN = 8, 16
# Number of steps before the next trial of drafting in which hidden states are already handed over.
HIDDEN_LEAD = 16
# Failures in a row after which a drafter is switched off.
MAX_FAILURES = 8
# Bytes and operations a second, by kind of device, that no current device exceeds by much.
BEST = {"cuda": (5e12, 1e15), "cpu": (4e11, 4e12)}


@dataclass(frozen=True, slots=True)
class _Measured:
    """A timed step that holds only decodes."""

    drafted: bool
    decodes: int
    context: int
    drafts: int
    eager: bool  # launched kernel by kernel, whatever its size
    captured: bool  # it captured a graph, which is done once


class Drafting(Part):
    """The part of the step loop that handles drafts.

    ``max_rows`` is the most rows of a step; ``clock`` returns seconds. The scheduler may drop drafts.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        drafter: Drafter,
        runner: Runner,
        max_rows: int,
        max_model_len: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.drafter, self._clock = drafter, clock
        self._foreign = not all(part.ours for part in drafter.parts)
        self._config, self._runner, self._max_rows, self._max_model_len = config, runner, max_rows, max_model_len
        self._times = DraftTimes(_roofline(runner), runner.graphs, runner.device.type == "cuda")
        self.controller = Controller(self._times.predict, fixed=config.draft_control == "fixed")
        self._savings = Savings(self._times.measured_plain)
        self._states = bool(runner.parts.packer.states)
        # Rows of a tree have their keys in other slots than those of a chain, and a GPU adds them in another order.
        self._chains = self._states or (runner.model.place.exact and runner.device.type == "cuda")
        self._lengths = {"length": Lengths, "optimal": Optimal}.get(config.draft_control, lambda: None)()
        self._pending: dict[Sequence, tuple[Many[DraftTree], int]] = {}  # a step's trees, and which of them
        # Outcomes that the controller has not seen yet: the trees of a step, which of them were verified, and their
        # paths.
        self._verified: Forest | None = None
        self._which: list[int] = []
        self._paths: list[list[int]] = []
        self._moves: dict[int, tuple[list[int], list[int]]] = {}  # by group of pages, from which slots to which
        # Whether only the controller observes outcomes. It gets those of all trees of a step at once.
        self._alone = type(drafter).observe is Drafter.observe
        self._measured: dict[int, _Measured | None] = {}  # by step; None: one with drafts and more than decodes
        self._captures = 0  # graphs captured when the last step was launched
        self._drafting = False  # whether the step being planned has drafts
        self._failures = self._failures_before = 0  # failures in a row, now and at the last proposal
        self._since_drafted = 0  # plain steps launched
        self._after_drafted = -1  # the plain step after the last drafted one, which waited for that one's end
        self._ended = 0.0  # when the last step ended
        drafter.attach(runner.model, runner.capture())
        self.listen()
        if self._states:
            check_states(drafter, config.max_draft_tokens)
        elif self._chains:
            check_exact(drafter)
        if config.draft_control != "fixed":
            for part in drafter.parts:
                part.use_times(self._times.predict)
        runner.parts.guest_inputs, runner.sampler.guessing = drafter.guests, drafter.guessing
        runner.sampler.by_blocks = not drafter.exact

    @classmethod
    def on_cpu(cls, config: SpeculationConfig, runner: Runner, max_rows: int, max_model_len: int) -> Drafting:
        """Replace the drafter of a running engine by one on the CPU. Raises ConfigError for a drafter that is a
        model."""
        drafter = load_drafter(config.drafter)
        if drafter.place != "cpu":
            raise ConfigError(f"{drafter.name} must be there from the start: --drafter {config.drafter}")
        return cls(config, drafter, runner, max_rows, max_model_len)

    def listen(self) -> None:
        """Ask for the hidden states that the drafter reads. Called before any step is captured or recorded."""
        layers = self.drafter.hidden_layers
        self._listener: Listener | None = self._runner.listen(layers) if layers else None

    # ---------------------------------------------------------------------------------------------------- before a step

    def wanted(self, running: Iterable[Sequence]) -> bool:
        """Whether to draft in the next step. Called once a step, before anything is resolved."""
        self._drafting = self._failures < MAX_FAILURES and not self.controller.resting() and self._worth_it(running)
        self._runner.sampler.num_top = self.drafter.top_tokens if self._drafting else 0
        if self._listener is not None:
            near = self._failures < MAX_FAILURES and self.controller.rest_left <= HIDDEN_LEAD
            self._listener.on = self._drafting or near or self.drafter.follows
        return self._drafting

    def _worth_it(self, running: Iterable[Sequence]) -> bool:
        running = list(running)
        decodes = [seq for seq in running if rows_left(seq) <= 1]
        if self._config.draft_control != "fixed" and not self._times.settled(len(decodes)):
            return False
        return self.controller.wanted(
            len(decodes), sum(len(seq.tokens) for seq in decodes), len(decodes) == len(running)
        )

    def tail(self) -> Tail:
        """Guests that prompts of the step being planned may end with."""
        on = self._failures < MAX_FAILURES and (self._drafting or self.controller.pays)
        return Tail(self.drafter.tail, self.drafter.guest_variant, self.drafter.names) if on else NO_TAIL

    def propose(self, running: Iterable[Sequence]) -> None:
        """Set the drafts of all sequences that decode. Nothing may be in flight."""
        decodes, context, rows, asks = 0, 0, 0, []
        at_work, longest, lengths, most = (
            Status.RUNNING,
            self._max_model_len,
            self._lengths,
            self._config.max_draft_tokens,
        )
        if self._states:
            most = min(most, STATE_DRAFTS)
        if self.controller.most_nodes is not None:
            most = min(most, self.controller.most_nodes)
        if lengths is not None:
            running = list(running)
            at_end = [seq for seq in running if rows_left(seq) == 1 and seq.status is at_work]
            lengths.plan(at_end, self._times.predict)
        for seq in running:  # once a sequence and step: no call that is not needed
            known = len(seq.tokens)
            left = known + seq.num_drawn - seq.num_computed - seq.num_ahead  # rows_left
            rows += left
            if left != 1 or seq.status is not at_work:
                continue
            decodes += 1
            context += known
            if seq.num_forced:  # nothing to guess
                rows += len(seq.draft)
                continue
            if seq.draft or seq.guests:
                seq.draft, seq.draft_parents, seq.guests = [], [], {}
            nodes, end, wanted = most, seq.num_prompt + seq.max_output, seq.request.params.num_draft_tokens
            if known + nodes >= end or known + nodes >= longest:
                nodes = min(end, longest) - known - 1
            if wanted is not None and wanted < nodes:
                nodes = wanted
            if nodes > 0 and lengths is not None:
                nodes = lengths.budget(seq, nodes)
            if nodes > 0:
                asks.append(Ask(seq, nodes, nodes))
        if not asks:
            return
        if self.controller.trying and len(asks) > TRIAL_SEQS:
            asks = asks[:: -(-len(asks) // TRIAL_SEQS)]
        for ask in asks:
            if "drafted" not in ask.seq.state:
                self._open(ask.seq)
        trees = self._guarded(self._propose, asks)
        if trees is None:
            return
        if self._failures == self._failures_before:  # no failure since the previous proposal
            self._failures = 0
        self._failures_before = self._failures
        for part in (trees,) if isinstance(trees, Forest) else trees:
            part.source = part.source or self.drafter.name
        graphs = self._runner.graphs
        if (
            graphs is not None
            and not graphs.trees
            and decodes < graphs.most_drafted
            and self._config.draft_control != "fixed"
        ):
            # Only chains are captured here, and a graph is worth more than branches. A tree with guests keeps them: it
            # runs in no graph.
            trees = [tree if tree.guests else tree.trunk() for tree in trees]
        if self._chains:
            trees = [in_one_chain(tree, self.drafter.tail) for tree in trees]
        # Prompts need rows, too. Drafts get the rows that prompts and decodes leave, and at least a quarter of the step
        # less the decodes.
        budget = max(self._max_rows // 4, self._max_rows - rows) - decodes
        self._set(asks, self.controller.allocate(trees, context, max(0, budget), decodes))

    def _propose(self, asks: list[Ask]) -> Many[DraftTree]:
        trees = self.drafter.propose(asks)
        if self._foreign:
            check_trees(
                asks,
                trees,
                self._runner.model.spec.vocab_size,
                0 if self.drafter.guests is None else len(self.drafter.guests),
            )
        return trees

    def _set(self, asks: list[Ask], trees: Many[DraftTree]) -> None:
        if not isinstance(trees, Forest):
            for i, (ask, tree) in enumerate(zip(asks, trees)):
                if tree.tokens or tree.guests:
                    self._pending[ask.seq] = trees, i
                    ask.seq.draft, ask.seq.draft_parents, ask.seq.guests = (
                        tree.tokens,
                        [] if tree.is_chain else tree.parents,
                        tree.guests,
                    )
                    ask.seq.guest_variant = self.drafter.guest_variant
            return
        pending, start = self._pending, 0
        tokens, parents = trees.ints[:2].tolist()
        for i, (ask, end, is_chain) in enumerate(zip(asks, trees.ends.tolist(), trees.chains)):
            if end > start:
                seq = ask.seq
                pending[seq] = trees, i
                seq.draft, seq.draft_parents = tokens[start:end], [] if is_chain else parents[start:end]
                start = end

    def draft_of(self, seq: Sequence) -> DraftTree | None:
        """The draft that the sequence's next span verifies."""
        found = self._pending.get(seq)
        return None if found is None else found[0][found[1]]

    def _guarded(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call the drafter so that its failure costs no request. Returns None where it failed."""
        try:
            return call(*args)
        except Exception:
            self._failures += 1
            log.exception(
                "drafter %s failed (%d times in a row)%s",
                self.drafter.name,
                self._failures,
                ": it is off until a restart" if self._failures == MAX_FAILURES else "",
            )
            return None

    def _open(self, seq: Sequence) -> None:
        if not seq.state.get("drafted"):
            seq.state["drafted"] = True
            self._guarded(self.drafter.open, seq)

    def launched(self, plan: Plan) -> None:
        """Note that ``plan`` was launched, and whether it is timed: only steps without prompts are."""
        graphs = self._runner.graphs
        captures, self._captures = self._captures, self._runner.captures
        if self._drafting:
            self._since_drafted = 0
        else:
            if self._measured and plan.num_rows > len(plan.spans):
                # The end of a plain step in flight is seen after this launch, which takes longer because it holds
                # prompts.
                self._measured = {
                    step: found for step, found in self._measured.items() if found is None or found.drafted
                }
            self._since_drafted += 1
            if self._since_drafted == 1:
                self._after_drafted = plan.step
            elif self._since_drafted > FIRST_PLAIN and plan.step % PLAIN_SAMPLES:
                return
        rows = context = 0
        for span in plan.spans:
            if span.seq.num_forced or len(span.want.get("sample", ())) + len(span.guests) != span.length:
                if self._drafting:
                    self._measured[plan.step] = None
                return
            rows += span.length
            context += span.start
        self._measured[plan.step] = _Measured(
            self._drafting,
            len(plan.spans),
            context,
            rows - len(plan.spans),
            graphs is not None and not graphs.takes(plan.spans),
            self._captures > captures,
        )

    # ----------------------------------------------------------------------------------------------------- after a step

    def committing(self, span: Span, result: SpanResult, tokens: list[int]) -> None:
        """Note which rows will move because they lie off the leftmost path."""
        path, count = result.path, len(tokens)
        if count > 1 and path[count - 1] - path[0] >= count:
            self._move(span, path[:count])
        if result.logprobs:
            self._name_drafter(span, result)
        if result.top is not None and not span.seq.num_forced and (tree := self.draft_of(span.seq)) is not None:
            self._guarded(self.drafter.recycle, span.seq, [span.seq.tokens[-1], *tree.tokens], result.top)

    def _name_drafter(self, span: Span, result: SpanResult) -> None:
        """Note with the log-probability of each accepted token who drafted it. Only the last token of the whole path
        was drawn without a draft; a stop rule may have cut it off already."""
        found = self._pending.get(span.seq)
        if found is not None:
            trees, i = found
            source = trees.source if isinstance(trees, Forest) else trees[i].source
            for entry in result.logprobs[: len(result.path) - 1]:
                entry.drafter = source

    def _move(self, span: Span, rows: list[int]) -> None:
        """Note where rows of the accepted path go."""
        moves = [(span.start + row, span.start + rows[0] + j) for j, row in enumerate(rows) if row != rows[0] + j]
        size = self._runner.pool.page_slots
        for group, table in enumerate(span.seq.tables):
            sources, targets = self._moves.setdefault(group, ([], []))
            for a, b in ((span.seq.place(group, a), span.seq.place(group, b)) for a, b in moves):
                sources.append(table[a // size] * size + a % size)
                targets.append(table[b // size] * size + b % size)

    def _move_noted(self) -> None:
        """Move the rows of all spans of a step at once. Their pages stay theirs until the step is completed."""
        moves, self._moves = self._moves, {}
        for group, (sources, targets) in moves.items():
            self._runner.pool.move_slots(group, sources, targets)

    def committed(self, span: Span, result: SpanResult, ends: bool) -> None:
        if result.path:
            self.observe(span, result, result.forced > 0)
        elif not ends or self.drafter.follows:
            self.plain(span, result)

    def observe(self, span: Span, result: SpanResult, forced: bool = False) -> None:
        """Tell drafter and controller which tokens of a span's draft were accepted, once the span is committed.
        ``forced``: the draft was a forced chain, which is nobody's merit."""
        found = self._pending.pop(span.seq, None)
        if forced or found is None:
            self.ingest(span, self._committed(span, result))
            if not forced and result.guesses is not None:  # a prompt with the drafter's tail
                self._open(span.seq)
                self._answer(span, DraftTree(guests={-1: (tuple(span.guests),)}, source=self.drafter.name), result)
            return
        if self._lengths is not None:
            self._lengths.verified(span.seq, span.length - 1 - len(span.guests), len(result.path) - 1)
        trees, i = found
        if trees is not self._verified and self._alone and isinstance(trees, Forest):
            self.learn()
            self._verified = trees
        hidden = self._committed(span, result)
        if trees is self._verified:
            self._which.append(i)
            self._paths.append(result.path)
            self.ingest(span, hidden)
            return
        tree = trees[i]
        path = tree.path(result.tokens)
        if tree.tokens:
            self.controller.observe(tree, path)
        self._guarded(self.drafter.observe, span.seq, tree, path)
        self.ingest(span, hidden)
        self._answer(span, tree, result)

    def _answer(self, span: Span, tree: DraftTree, result: SpanResult) -> None:
        """Hand the drafter what the guests behind the last accepted node guess."""
        if result.guesses is not None:
            node = result.path[-1] - result.path[0] - 1
            first = sum(tree.num_guests(other) for other in takewhile(lambda other: other != node, tree.guests))
            guesses = result.guesses[first : first + tree.num_guests(node)]
            self._guarded(self.drafter.answer, span.seq, tree, node, guesses)

    def learn(self) -> None:
        """Tell the controller about all trees that were verified since the last call."""
        if self._verified is not None:
            self.controller.observe_all(self._verified, self._which, self._paths)
            self._verified, self._which, self._paths = None, [], []

    def plain(self, span: Span, result: SpanResult) -> None:
        """Hand the drafter the hidden states of a committed span without a draft. Others may have asked for those of a
        decode: while drafting rests, the drafter does not read them."""
        listener = self._listener
        if listener is not None and result.hidden is not None and (listener.on or span.length > 1):
            self.ingest(span, listener.of(result.hidden))

    def ingest(self, span: Span, hidden: Any) -> None:
        """Hand the drafter the hidden states [K, layers, E] of a span's committed rows; None: there are none."""
        if hidden is not None and span.valid and self._failures < MAX_FAILURES:
            self._open(span.seq)
            self._guarded(self.drafter.ingest, span.seq, hidden, span.start)

    def completed(self, plan: Plan, requests: LiveRequests) -> None:
        self.charge(plan)

    def charge(self, plan: Plan) -> None:
        """Move rows of accepted paths, and charge a step that was read. Its price is all the time since the end of the
        step before, including waits. Called before pages that the step gave up may go to others."""
        if self._moves:
            self._move_noted()
        if self.drafter.follows:
            self._guarded(self.drafter.settle)
        self.learn()
        now = self._clock()
        seconds, self._ended = now - self._ended, now
        if plan.step not in self._measured:
            self.controller.rested(seconds)
            return
        step = self._measured.pop(plan.step)
        if step is None:
            self.controller.end_step(0, 0, seconds)
            self._savings.drafted(0, 0, self.controller.stats.accepted, seconds)
        elif step.drafted:
            charged, known = self._times.observe(
                step.decodes, step.context, step.drafts, True, seconds, step.eager, step.captured
            )
            self.controller.end_step(step.decodes, step.context, charged, known)
            self._savings.drafted(step.decodes, step.context, self.controller.stats.accepted, seconds)
        elif plan.step == self._after_drafted:
            usual = self._times.predict(step.decodes, step.context, 0, False)
            self.controller.rested(usual, min(max(0.0, seconds - usual), usual))
            self._savings.behind(step.decodes, step.context, seconds)
        else:
            self._times.observe(step.decodes, step.context, 0, False, seconds, once=step.captured)
            self.controller.rested(seconds)

    def ended(self, seq: Sequence, reason: FinishReason) -> None:
        # A cancelled sequence does not show how long such sequences get.
        if self._lengths is not None and reason in ("stop", "length"):
            self._lengths.ended(seq)
        self._pending.pop(seq, None)
        if seq.state.get("drafted"):
            self._guarded(self.drafter.close, seq)

    def fill_stats(self, stats: EngineStats) -> None:
        self.learn()
        s = self.controller.stats
        stats.draft_steps, stats.drafts = s.steps, s.verified
        stats.drafted_tokens, stats.accepted_tokens = s.drafted, s.accepted
        stats.accepted_by_depth, stats.drafted_by, stats.drafted_by_depth = s.by_depth, s.by_source, s.by_source_depth
        stats.draft_saved_seconds, stats.draft_gain = self._savings.seconds, self.controller.gain

    def _committed(self, span: Span, result: SpanResult) -> Any:
        """Hidden states [K, layers, E] of a verified span's committed rows: up to the anchor, then along the path."""
        if result.hidden is None or self._listener is None:
            return None
        hidden, rows = self._listener.of(result.hidden), committed_rows(span, result)
        return hidden[: len(rows)] if rows[-1:] == [len(rows) - 1] else hidden[rows]


def committed_rows(span: Span, result: SpanResult) -> list[int]:
    """Rows of a committed span that verified a draft and that stay, by index in the span: up to the anchor, then along
    the path."""
    return [*range(result.path[0] + 1), *result.path[1:]][: span.seq.num_computed - span.start]


def holds_draft(plan: Plan) -> bool:
    """Whether a plan in flight verifies drafts or has guests, so that the tokens after it are not known yet."""
    return any(span.want is not ONE_SAMPLE and span.commit == "walk" for span in plan.spans)


def _roofline(runner: Runner) -> Roofline:
    """A roofline above what the device can do. It is the prior of the step times until they are measured, and their
    lower bound."""
    spec, size = runner.model.spec, runner.model.place.dtype.itemsize
    bandwidth, flops = BEST.get(runner.device.type, BEST["cpu"])
    pairs = sum(layer.mixer.pair_flops() for layer in spec.layers)
    return Roofline(
        bandwidth,
        flops,
        cost.weight_bytes(spec, runner.model.weight_bytes),
        2 * cost.active_params(spec),
        pairs,
        sum(cost.kv_bytes_per_token(spec, size).values()),
        cost.routed_bytes(spec, runner.model.weight_bytes),
    )
