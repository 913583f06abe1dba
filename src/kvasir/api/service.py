"""The state that all routes share: the engine's client, the text side, the limits, and the phase of the server's
life."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from kvasir.api import limits
from kvasir.api.errors import error_object, error_response
from kvasir.api.metrics import Metrics
from kvasir.api.protocol import Body, parse
from kvasir.api.streaming import Disconnected, EventStream, encode, sse, unless_disconnected
from kvasir.api.text import Text
from kvasir.client.admission import admit
from kvasir.client.interface import EngineClient
from kvasir.client.pieces import PIECE
from kvasir.config import ServerConfig
from kvasir.errors import RequestError
from kvasir.logs import log
from kvasir.types import ModelInfo, Request, SamplingParams

B = TypeVar("B", bound=Body)


class Caller:
    """The caller of a request: its key and tenant from the key guard, the request's id, and the time of arrival."""

    def __init__(self, http: HttpRequest) -> None:
        self.arrival = time.monotonic()
        self.created = int(time.time())
        self.id = limits.clean_id(http.headers.get("x-request-id"))
        self.key: str = http.scope["state"]["key"]
        self.tenant: str = http.scope["state"]["tenant"]


class Work(Protocol):
    """The running work of one body, for example a Generation. It must be closed in every case."""

    async def open(self) -> None:
        """Wait until the engine has accepted it. Raises RequestError."""

    async def close(self, reason: str = "disconnected") -> None:
        """Cancel what still runs; idempotent."""


class Job(Protocol):
    """An admitted body of a generation route: it starts the work and gives the two forms of the reply."""

    stream: bool
    ignored: list[str]
    names: dict[str, str]  # parameter names of admission and engine -> this body's, where they differ

    def begin(self, release: Callable[[], None]) -> Any:
        """Make the ``Work``, not yet opened; ``release`` is called once, when it is closed."""

    def events(self, work: Any) -> AsyncGenerator[bytes, None]:
        """Yield the server-sent events of a streamed reply."""

    async def result(self, work: Any) -> dict[str, Any]:
        """The object of a collected reply."""


