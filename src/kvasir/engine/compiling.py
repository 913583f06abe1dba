"""The part of the step loop that waits for grammars: a request is accepted once its grammar is compiled."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future

from kvasir.engine.grammars import PATIENCE_SECONDS, Grammars, failure, waited
from kvasir.engine.part import LiveRequests, Part
from kvasir.engine.schedule.scheduler import Scheduler
from kvasir.types import Request, Sequence


class Compiling(Part):
    """The requests whose grammar is being compiled. Their branches are blocked meanwhile."""

    def __init__(self, grammars: Grammars, scheduler: Scheduler) -> None:
        self.grammars = grammars
        self._scheduler = scheduler
        self._futures: dict[str, Future] = {}  # by request

    @property
    def busy(self) -> bool:
        return bool(self._futures)

    def begin(self, request: Request, branches: list[Sequence]) -> None:
        """Start to compile the request's grammar."""
        until = time.monotonic() + PATIENCE_SECONDS
        for seq in branches:
            self._scheduler.block(seq, until)
        self._futures[request.id] = self.grammars.compile(request)

    def before_plan(self, requests: LiveRequests) -> None:
        """Hand finished matchers to their branches. Requests whose grammar fails or waits too long fail."""
        if not self._futures:
            return
        now = time.monotonic()
        for request_id, future in list(self._futures.items()):
            branches = requests.branches(request_id)
            if future.done():
                del self._futures[request_id]
                if (error := future.exception()) is not None:
                    requests.fail(request_id, failure(request_id, error))
                    continue
                for seq in branches:
                    seq.state["grammar"] = future.result().copy()
                    self._scheduler.unblock(seq)
                requests.accept(request_id)
            elif now > branches[0].blocked_until and future.cancel():
                requests.fail(request_id, waited())

    def pending(self) -> list[Future]:
        return list(self._futures.values())

    def at_work(self) -> Iterable[str]:
        return self._futures.keys()

    def forgotten(self, request_id: str) -> None:
        if (future := self._futures.pop(request_id, None)) is not None:
            future.cancel()

    def close(self) -> None:
        self.grammars.close()
