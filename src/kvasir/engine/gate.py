"""The gate: refuses requests that cannot run here, and those that would wait too long.

The queue is bounded. An unbounded one is a memory leak with a latency graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from functools import partial

from kvasir.config import SchedulerConfig
from kvasir.engine.forgetting import stack_of
from kvasir.engine.schedule.pace import Pace
from kvasir.engine.schedule.scheduler import Scheduler
from kvasir.engine.schedule.spans import rows_left
from kvasir.engine.schedule.step_time import StepShape, retry_after
from kvasir.errors import ConfigError
from kvasir.kv.policy import Stack
from kvasir.types import Event, Load, ModelInfo, Request, Sequence, Status

MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0  # bounds of the ``Retry-After`` of a full queue


class Gate:
    """Checks a new request against the pages, the queue and the promised time to its first token.

    ``max_queued_tokens``: prompt tokens that may wait at once. By default four times what the cache or the context
    holds, whichever is more. ``live``: ids of the requests that have not ended; ``unknown_variant``: the error of a
    request whose adapter or hooks are not here; ``policy``: which tokens are forgotten (None: none are).
    """

    def __init__(
        self,
        config: SchedulerConfig,
        info: ModelInfo,
        scheduler: Scheduler,
        pace: Pace,
        live: Container[str],
        unknown_variant: Callable[[Request], Event | None],
        policy: Stack | None = None,
    ) -> None:
        self._config = config
        self._live, self._unknown_variant = live, unknown_variant
        self._info, self._policy = info, policy
        self._scheduler = scheduler
        self._pages = scheduler.pages
        self._pace = pace
        self.max_queued_tokens = config.max_queued_tokens or 4 * max(info.kv_capacity_tokens, info.max_model_len)

    def refusal(self, request: Request, max_rows: int) -> Event | None:
        """Return the error that refuses ``request``, or None to take it. ``max_rows``: the row budget of a step now."""

        refuse = partial(_refused, request)
        if request.id in self._live:
            return refuse(409, "duplicate_request_id", f"request id {request.id!r} is in use")
        if unknown := self._unknown_variant(request):
            return unknown
        if (request.pooling is None) != (self._info.pooling is None):
            return refuse(400, "unsupported_task", "this model does not do what the request asks for")
        num_prompt, config, backlog = len(request.prompt_ids), self._config, self._scheduler.backlog
        try:
            needed = self._needed(request)
        except ConfigError as error:
            return refuse(400, "bad_kv_policy", str(error))
        if not self._pages.fits(needed, self._scheduler.max_rows):
            return refuse(
                400,
                "context_length_exceeded",
                f"prompt and max_tokens need {needed} tokens of KV; the pool holds {self._info.kv_capacity_tokens}",
            )
        if request.epoch > 0:  # it was accepted before the engine restarted
            return None
        if request.params.lease and self._pages.index is None:
            return refuse(400, "no_prefix_cache", "a lease keeps pages for the prefix cache, which is off here")
        if request.params.n > config.max_queued_requests:
            return refuse(
                400,
                "too_many_branches",
                f"n={request.params.n} is more than this server queues at all ({config.max_queued_requests})",
            )
        queued = len(backlog.waiting) + len(backlog.blocked)
        if queued + request.params.n > config.max_queued_requests:
            message = f"{config.max_queued_requests} requests are queued already"
            return refuse(429, "queue_full", message, self._retry_seconds(max_rows))
        if backlog.prompt_tokens + num_prompt > self.max_queued_tokens:
            message = f"{self.max_queued_tokens} prompt tokens are queued already"
            return refuse(429, "queue_full", message, self._retry_seconds(max_rows))
        if config.max_ttft is not None:
            seq = Sequence(request)
            seq.status = Status.FINISHED  # policies are only asked where it would stand
            seconds = self._first_token_in(num_prompt - self._pages.match(seq), max_rows, seq)
            if wait := retry_after(seconds, config.max_ttft):
                return refuse(
                    429,
                    "overloaded",
                    f"the first token would take about {seconds:.1f} s; max_ttft is {config.max_ttft:g} s",
                    wait,
                )
        return None

    def _needed(self, request: Request) -> int:
        """The most tokens of a request that are in the cache at once. Raises ConfigError for its ``kv_policy``."""
        num_prompt = len(request.prompt_ids)
        needed = num_prompt + max(0, request.max_tokens - 1)  # the last token is never computed
        stack = stack_of(self._policy, request, self._scheduler.max_rows)
        return needed if stack is None else min(needed, stack.most(num_prompt, needed))

    def _first_token_in(self, num_tokens: int, max_rows: int, seq: Sequence | None = None) -> float:
        """Predict the seconds to the first token of a prompt that arrives now.

        ``num_tokens`` of it must be computed. It stands in the queue where ``seq`` would, by default last. Overdue
        requests, which would go first, are not counted in.
        """
        waiting = self._scheduler.backlog.waiting
        running, ahead = self._at_work()
        ahead += waiting.rows if seq is None else waiting.rows_before(seq, time.monotonic())
        return self._pace.first_token(running, ahead, num_tokens, max_rows)

    def _at_work(self) -> tuple[StepShape, int]:
        """The shape of the running decodes, and the prompt rows that running sequences still have to compute."""
        rows = [(seq.num_computed, rows_left(seq)) for seq in self._scheduler.running]
        return StepShape.of((start, 1) for start, left in rows if left <= 1), sum(left for _, left in rows if left > 1)

    def load(self, max_rows: int) -> Load:
        """The work at hand, at the rate of a step full of prompt rows beside the running decodes."""
        running, ahead = self._at_work()
        seconds = self._pace.first_token(running, 0, max_rows, max_rows)
        return Load(
            queued_tokens=self._scheduler.backlog.waiting.rows + ahead,
            prompt_rate=max_rows / seconds,
            decodes=running.sequences,
        )

    def _retry_seconds(self, max_rows: int) -> float:
        """Seconds after which what is queued now will have been computed, within the bounds."""
        seconds = round(self._first_token_in(0, max_rows), 1)
        return min(MAX_RETRY_SECONDS, max(MIN_RETRY_SECONDS, seconds))


def _refused(request: Request, status: int, code: str, message: str, retry_after: float | None = None) -> Event:
    return Event(
        kind="error",
        request_id=request.id,
        epoch=request.epoch,
        status=status,
        code=code,
        message=message,
        retry_after=retry_after,
    )