class Service:
    """The server behind its routes. ``phase``: starting, ready, draining or failed. ``failure``:
    why the start failed."""

    def __init__(self, client: EngineClient, text: Text, settings: ServerConfig) -> None:
        self.client = client
        self.text = text
        self.settings = settings
        self.metrics = Metrics()
        self.concurrency = limits.Concurrency(settings.max_concurrent_per_key)
        self.phase = "starting"
        self.failure: BaseException | None = None
        self.openers: list[Callable[[], Awaitable[None]]] = []  # called once the engine is ready
        self.closers: list[Callable[[], Awaitable[None]]] = []  # called before the engine is stopped
        self._starting: asyncio.Task | None = None

    # ------------------------------------------------------------------------------------------------------ life

    def start(self) -> asyncio.Task:
        """Start the engine and load the tokenizer in the background, while /health/live answers already."""
        self._starting = asyncio.create_task(self._start())
        return self._starting

    async def _start(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.client.start())
                group.create_task(asyncio.to_thread(self.text.load))
                group.create_task(asyncio.to_thread(limits.check_shape, b"{}"))  # imports numpy before the first body
        except BaseExceptionGroup as e:
            self.phase, self.failure = "failed", e.exceptions[0]
            log.error("start-up failed: %s", self.failure)
            return
        for begin in self.openers:
            await begin()
        if self.phase == "starting":
            self.phase = "ready"

    async def started(self) -> None:
        """Wait until the start has succeeded or failed."""
        if self._starting is not None:
            await asyncio.wait({self._starting})

    async def stop(self, drain: float | None = None) -> None:
        """Be not ready from now on; running requests get ``drain`` seconds, the engine's journal keeps the rest."""
        if self.phase != "failed":
            self.phase = "draining"
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        for close in self.closers:
            await close()
        await self.client.stop(drain)

    def not_ready(self) -> str:
        """The reason why requests are not served; empty when they are."""
        if self.phase != "ready":
            return {
                "starting": "the model is loading",
                "draining": "the server is shutting down",
                "failed": f"start-up failed: {self.failure}",
            }[self.phase]
        health = self.client.health()
        return "" if health.ready else health.reason or "the engine is not ready"

    def require_ready(self) -> None:
        """Raise RequestError 503 unless the server has started and is not draining."""
        if self.phase != "ready":
            raise RequestError(self.not_ready(), status=503, code="not_ready", retry_after=1.0)

    @property
    def info(self) -> ModelInfo:
        return self.client.info

    # -------------------------------------------------------------------------------------------------- requests

    async def body(self, http: HttpRequest) -> bytes:
        """Read the raw body of a request. Raises RequestError."""
        self.require_ready()
        return await limits.read_body(http, self.settings.max_body_bytes, self.settings.request_timeout)

    def parse(self, kind: type[B], raw: bytes) -> tuple[B, list[str]]:
        """Decode and check a body. Raises RequestError; 404 for a model that is not served here."""
        body, ignored = parse(kind, limits.decode_json(raw), self.settings.lenient)
        if body.model is not None and body.model != self.info.name:
            raise RequestError(
                f"the model '{body.model[:200]}' is not served here; this server has '{self.info.name}'",
                status=404,
                param="model",
                code="model_not_found",
            )
        return body, ignored

    def admit(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        caller: Caller,
        reply_id: str,
        priority: int | None,
        names: dict[str, str],
        stream: bool,
    ) -> list[Request]:
        """Make the engine requests of one body, one per prompt. Raises RequestError.

        ``names``: as in Job. ``stream``: the client reads tokens as they come.
        """
        if priority and not self.info.priorities:
            raise RequestError(
                f"priority={priority} would be ignored: this server's scheduling policy does not read it; "
                "--scheduling-policy priority does",
                param="priority",
                code="unsupported_parameter",
            )
        many = len(prompts) > 1
        with renamed(names):
            requests = []
            for i, (ids, own) in enumerate(zip(prompts, params, strict=True)):
                try:
                    requests.append(
                        admit(
                            ids,
                            own,
                            self.info,
                            id=f"{reply_id}.{i}" if many else reply_id,
                            arrival=caller.arrival,
                            tenant=caller.tenant,
                            priority=priority or 0,
                            encode=self.text.encode,
                        )
                    )
                except RequestError as e:
                    if many and e.code == "context_length_exceeded":
                        e.message = f"prompt[{i}]: {e.message}"  # names the prompt to shorten
                    raise
            self._check_queue(requests)
        for request in requests:
            # Stop strings are found in this process, so their requests need every token soon, to be ended soon.
            if not stream and not request.params.stop:
                request.piece = PIECE
        return requests

    def _check_queue(self, requests: Sequence[Request]) -> None:
        """Raise RequestError (400) for requests that not even an empty queue could hold: 429 would tell the client to
        come back for ever."""
        prompts, choices, tokens = (
            len(requests),
            sum(r.params.n for r in requests),
            sum(len(r.prompt_ids) for r in requests),
        )
        queue, room = self.info.max_queued_requests, self.info.max_queued_tokens
        shorter = "Send fewer prompts at a time." if prompts > 1 else "Shorten it."
        for count, most, what, param, cure in (
            (prompts, queue, "prompts", "prompt", shorter),  # too many even if n were 1
            (choices, queue, "choices", "n", "Lower 'n' or send fewer prompts." if prompts > 1 else "Lower 'n'."),
            (tokens, room, "prompt tokens", "prompt", shorter),
        ):
            if 0 < most < count:
                raise RequestError(
                    f"{count} {what} in one request; this server queues {most} at once. {cure}",
                    param=param,
                    code="too_large",
                )

    async def respond(self, http: HttpRequest, make: Callable[[Service, bytes, Caller], Any]) -> Response:
        """Serve a generation route: read the body, check it off the loop, wait for the engine to accept, stream or
        collect.

        ``make(service, raw_body, caller)`` makes a Job. Headers are sent only after the engine has accepted everything,
        so a refusal is always a status. A client that leaves cancels its request.
        """
        caller = Caller(http)
        raw = await self.body(http)
        self.concurrency.enter(caller.key)
        generation = response = None
        try:
            job: Job = await asyncio.to_thread(make, self, raw, caller)
            headers = {"x-request-id": caller.id, **_ignored_header(job.ignored)}
            generation = job.begin(lambda: self.concurrency.leave(caller.key))
            if job.stream:
                with renamed(job.names):
                    await unless_disconnected(http.receive, generation.open())
                response = EventStream(_guarded(job, generation, caller.id), generation.close, headers)
                return response
            with renamed(job.names):
                result = await unless_disconnected(http.receive, _collected(job, generation))
            return Response(encode(result), 200, headers, media_type="application/json")
        except Disconnected:
            return Response(status_code=499)
        except RequestError as e:
            refusal = error_response(e)
            refusal.headers["x-request-id"] = caller.id
            return refusal
        finally:
            if generation is None:
                self.concurrency.leave(caller.key)
            elif response is None:  # otherwise the stream closes it
                await generation.close()


@contextlib.contextmanager
def renamed(names: dict[str, str]) -> Iterator[None]:
    """Make errors name the parameter as the client wrote it."""
    try:
        yield
    except RequestError as e:
        ours, theirs = e.param, names.get(e.param or "", e.param)
        if theirs != ours:
            e.param, e.message = theirs, re.sub(rf"\b{ours}(?==)", lambda _: theirs, e.message)
        raise


async def _collected(job: Job, generation: Work) -> dict[str, Any]:
    await generation.open()
    try:
        return await job.result(generation)
    finally:
        await generation.close()


async def _guarded(job: Job, generation: Work, name: str) -> AsyncGenerator[bytes, None]:
    """Yield the job's events. An error after the headers becomes an event of its own, and the stream ends."""
    events = job.events(generation)
    try:
        with renamed(job.names):
            async for event in events:
                yield event
    except RequestError as e:
        yield sse(error_object(e))
    except Exception:
        log.exception("request %s failed while streaming", name)
        yield sse(error_object(RequestError("internal error", status=500, code="internal_error")))
    finally:
        await events.aclose()


def _ignored_header(names: list[str]) -> dict[str, str]:
    """The warning header of what was ignored (lenient mode, schemas served in part), in short ASCII."""
    if not names:
        return {}
    clean = ", ".join(
        "".join(c if c.isascii() and (c.isalnum() or c in "_-./[]$~") else "?" for c in name[:120])
        for name in names[:32]
    )
    return {"warning": f'199 kvasir "ignored parameters: {clean}"'}
