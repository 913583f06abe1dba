"""The state that all routes share: the engine's client, the text side, the limits, and the phase of the server's
life."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from kvasir.api.http import limits
from kvasir.api.http.auth import name_of
from kvasir.api.http.body import Body, SamplingBody, parse
from kvasir.api.http.errors import error_event, error_response, id_headers
from kvasir.api.http.metrics import Metrics
from kvasir.api.http.preparing import Preparing, RendersApart
from kvasir.api.http.streaming import Disconnected, EventStream, encode, unless_disconnected
from kvasir.api.http.tracing import Trace, Tracer
from kvasir.api.text.text import Text
from kvasir.client.admission import admit, check_task
from kvasir.client.interface import EngineClient
from kvasir.client.pieces import PIECE
from kvasir.config import ServerConfig
from kvasir.errors import RequestError, is_bug
from kvasir.logs import log
from kvasir.models.tokenizer import Tokenizer
from kvasir.types import ModelInfo, Request, SamplingParams

B = TypeVar("B", bound=Body)
R = TypeVar("R")
# Longest warning header.
MAX_WARNING_CHARS = 1024


class Caller:
    """The caller of a request: its key and tenant from the key guard, the request's id, and the time of arrival.
    ``apart``: its job has its turn to render a template in a process."""

    apart = False

    def __init__(self, http: HttpRequest) -> None:
        self.arrival = time.monotonic()
        self.created = int(time.time())
        self.id = limits.request_id(http.scope)
        self.key: str = http.scope["state"]["key"]
        self.tenant: str = http.scope["state"]["tenant"]
        self.warnings: list[str] = []  # what the reply's header x-kvasir-warning tells
        self.own_tenant = self.tenant

    @classmethod
    def again(cls, *, id: str, key: str, tenant: str, created: int) -> Caller:
        """The caller of a request that an earlier server has accepted."""
        caller = cls.__new__(cls)
        caller.arrival, caller.created, caller.id, caller.key = time.monotonic(), created, id, key
        caller.tenant = caller.own_tenant = tenant
        caller.warnings = []
        caller.apart = True  # nobody waits
        return caller

    def render(self, tokenizer: Tokenizer, template: str | None, tools: Any) -> None:
        """Raise RendersApart where the chat template needs a process and this job's turn was for another kind."""
        if not self.apart and tokenizer.renders_apart(template, bool(tools)):
            raise RendersApart

    def take(self, body: Body) -> None:
        """Take over the body's ``request_id``, and its ``cache_salt``: requests of different salts share no page of the
        prefix cache, just as those of different tenants."""
        if isinstance(body, SamplingBody):
            if body.request_id:
                self.id = limits.clean_id(body.request_id)
            if body.cache_salt is not None:
                salt = hashlib.blake2b(body.cache_salt.encode(), digest_size=16, person=b"kvasir-salt")
                self.tenant = f"{self.own_tenant}:{salt.hexdigest()}"


class Work(Protocol):
    """The running work of one body, for example a Generation. It must be closed in every case."""

    async def open(self) -> None:
        """Wait until the engine has accepted it. Raises RequestError."""

    async def close(self, reason: str = "disconnected") -> None:
        """Cancel what still runs; idempotent."""


