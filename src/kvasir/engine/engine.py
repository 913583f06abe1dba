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
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field

from kvasir import technique
from kvasir.config import EngineConfig, SpeculationConfig
from kvasir.engine.build import build
from kvasir.engine.drafting import Drafting, holds_draft
from kvasir.engine.failures import span_failure
from kvasir.engine.forcing import Forcing, forced_places
from kvasir.engine.gate import Gate
from kvasir.engine.grammars import PATIENCE_SECONDS, Grammars, failure, wait_for_one, waited
from kvasir.engine.groups import Groups
from kvasir.engine.learning import device_bytes, drafter_for, start_learning
from kvasir.engine.pace import Pace, StepClock, mixed_rows
from kvasir.engine.pages import PageManager
from kvasir.engine.policy import POLICIES, SchedulerPolicy
from kvasir.engine.scheduler import Scheduler
from kvasir.engine.scores import prompt_logprobs, prompt_score
from kvasir.engine.second_model import EngineHost
from kvasir.engine.shared_prefixes import PageLog, share
from kvasir.engine.step_time import StepTimeModel
from kvasir.engine.steps import StepRunner
from kvasir.engine.stop import until_stop
from kvasir.engine.variants import all_of, refusal
from kvasir.kernels.compile_ahead import helping
from kvasir.logs import log
from kvasir.models import checkpoint
from kvasir.models.digest import digest
from kvasir.models.loader import load_again
from kvasir.speculation.drafter import Drafter
from kvasir.types import EngineStats, Event, FinishReason, Load, Plan, Request, Sequence, Span, SpanResult


@dataclass(slots=True)
class Live:
    """A request in the engine and its unfinished branches."""

    request: Request
    branches: dict[int, Sequence] = field(default_factory=dict)
    compiling: Future | None = None
    accepted: bool = False  # the accepted event was sent


def start(config: EngineConfig) -> Engine:
    """Build the engine in a process of its own. Processes that it forks compile its kernels."""
    with nullcontext() if config.model.device == "cpu" else helping():
        return Engine(config)


