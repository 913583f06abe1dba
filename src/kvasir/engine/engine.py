"""The step loop: plan, launch, read, commit. One model, one thread, no HTTP, no text.

Requests come in as token ids and leave as events. The engine knows seams, never techniques. A step commits as a whole.
If it raises, nothing is committed: its halves are tried until the culprit is alone, and only that request fails.

With overlap, a step is read only after the next one has been launched, so that the device never waits for the host.
What some draws allow depends on the tokens before them (penalties, bad words, grammars). While a sequence that needs
them runs, a step's forward is launched, then the step before is read, then the draw is launched. Drafts and forced
chains continue known tokens: before them, every step is read first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

from kvasir import technique
from kvasir.config import EngineConfig, SpeculationConfig
from kvasir.engine.compiling import Compiling
from kvasir.engine.drafts.drafting import Drafting, holds_draft
from kvasir.engine.drafts.forcing import Forcing, forced_places
from kvasir.engine.drafts.learning import device_bytes, drafter_for, start_learning
from kvasir.engine.drafts.proposals import Proposals
from kvasir.engine.failures import span_failure
from kvasir.engine.forgetting import Forgetter
from kvasir.engine.gate import Gate
from kvasir.engine.grammars import Grammars, wait_for_one
from kvasir.engine.groups import Groups
from kvasir.engine.pages.eviction import EVICTIONS, Eviction
from kvasir.engine.pages.pages import PageManager
from kvasir.engine.pages.shared_prefixes import PageLog, share
from kvasir.engine.part import Part, bound
from kvasir.engine.requests import Requests
from kvasir.engine.schedule.pace import Pace, mixed_rows
from kvasir.engine.schedule.policy import POLICIES, SchedulerPolicy
from kvasir.engine.schedule.scheduler import Scheduler
from kvasir.engine.schedule.step_time import StepTimeModel
from kvasir.engine.scores import prompt_logprobs, prompt_score
from kvasir.engine.start.build import build
from kvasir.engine.start.draft_models import EngineHost, settled
from kvasir.engine.start.tier_choice import open_tiers
from kvasir.engine.steps import StepRunner
from kvasir.engine.stop import until_stop
from kvasir.engine.variants.variants import all_of, refusal
from kvasir.engine.ways.step_clock import StepClock
from kvasir.kernels.compile_ahead import helping
from kvasir.logs import log
from kvasir.models import checkpoint
from kvasir.models.digest import digest
from kvasir.models.loader import load_again
from kvasir.speculation.drafter import Drafter
from kvasir.types import EngineStats, Event, Load, Plan, Request, Span, SpanResult


def start(config: EngineConfig) -> Engine:
    """Build the engine in a process of its own. Processes that it forks compile its kernels."""
    with nullcontext() if config.model.device == "cpu" else helping():
        return Engine(config)


class Engine:
    """Implements ``interface.EngineCore``."""

    def __init__(self, config: EngineConfig) -> None:
        config = self.config = settled(config)
        config.adapters.modules()  # refused at once where adapters are not served
        drafter = drafter_for(config)
        policy = technique.load(POLICIES, config.scheduler.scheduling_policy, SchedulerPolicy)
        host = EngineHost(config)
        if drafter is not None:
            drafter.prepare(host)
        drafters, guest_rank = ([], 0) if drafter is None else (drafter.parts, drafter.guest_rank)
        built = build(config, device_bytes(config, drafter), [policy, *drafters], guest_rank, mtp=host.mtp)
        host.check(built)
        self.info = built.info
        self.info.drafters = () if drafter is None else tuple(drafter.names)
        self.runner = built.runner
        self.clock = StepClock(StepTimeModel(built.roofline), built.runner)
        self.pace = Pace(
            self.clock.model,
            config.scheduler.target_itl,
            mixed_rows(built.roofline) if built.device.type == "cuda" else None,
        )
        self.steps = StepRunner(built.runner, built.max_rows, self.clock)
        self._overlap = built.device.type == "cuda" if config.runner.overlap is None else config.runner.overlap
        self._plans: deque[tuple[Plan, float, int]] = deque()  # in flight: when they were launched, and their rows
        self._resolved = 0.0  # when the last step was
        kv, plan, root = built.runner.pool, built.plan, built.prefix_root
        poison = kv.poison if config.runner.poison else None
        eviction = technique.load(EVICTIONS, config.cache.prefix_eviction, Eviction)
        self.pages = PageManager(
            kv.groups, plan.num_pages, kv.page_slots, root, plan.state_interval, eviction=eviction, on_free=poison
        )
        host.bind(built, self.pages)
        self.info.priorities = policy.priorities
        self.adapters, self.hooks = built.variants.residents(config, self.info, lambda name: self.requests.names(name))
        self.scheduler = Scheduler(
            config.scheduler,
            self.pages,
            policy,
            max_rows=built.max_rows,
            max_model_len=self.info.max_model_len,
            pace=self.pace,
            residents=all_of(self.adapters, self.hooks),
        )
        self.forgetter = Forgetter.of(built.policy, self.pages, self.scheduler, built.runner)
        self.tiers = open_tiers(config, built, self.pages, self.scheduler.in_flight)
        self.requests = Requests(self.scheduler, built.runner, self.info)
        drafting = None
        if drafter is not None:
            drafting = Drafting(config.speculation, drafter, built.runner, built.max_rows, self.info.max_model_len)
        self.learning = start_learning(config, drafting, built.runner)
        self._forcing = Forcing(built.runner, self._overlap)
        facts = built.tokenizer_file, self.info.vocab_size, self.info.eos_ids
        self.compiling = Compiling(Grammars(*facts, config.service.grammar_timeout), self.scheduler)
        self.bind_parts(drafting)
        self.on_launch: Callable[[Iterable[str], bool, Plan], None] = lambda ids, slow, plan: None
        self._seen_kinds: set[tuple] = set()
        checks = self.requests.live, partial(refusal, self.adapters, self.hooks), built.policy
        self._gate = Gate(config.scheduler, self.info, self.scheduler, self.pace, *checks)
        self.info.max_queued_requests = config.scheduler.max_queued_requests
        self.info.max_queued_tokens = self._gate.max_queued_tokens
        self._num_pooled = 0
        self._stats = EngineStats(
            num_pages=self.pages.num_total, startup=built.startup, weight_bytes=built.weight_bytes
        )

    def bind_parts(self, drafting: Drafting | None) -> None:
        """Bind the calls of all parts, with those of this drafter."""
        self.proposals = Proposals(self._forcing, drafting)
        parts: list[Part | None] = [  # in the order of their calls at each place of a step
            self.learning,  # a drafter's weights change before it drafts
            self.compiling,  # whose grammar is ready may be planned
            self.adapters,  # whose adapter is lost may not
            self.tiers,  # pages that have come back are found
            self.forgetter,  # what is due is forgotten before its sequence goes on
            Groups(self.requests.eos_ids),  # branches that are beaten end with the step that shows it
            self._forcing,  # what was forced is nobody's merit, which the drafter must know
            drafting,
            self.proposals,  # both have noted the step by then
        ]
        self._parts = [part for part in parts if part is not None]
        self.requests.follow(self._parts)

        def all_bound(*places: str) -> list[tuple[Callable[..., Any], ...]]:
            return [bound(self._parts, place) for place in places]

        self._before_plan, self._rest, self._pending = all_bound("before_plan", "rest", "pending")
        self._at_work, self._launched = all_bound("at_work", "launched")
        self._committing, self._committed = all_bound("committing", "committed")
        self._completed, self._measured = all_bound("completed", "measured")

    # ------------------------------------------------------------------------------------------------------- requests

    def submit(self, request: Request) -> list[Event]:
        requests, grammar = self.requests, request.params.grammar
        if refused := self._gate.refusal(request, self.steps.max_rows):
            requests.refuse(refused)
            return requests.take()
        branches = requests.add(request)
        # A grammar that cannot be compiled is refused, so its request is accepted once it is compiled, unless the
        # request already ran in an earlier process.
        if grammar is None or any(request.emitted):
            requests.accept(request.id)
        if grammar is not None:
            self.compiling.begin(request, branches)
        for seq in branches:
            if seq.num_output >= max(1, request.max_tokens):  # a replay that stopped between the last token and its end
                requests.finish(seq, "length")
        return requests.take()

    def cancel(self, request_id: str, branch: int | None = None) -> list[Event]:
        self.requests.cancel(request_id, branch)
        return self.requests.take()

    # ----------------------------------------------------------------------------------------------------------- steps

    @property
    def num_in_flight(self) -> int:
        """Number of steps that were launched and not yet read."""
        return len(self._plans)

    def has_work(self) -> bool:
        return bool(self._plans) or self.compiling.busy or self.scheduler.has_work(time.monotonic())

    def step(self) -> list[Event]:
        now = time.monotonic()
        for before_plan in self._before_plan:
            before_plan(self.requests)
        began, running = time.perf_counter(), self.scheduler.running
        proposing = self.proposals.wanted(running)
        # Tokens in flight that the next plan, draft or chain depends on are read before anything is launched behind
        # them.
        if self._plans and (proposing or self.steps.stalled or holds_draft(self._plans[0][0])):
            self._resolve()
        if proposing:
            self.proposals.propose(self.scheduler.running)
        plan = self._plan(now)
        if not plan.spans and not self._plans and any(rest() for rest in self._rest):
            plan = self._plan(now)
        late = bool(self._plans and self.runner.sampler.num_bound)
        if plan.spans:
            # Drafting is part of the step that verifies.
            self._launch(plan, late, began if self.proposals.drafts else time.perf_counter())
        elif not self._plans:
            wait_for_one(future for pending in self._pending for future in pending())
        depth = 1 if plan.spans and self._overlap and not self.steps.careful else 0
        while len(self._plans) > depth or self.steps.stalled:
            self._resolve()
        if late:
            self.steps.draw()
            self.proposals.drawn(plan)
        if self.config.runner.check:
            self.scheduler.check()
        return self.requests.take()

    def _plan(self, now: float) -> Plan:
        plan = self.scheduler.plan(now, self.steps.max_rows, self.proposals.tail())
        for seq in plan.preempted:
            self.requests.close_seat(seq)
        return plan

    def _launch(self, plan: Plan, late: bool, began: float) -> None:
        for span in plan.spans:
            if span.seq.open_seat != span.seat:
                self.runner.open(span.seq)
                span.seq.open_seat = span.seat
        at_work = {span.seq.request.id for span in plan.spans}
        if self._plans:
            at_work.update(span.seq.request.id for span in self._plans[0][0].spans)
        for more in self._at_work:
            at_work.update(more())
        # What a step's kernels depend on, roughly. One of a kind that was not seen before may compile some.
        rows = plan.num_rows
        kind = (
            rows.bit_length(),
            rows == len(plan.spans),
            bool(self.runner.sampler.num_bound),
            bool(self.runner.seats.varied),
        )
        slow = kind not in self._seen_kinds
        self.on_launch(at_work, slow, plan)
        self._seen_kinds.add(kind)
        self._stats.step += 1
        self._plans.append((plan, began, rows))
        self.steps.launch(plan, not slow, late)
        for launched in self._launched:
            launched(plan)

    def _resolve(self) -> None:
        """Wait for the oldest plan in flight and commit it."""
        plan, began, rows = self._plans.popleft()
        for part, results in self.steps.resolve():
            for span, result in zip(part, results):
                # Void: it ended or was preempted meanwhile, or an earlier span failed its whole request. No seat is
                # given to another while a step that used it is in flight, so that comparing seats is enough.
                if span.seq.seat == span.seat and result is not None:
                    self._commit(span, result)
        for completed in self._completed:
            completed(plan, self.requests)
        self.scheduler.complete(plan)
        now = time.perf_counter()
        self._stats.step_seconds, self._stats.step_rows = now - max(began, self._resolved), rows
        self._stats.busy_seconds += self._stats.step_seconds
        self._resolved = now
        for measured in self._measured:
            measured(plan, self._stats, now)

    def idle(self) -> bool:
        """Do a bit of work while there are no requests. False: none is left."""
        busy = [part.idle() for part in self._parts]
        while self._plans and not self.requests.live:  # launched ahead of a token that was the last one
            self._resolve()
        served = self._stats.generation_tokens + self._num_pooled > 0
        return (served and not self._plans and self.runner.capture_next()) or any(busy)

    def _commit(self, span: Span, result: SpanResult) -> None:
        """Commit one span in one transaction: counters, pages, prefix index, stop rules, and the event that tells."""
        seq, tokens = span.seq, result.tokens
        if result.error is not None:
            log.warning("request %s failed: %s", seq.request.id, result.error)
            self.requests.fail(seq.request.id, span_failure(seq.request, result.error))
            return
        if result.scores:
            seq.state.setdefault("scores", []).extend(result.scores)
            seq.state["num_scored"] = span.start + span.want["score"].stop
        index, reason, stop = len(seq.tokens) - seq.num_prompt, None, None
        if index + len(tokens) >= seq.max_output or not seq.stop_ids.isdisjoint(tokens):  # most spans cannot end here
            tokens, reason, stop = until_stop(seq, tokens, self.requests.eos_ids)
            if result.logprobs:
                result.logprobs = result.logprobs[: len(tokens)]
        if result.pooled is not None:
            reason = "stop"
            self._num_pooled += 1
        if result.path:
            for committing in self._committing:
                committing(span, result, tokens)
        self.scheduler.advance(span, tokens)
        for committed in self._committed:
            committed(span, result, reason is not None)
        pushed: Iterable[int] = ()
        if tokens:
            self._stats.generation_tokens += len(tokens)
            self._stats.forwards += 1
            if self.runner.sampler.num_following:
                pushed = self.runner.sampler.accepted(seq, tokens)
        elif reason is None:
            return
        request = seq.request
        event = Event(
            kind="tokens",
            request_id=request.id,
            epoch=request.epoch,
            branch=seq.branch,
            index=index,
            token_ids=tokens,
            logprobs=result.logprobs,
            pooled=result.pooled,
            num_cached=seq.num_cached,
            forced=forced_places(index, result.forced, pushed),
        )
        if index == 0:
            self._stats.prompt_tokens += seq.num_prompt if seq.parent is None else 0
            event.prompt_logprobs, event.score = prompt_logprobs(seq), prompt_score(seq)
            event.queued = None if seq.branch else seq.first_scheduled - request.arrival
        if reason is not None:
            event.finish_reason, event.stop_reason = reason, stop
            self.requests.drop(seq, reason)
        self.requests.events.append(event)

    # ----------------------------------------------------------------------------------------- while nothing is running

    def draft_with(self, speculation: SpeculationConfig) -> Drafter | None:
        """Replace the drafter by another CPU drafter, or none, to measure several with one set of weights. No request
        may be running. Raises ConfigError for a drafter that is a model."""
        assert not self.requests.live, "requests are running"
        self.bind_parts(None)
        self.runner.sampler.num_top, self.runner.sampler.by_blocks = 0, False  # the previous drafter may have set them
        if not speculation.drafter:
            return None
        drafting = Drafting.on_cpu(speculation, self.runner, self.steps.full_rows, self.info.max_model_len)
        self.bind_parts(drafting)
        return drafting.drafter

    def update_weights(self, model: str) -> None:
        """Load the weights of another checkpoint of the same model in place. No request may be running. Prefixes and
        traces are forgotten, drafters keep what they know. Raises ConfigError."""
        assert not self.requests.live, "requests are running"
        load_again(self.runner.model, checkpoint.resolve(model))
        self.weights_changed(model)

    def weights_changed(self, model: str | None = None) -> None:
        """Refresh copies of weights, and forget prefixes and traces, after weights were written to (those of
        checkpoint ``model``). No request may be running."""
        self.runner.weights_changed()
        for part in self._parts:
            part.weights_changed(model)
        self.pages.forget_prefixes()

    # ----------------------------------------------------------------------------------------------------------- state

    def stats(self) -> EngineStats:
        s, scheduler = self._stats, self.scheduler
        s.time = time.monotonic()
        s.num_waiting, s.num_blocked = scheduler.num_waiting, scheduler.num_blocked
        s.num_running, s.preemptions = scheduler.num_running, scheduler.preemptions
        s.num_free_pages, s.num_cached_pages = self.pages.num_free, self.pages.num_cached
        s.prefix_queries, s.cached_tokens = self.pages.queried_tokens, self.pages.cached_tokens
        s.failed, s.step_time_error = dict(self.requests.failed), self.clock.errors()
        for part in self._parts:
            part.fill_stats(s)
        return s

    def load(self) -> Load:
        return self._gate.load(self.steps.max_rows)

    def join(self, prefix_key: bytes) -> PageLog | None:
        if self.tiers is not None:
            self.tiers.refuse_sharing()
        self.info.weights = digest(self.runner.model)
        return share(self.pages, self.info, prefix_key)

    def close(self) -> None:
        for part in self._parts:
            part.close()