class Job(Protocol):
    """An admitted body of a generation route: it starts the work and gives the two forms of the reply. One whose
    protocol has an event for silent streams has it as ``ping`` (bytes)."""

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
        self.preparing = Preparing()
        self.concurrency = limits.Concurrency(settings.max_concurrent_per_key)
        self._most_by_key = {name_of(key): most for key, most in settings.output_limits().items()}
        self.phase = "starting"
        self.failure: BaseException | None = None
        self.openers: list[Callable[[], Awaitable[None]]] = []  # called once the engine is ready
        self.closers: list[Callable[[], Awaitable[None]]] = []  # called before the engine is stopped
        self.tracer = Tracer(settings.otlp_traces_endpoint) if settings.otlp_traces_endpoint else None
        self.enders: list[Callable[[], Awaitable[None]]] = []  # called once it has stopped
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
        self.preparing.close()
        for end in self.enders:
            await end()

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

    async def prepare(self, caller: Caller, raw: bytes, job: Callable[..., R], *given: Any) -> R:
        """Run ``job(*given)``, which reads the body ``raw``, off the loop in the caller's turn. Raises RequestError."""
        return await self.preparing.run(caller, len(raw), functools.partial(job, *given))

    def parse(
        self, kind: type[B], raw: bytes, caller: Caller | None = None, *, adapters: bool = False
    ) -> tuple[B, list[str]]:
        """Decode and check a body; ``caller`` takes what it says about itself. ``adapters``: its model may be an
        adapter, which the route computes. Returns it with the names that lenient mode ignored. Raises RequestError; 404
        for a model that is not served here."""
        body, ignored = parse(kind, limits.decode_json(raw), self.settings.lenient)
        if body.model in self.info.adapters:
            if not adapters:
                raise self.base_only(body.model)
        elif body.model in self.settings.model_alias:
            body.model = self.info.name
        elif body.model is not None and body.model != self.info.name:
            raise RequestError(
                f"the model '{body.model[:200]}' is not served here; this server has '{self.info.name}'",
                status=404,
                param="model",
                code="model_not_found",
            )
        if caller is not None:
            caller.take(body)
        return body, ignored

    def most_tokens(self, caller: Caller) -> int:
        """Most tokens of an answer for this caller; 0: no limit."""
        return self._most_by_key.get(caller.key, self.settings.max_output_tokens)

    def cut(self, max_tokens: int | None, caller: Caller, name: str = "max_tokens") -> int | None:
        """``max_tokens`` of a body, or the caller's limit where that is less and a number was asked for. The reply's
        warning header then says so, with ``name`` as the parameter's."""
        most = self.most_tokens(caller)
        if not most or max_tokens is None or max_tokens <= most:
            return max_tokens
        caller.warnings.append(f"{name}={max_tokens} was cut to {most}, the limit of this server for this key")
        return most

    def base_only(self, adapter: str) -> RequestError:
        """The error of a route that computes no adapter."""
        return RequestError(
            f"'{adapter}' is an adapter; this runs on the model '{self.info.name}' only",
            param="model",
            code="unsupported_parameter",
        )

    def admit(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        caller: Caller,
        reply_id: str,
        priority: int | None,
        names: dict[str, str],
        stream: bool,
        model: str | None = None,
    ) -> list[Request]:
        """Make the engine requests of one body, one per prompt. Raises RequestError.

        ``names``: as in Job. ``stream``: the client reads tokens as they come. ``model``: the model that the body
        names, which may be an adapter.
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
                            encode=self.text.word,
                            processing=self.text.processing,
                            adapter=None if model in (None, self.info.name) else model,
                            most=self.most_tokens(caller),
                        )
                    )
                except RequestError as e:
                    if many and e.code == "context_length_exceeded":
                        e.message = f"prompt[{i}]: {e.message}"  # names the prompt to shorten
                    raise
            self.check_queue(requests, "prompt")
        for request in requests:
            # Stop strings are found in this process, so their requests need every token soon, to be ended soon.
            if not stream and not request.params.stop:
                request.piece = PIECE
        return requests

    def check_queue(self, requests: Sequence[Request], param: str) -> None:
        """Raise RequestError (400) for requests that not even an empty queue could hold: 429 would tell the client to
        come back for ever. ``param``: the parameter that holds the prompts."""
        prompts, choices, tokens = (
            len(requests),
            sum(r.params.n for r in requests),
            sum(len(r.prompt_ids) for r in requests),
        )
        queue, room = self.info.max_queued_requests, self.info.max_queued_tokens
        shorter = "Send fewer prompts at a time." if prompts > 1 else "Shorten it."
        for count, most, what, name, cure in (
            (prompts, queue, "prompts", param, shorter),  # too many even if n were 1
            (choices, queue, "choices", "n", "Lower 'n' or send fewer prompts." if prompts > 1 else "Lower 'n'."),
            (tokens, room, "prompt tokens", param, shorter),
        ):
            if 0 < most < count:
                raise RequestError(
                    f"{count} {what} in one request; this server queues {most} at once. {cure}",
                    param=name,
                    code="too_large",
                )

    async def respond(
        self, http: HttpRequest, make: Callable[[Service, bytes, Caller], Any], task: str = "generate"
    ) -> Response:
        """Serve a route of the model: read the body, check it off the loop, wait for the engine to accept, stream or
        collect. ``task``: what the route asks of the model (generate, embed or score).

        ``make(service, raw_body, caller)`` makes a Job. Headers are sent only after the engine has accepted everything,
        so a refusal is always a status. A client that leaves cancels its request.
        """
        caller = Caller(http)
        trace = None if self.tracer is None else self.tracer.begin(http, caller.arrival)
        with _traced(trace):
            raw = await self.body(http)
            self.concurrency.enter(caller.key)
        generation = response = None
        try:
            check_task(self.info, task)
            job: Job = await unless_disconnected(http.receive, self.prepare(caller, raw, make, self, raw, caller))
            headers = {
                **id_headers(http.scope, caller.id),
                **ignored_header(job.ignored),
                **warning_header(caller.warnings),
            }
            generation = job.begin(functools.partial(self._left, caller, trace))
            if trace is not None:
                trace.begin(generation, self.info.name, job.stream)
            if job.stream:
                with renamed(job.names):
                    await unless_disconnected(http.receive, generation.open())
                events = _guarded(job, generation, http)
                response = EventStream(events, generation.close, headers, getattr(job, "ping", b""))
                return response
            with renamed(job.names):
                result = await unless_disconnected(http.receive, _collected(job, generation))
            return Response(encode(result), 200, headers, media_type="application/json")
        except Disconnected:
            return Response(status_code=499)
        except RequestError as e:
            if trace is not None:
                trace.refuse(e)
            refusal = error_response(e, http.scope)
            refusal.headers.update(id_headers(http.scope))
            return refusal
        finally:
            if generation is None:
                self.concurrency.leave(caller.key)
            elif response is None:  # otherwise the stream closes it
                await generation.close()

    def _left(self, caller: Caller, trace: Trace | None) -> None:
        self.concurrency.leave(caller.key)
        if trace is not None:
            trace.end()


@contextlib.contextmanager
def _traced(trace: Trace | None) -> Iterator[None]:
    """End the trace of a request whose body is refused."""
    try:
        yield
    except RequestError as e:
        if trace is not None:
            trace.refuse(e)
        raise


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


async def _guarded(job: Job, generation: Work, http: HttpRequest) -> AsyncGenerator[bytes, None]:
    """Yield the job's events. An error after the headers becomes an event of its own, and the stream ends."""
    events = job.events(generation)
    try:
        with renamed(job.names):
            async for event in events:
                yield event
    except RequestError as e:
        yield error_event(e, http.scope)
    except BaseException as e:
        if not is_bug(e):
            raise
        log.exception("request %s failed while streaming", limits.request_id(http.scope))
        yield error_event(RequestError("internal error", status=500, code="internal_error"), http.scope)
    finally:
        await events.aclose()


def ignored_header(names: list[str]) -> dict[str, str]:
    """The warning header of what was ignored (lenient mode, schemas served in part), in short ASCII."""
    if not names:
        return {}
    clean = ", ".join(
        "".join(c if c.isascii() and (c.isalnum() or c in "_-./[]$~") else "?" for c in name[:120])
        for name in names[:32]
    )
    return {"warning": f'199 kvasir "ignored parameters: {clean}"'}


def warning_header(warnings: list[str]) -> dict[str, str]:
    """The header that tells what of a request has no effect or was cut, in short ASCII."""
    text = "; ".join(warnings)[:MAX_WARNING_CHARS]
    return {"x-kvasir-warning": re.sub(r"[^ -~]", "?", text)} if warnings else {}