class Engine:
    """Implements ``interface.EngineCore``."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        config.adapters.modules()  # refused at once where adapters are not served
        drafter = drafter_for(config)
        policy = technique.load(POLICIES, config.scheduler.scheduling_policy, SchedulerPolicy)
        host = EngineHost(config)
        if drafter is not None:
            drafter.prepare(host)
        parts, guest_rank = ([], 0) if drafter is None else (drafter.parts, drafter.guest_rank)
        built = build(config, device_bytes(config, drafter), [policy, *parts], guest_rank)
        host.check(built.info)
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
        self.pages = PageManager(kv.groups, plan.num_pages, kv.page_slots, root, plan.state_interval, on_free=poison)
        host.bind(built, self.pages)
        self.info.priorities = policy.priorities
        self.adapters, self.hooks = built.variants.residents(config, self.info, self._names)
        self.scheduler = Scheduler(
            config.scheduler,
            self.pages,
            policy,
            max_rows=built.max_rows,
            max_model_len=self.info.max_model_len,
            pace=self.pace,
            residents=all_of(self.adapters, self.hooks),
        )
        self._drafting = (
            None
            if drafter is None
            else Drafting(config.speculation, drafter, built.runner, built.max_rows, self.info.max_model_len)
        )
        self._learning = start_learning(config, self._drafting, built.runner)
        self._forcing = Forcing(built.runner, self._overlap)
        seconds = config.service.grammar_timeout
        self._grammars = Grammars(built.tokenizer_file, self.info.vocab_size, self.info.eos_ids, seconds)
        self._eos_ids = frozenset(self.info.eos_ids)
        self._live: dict[str, Live] = {}
        self._groups = Groups()
        self._compiling = 0  # requests whose grammar is being compiled
        self.on_launch: Callable[[Iterable[str], bool, Plan], None] = lambda ids, slow, plan: None
        self._seen_kinds: set[tuple] = set()
        self._gate = Gate(config.scheduler, self.info, self.scheduler, self.pace)
        self.info.max_queued_requests = config.scheduler.max_queued_requests
        self.info.max_queued_tokens = self._gate.max_queued_tokens
        self._num_generated = self._num_forwards = self._num_pooled = 0
        self._failed: Counter[str] = Counter()
        self._stats = EngineStats(
            num_pages=self.pages.num_total, startup=built.startup, weight_bytes=built.weight_bytes
        )

    # ------------------------------------------------------------------------------------------------------- requests

    def submit(self, request: Request) -> list[Event]:
        if refusal := self._refusal(request):
            self._failed[refusal.code or "refused"] += 1
            return [refusal]
        live = self._live[request.id] = Live(request)
        # A grammar that cannot be compiled is refused, so its request is accepted once it is compiled, unless the
        # request already ran in an earlier process.
        events = self._accept(live) if request.params.grammar is None or any(request.emitted) else []
        for branch in range(request.params.n):
            seq = Sequence(request, branch)
            if branch in request.ended:
                self._groups.replayed(seq, self._eos_ids)
                continue
            seq.max_output = min(request.max_tokens, self.info.max_model_len - seq.num_prompt)
            if not request.params.ignore_eos:
                seq.stop_ids |= self._eos_ids
            seq.parent = next(iter(live.branches.values()), None)  # the first that has not ended
            live.branches[branch] = seq
            self.scheduler.add(seq)
        if request.params.grammar is not None:
            self._start_compiling(live)
        for seq in list(live.branches.values()):
            if seq.num_output >= max(1, request.max_tokens):  # a replay that stopped between the last token and its end
                events.append(self._finish(seq, "length"))
        return events

    def _accept(self, live: Live) -> list[Event]:
        """Return the first event of a request, unless it was sent."""
        if live.accepted:
            return []
        live.accepted = True
        return [Event(kind="accepted", request_id=live.request.id, epoch=live.request.epoch)]

    def _refusal(self, request: Request) -> Event | None:
        """Return the error that refuses ``request``, or None to take it."""
        if request.id in self._live:
            return Event(
                kind="error",
                request_id=request.id,
                epoch=request.epoch,
                status=409,
                code="duplicate_request_id",
                message=f"request id {request.id!r} is in use",
            )
        return refusal(self.adapters, self.hooks, request) or self._gate.refusal(request, self.steps.max_rows)

    def _names(self, adapter: str) -> bool:
        """Whether a request that has not ended names this adapter."""
        variants = (live.request.variant for live in self._live.values())
        return any(variant is not None and variant.name == adapter for variant in variants)

    def cancel(self, request_id: str, branch: int | None = None) -> list[Event]:
        if (live := self._live.get(request_id)) is None:
            return []
        chosen = [s for b, s in live.branches.items() if branch is None or b == branch]
        return (self._accept(live) if chosen else []) + [self._finish(seq, "cancelled") for seq in chosen]

    def _finish(self, seq: Sequence, reason: FinishReason) -> Event:
        """End one branch in any state and return its last event. Its pages, seat and sampler state become free."""
        self._drop(seq, reason)
        return Event(
            kind="tokens",
            request_id=seq.request.id,
            epoch=seq.request.epoch,
            branch=seq.branch,
            index=seq.num_output,
            finish_reason=reason,
            num_cached=seq.num_cached,
        )

    def _drop(self, seq: Sequence, reason: FinishReason) -> None:
        self._close_seat(seq)
        if self._drafting is not None:
            self._drafting.close(seq, reason)
        self._learning.ended(seq)
        self.scheduler.finish(seq, reason)
        seq.finish_reason = reason
        self._groups.ended(seq)
        live = self._live[seq.request.id]
        live.branches.pop(seq.branch, None)
        if not live.branches:
            if live.compiling is not None:
                live.compiling.cancel()
                self._compiling -= 1
            self._groups.forget(seq.request.id)
            del self._live[seq.request.id]

    def _fail(self, request_id: str, *, status: int, code: str, message: str, param: str | None = None) -> Event:
        """End a whole request with one terminal error."""
        live = self._live[request_id]
        self._failed[code] += 1
        for seq in list(live.branches.values()):
            self._drop(seq, "error")
        return Event(
            kind="error",
            request_id=request_id,
            epoch=live.request.epoch,
            status=status,
            code=code,
            message=message,
            param=param,
        )

    # ------------------------------------------------------------------------------------------------------- grammars

    def _start_compiling(self, live: Live) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        for seq in live.branches.values():
            self.scheduler.block(seq, until)
        live.compiling = self._grammars.compile(live.request)
        self._compiling += 1

    def _poll_compiling(self, now: float) -> list[Event]:
        """Hand finished matchers to their branches. Requests whose grammar fails or waits too long fail."""
        events = []
        for live in [live for live in self._live.values() if live.compiling is not None]:
            future, first = live.compiling, next(iter(live.branches.values()))
            if future.done():
                live.compiling = None
                self._compiling -= 1
                if (error := future.exception()) is not None:
                    events.append(self._fail(live.request.id, **failure(live.request.id, error)))
                    continue
                for seq in live.branches.values():
                    seq.state["grammar"] = future.result().copy()
                    self.scheduler.unblock(seq)
                events += self._accept(live)
            elif now > first.blocked_until and future.cancel():
                events.append(self._fail(live.request.id, **waited()))
        return events

    # ----------------------------------------------------------------------------------------------------------- steps

    @property
    def num_in_flight(self) -> int:
        """Number of steps that were launched and not yet read."""
        return len(self._plans)

    def has_work(self) -> bool:
        return bool(self._plans or self._compiling) or self.scheduler.has_work(time.monotonic())

    def step(self) -> list[Event]:
        now = time.monotonic()
        self._learning.tick()
        events = self._poll_compiling(now) if self._compiling else []
        if self.adapters is not None and self.adapters.busy:
            requests = [live.request for live in self._live.values()]
            events += [self._fail(request.id, **why) for request, why in self.adapters.lost(requests)]
        began = time.perf_counter()
        drafting = self._drafting is not None and self._drafting.wanted(self.scheduler.running)
        forcing = self._forcing.wanted(drafting)
        verifying = bool(self._plans) and holds_draft(self._plans[0][0])
        # Tokens in flight that the next plan, draft or chain depends on are read before anything is launched
        # behind them.
        if self._plans and (self.steps.stalled or drafting or forcing or verifying):
            self._resolve(events)
        if forcing:
            self._forcing.propose(self.scheduler.running, drafting)
        if drafting:
            self._drafting.propose(self.scheduler.running)
        plan = self.scheduler.plan(now, self.steps.max_rows, None if self._drafting is None else self._drafting.tail())
        for seq in plan.preempted:
            self._close_seat(seq)
        late = bool(self._plans and self.runner.sampler.num_bound)
        if plan.spans:
            # Drafting is part of the step that verifies.
            self._launch(plan, late, began if drafting else time.perf_counter())
            self._forcing.launched(plan, forcing, drafting)
        elif not self._plans:
            compiling = [live.compiling for live in self._live.values() if live.compiling is not None]
            (wait_for_one if self.adapters is None else self.adapters.rest)(compiling)
        depth = 1 if plan.spans and self._overlap and not self.steps.careful else 0
        while len(self._plans) > depth or self.steps.stalled:
            self._resolve(events)
        if late:
            self.steps.draw()
            self._forcing.watch(plan)
        if self.config.runner.check:
            self.scheduler.check()
        return events

    def _launch(self, plan: Plan, late: bool, began: float) -> None:
        for span in plan.spans:
            if span.seq.open_seat != span.seat:
                self.runner.open(span.seq)
                span.seq.open_seat = span.seat
        at_work = {span.seq.request.id for span in plan.spans}
        if self._plans:
            at_work.update(span.seq.request.id for span in self._plans[0][0].spans)
        if self._compiling:
            at_work.update(i for i, live in self._live.items() if live.compiling is not None)
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
        if self._drafting is not None:
            self._drafting.launched(plan)

    def _resolve(self, events: list[Event]) -> None:
        """Wait for the oldest plan in flight and commit it."""
        plan, launched, rows = self._plans.popleft()
        for part, results in self.steps.resolve():
            for span, result in zip(part, results):
                # Void: it ended or was preempted meanwhile, or an earlier span failed its whole request. No seat is
                # given to another while a step that used it is in flight, so that comparing seats is enough.
                if span.seq.seat != span.seat or result is None:
                    continue
                event = self._commit(span, result)
                if self._drafting is not None and not result.path:
                    self._drafting.plain(span, result)
                if event is not None:
                    events.append(event)
        for request_id in self._groups.decided():
            beaten = self._groups.beaten(self._live[request_id].branches.values())
            events += [self._finish(seq, "cancelled") for seq in beaten]
        if self._drafting is not None:
            self._drafting.completed(plan)
        self.scheduler.complete(plan)
        now = time.perf_counter()
        self._stats.step_seconds, self._stats.step_rows = now - max(launched, self._resolved), rows
        self._stats.busy_seconds += self._stats.step_seconds
        self._resolved = now
        self._forcing.times.ended(plan.step, now)
        self._learning.stepped(plan, self._stats.step_seconds, self._num_generated, self._num_forwards)

    def idle(self) -> bool:
        """Do a bit of work while there are no requests. False: none is left."""
        self._learning.tick()
        while self._plans and not self._live:  # launched ahead of a token that was the last one
            self._resolve([])
        return self._num_generated + self._num_pooled > 0 and not self._plans and self.runner.capture_next()

    def _close_seat(self, seq: Sequence) -> None:
        if seq.open_seat >= 0:
            self.runner.close(seq.open_seat)
            seq.open_seat = -1

    def _commit(self, span: Span, result: SpanResult) -> Event | None:
        """Commit one span in one transaction: counters, pages, prefix index, stop rules; return the event that
        tells."""
        seq, tokens = span.seq, result.tokens
        if result.error is not None:
            return self._fail_span(seq, result.error)
        if result.scores:
            seq.state.setdefault("scores", []).extend(result.scores)
            seq.state["num_scored"] = span.start + span.want["score"].stop
        index, reason, stop = len(seq.tokens) - seq.num_prompt, None, None
        if index + len(tokens) >= seq.max_output or not seq.stop_ids.isdisjoint(tokens):  # most spans cannot end here
            tokens, reason, stop = until_stop(seq, tokens, self._eos_ids)
            if result.logprobs:
                result.logprobs = result.logprobs[: len(tokens)]
        if result.pooled is not None:
            reason = "stop"
            self._num_pooled += 1
        forced = self._forcing.committed(seq, len(tokens)) if result.path else 0
        pushed: Iterable[int] = ()
        drafted = self._drafting is not None and bool(result.path)
        if drafted:
            self._drafting.commit(span, result, tokens)
        rows = span.tokens() if self._learning.on else []  # before the draft is dropped
        self.scheduler.advance(span, tokens)
        self._learning.heard(span, result, rows)
        if drafted:
            self._drafting.observe(span, result, forced > 0)
        if tokens:
            self._num_generated += len(tokens)
            self._num_forwards += 1
            if self.runner.sampler.num_following:
                pushed = self.runner.sampler.accepted(seq, tokens)
        elif reason is None:
            return None
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
            forced=forced_places(index, forced, pushed),
        )
        if index == 0:
            self._stats.prompt_tokens += seq.num_prompt if seq.parent is None else 0
            event.prompt_logprobs, event.score = prompt_logprobs(seq), prompt_score(seq)
            event.queued = None if seq.branch else seq.first_scheduled - request.arrival
        if reason is not None:
            event.finish_reason, event.stop_reason = reason, stop
            self._drop(seq, reason)
        return event

    def _fail_span(self, seq: Sequence, error: str) -> Event:
        """Fail the request whose span has failed."""
        log.warning("request %s failed: %s", seq.request.id, error)
        return self._fail(seq.request.id, **span_failure(seq.request, error))

    # ----------------------------------------------------------------------------------------- while nothing is running

    def draft_with(self, speculation: SpeculationConfig) -> Drafter | None:
        """Replace the drafter by another CPU drafter, or none, to measure several with one set of weights. No request
        may be running. Raises ConfigError for a drafter that is a model."""
        assert not self._live, "requests are running"
        self._drafting = None
        self.runner.sampler.num_top, self.runner.sampler.by_blocks = 0, False  # the previous drafter may have set them
        if not speculation.drafter:
            return None
        self._drafting = Drafting.on_cpu(speculation, self.runner, self.steps.full_rows, self.info.max_model_len)
        return self._drafting.drafter

    def update_weights(self, model: str) -> None:
        """Load the weights of another checkpoint of the same model in place. No request may be running. Prefixes and
        traces are forgotten, drafters keep what they know. Raises ConfigError."""
        assert not self._live, "requests are running"
        load_again(self.runner.model, checkpoint.resolve(model))
        self.weights_changed(model)

    def weights_changed(self, model: str | None = None) -> None:
        """Refresh copies of weights, and forget prefixes and traces, after weights were written to (those of
        checkpoint ``model``). No request may be running."""
        self.runner.weights_changed()
        self._learning.renewed(model)
        self.pages.forget_prefixes()

    # ----------------------------------------------------------------------------------------------------------- state

    def stats(self) -> EngineStats:
        s, scheduler = self._stats, self.scheduler
        s.time = time.monotonic()
        s.num_waiting, s.num_blocked = scheduler.num_waiting, scheduler.num_blocked
        s.num_running, s.preemptions = scheduler.num_running, scheduler.preemptions
        s.num_free_pages, s.num_cached_pages = self.pages.num_free, self.pages.num_cached
        s.prefix_queries, s.cached_tokens = self.pages.queried_tokens, self.pages.cached_tokens
        s.generation_tokens, s.forwards = self._num_generated, self._num_forwards
        s.forced_tokens, s.failed = self._forcing.num_forced, dict(self._failed)
        s.step_time_error = self.clock.errors()
        if self._drafting is not None:
            self._drafting.fill(s)
        self._learning.fill(s)
        return s

    def load(self) -> Load:
        return self._gate.load(self.steps.max_rows)

    def join(self, prefix_key: bytes) -> PageLog | None:
        self.info.weights = digest(self.runner.model)
        return share(self.pages, self.info, prefix_key)

    def close(self) -> None:
        if self.adapters is not None:
            self.adapters.close()
        self._grammars.close()
        self._learning.close()
