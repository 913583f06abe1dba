"""Test-time scaling over HTTP: a ``scaling`` block in a chat completion, and background runs under /v1/scaling/runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from kvasir.api.http.body import METADATA
from kvasir.api.http.limits import unique_id
from kvasir.api.http.service import Caller, Service, renamed, warning_header
from kvasir.api.http.streaming import DONE, EventStream, encode, sse
from kvasir.api.protocols.openai import ChatBody
from kvasir.api.protocols.routes_chat import ChatJob, max_tokens_of, message_object, piece_delta
from kvasir.api.scaling import scaling
from kvasir.api.scaling.run_body import RunBody
from kvasir.api.scaling.scaling_runs import ScalingRun, ScalingRuns
from kvasir.api.scaling.scaling_store import RunStore
from kvasir.api.text.chat import Message
from kvasir.client.admission import check_task
from kvasir.errors import RequestError
from kvasir.logs import log

# Parameters of a chat completion that may stand in addition to ``scaling``.
KEPT_NAMES = {
    "model",
    "messages",
    "scaling",
    "stream",
    "stream_options",
    "temperature",
    "max_tokens",
    "max_completion_tokens",
    "seed",
    "request_id",
    "cache_salt",
    *METADATA,
}


def chat_job(service: Service, raw: bytes, caller: Caller) -> Any:
    """Make the job of a chat completion: a strategy if the body has a ``scaling`` block, else one generation."""
    if b'"scaling"' in raw:
        body, ignored = service.parse(ChatBody, raw, caller, adapters=True)
        if body.scaling is not None:
            if body.model in service.info.adapters:
                raise service.base_only(body.model)
            return ScaledChat(service, body, ignored, caller)
    return ChatJob(service, raw, caller)


class Solving:
    """The ``service.Work`` of one problem: a task that runs the plan, and its events."""

    def __init__(self, plan: scaling.Plan, release: Callable[[], None]) -> None:
        self._plan, self._release = plan, release
        self._task: asyncio.Task | None = None
        self._closed = False
        self.events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.refusal = ""

    async def open(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> Any:
        try:
            return await self._plan.run(self._take)
        finally:
            self.events.put_nowait(None)

    def _take(self, event: dict[str, Any]) -> None:
        if event["event"] == "refused":
            self.refusal = str(event["why"])
        self.events.put_nowait(scaling.told(event))

    async def solved(self) -> Any:
        """Wait for the problem's ``Solved``. Raises RequestError when there is no answer at all."""
        assert self._task is not None
        solution = await self._task
        solved = solution.solved[0]
        if solved.result.sample is None:
            if solved.result.why:
                raise RequestError(
                    f"the budget does not allow a single reply: {solved.result.why}",
                    param="scaling.budget",
                    code="budget_too_small",
                )
            raise RequestError(
                f"the model refused: {self.refusal or 'nothing was generated'}", param="messages", code="refused"
            )
        return solved

    async def close(self, reason: str = "disconnected") -> None:
        if self._closed:
            return
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._release()


class ScaledChat:
    """A chat completion that a strategy answers; see ``service.Job``. A stream shows progress as SSE comments, which
    ordinary clients ignore, and then the answer."""

    def __init__(self, service: Service, body: ChatBody, ignored: list[str], caller: Caller) -> None:
        for name in sorted(body.model_fields_set - KEPT_NAMES):
            if getattr(body, name) is not None and not (name == "n" and body.n == 1):
                raise RequestError(
                    f"'{name}' cannot be combined with 'scaling'", param=name, code="unsupported_parameter"
                )
        block = body.scaling
        assert block is not None
        caller.render(service.text.tokenizer, None, None)
        self.service, self.stream, self.ignored = service, bool(body.stream), ignored
        self.names = {"max_tokens": "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"}
        self.options = body.stream_settings()
        with renamed(self.names):
            self.plan = scaling.plan(
                service,
                block.strategy,
                [("p0", body.messages)],
                block.answer,
                caller.tenant,
                seed=body.seed,
                max_tokens=service.cut(max_tokens_of(body), caller, self.names["max_tokens"]),
                temperature=body.temperature,
                problem_budget=block.budget,
                where="scaling.",
                most=service.most_tokens(caller),
            )
        self.head = {
            "id": unique_id("chatcmpl", caller.id),
            "object": "chat.completion.chunk" if self.stream else "chat.completion",
            "created": caller.created,
            "model": service.info.name,
        }

    def begin(self, release: Callable[[], None]) -> Solving:
        return Solving(self.plan, release)

    def _usage(self, solved: Any) -> dict[str, Any]:
        found = scaling.summary(solved)
        details = {"cached_tokens": found["cost"]["cached"]}
        return {
            **found["usage"],
            "prompt_tokens_details": details,
            "scaling": {**found["cost"], **{name: found[name] for name in ("answer", "agreement", "votes", "why")}},
        }

    def _message(self, solved: Any) -> tuple[Message, list[Any], str]:
        """Parse the chosen reply like any other, with its reasoning split off."""
        tokenizer, sample = self.service.text.tokenizer, solved.result.sample
        message = self.service.text.message(tokenizer.encode_chat(list(solved.problem.messages)), None, False)
        pieces = message.push(sample.text, list(sample.ids), True)
        return message, pieces, message.finish_reason("length" if sample.finish == "length" else "stop")

    async def result(self, work: Solving) -> dict[str, Any]:
        solved = await work.solved()
        message, _, finish = self._message(solved)
        choice = {"index": 0, "message": message_object(message), "logprobs": None, "finish_reason": finish}
        return {**self.head, "choices": [choice], "usage": self._usage(solved)}

    async def events(self, work: Solving) -> AsyncGenerator[bytes, None]:
        while (event := await work.events.get()) is not None:
            yield b": scaling " + encode(event) + b"\n\n"
        solved = await work.solved()
        _, pieces, finish = self._message(solved)
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}, *map(piece_delta, pieces)]
        for delta in deltas:
            yield sse({**self.head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]})
        yield sse({**self.head, "choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": finish}]})
        if self.options.include_usage:
            yield sse({**self.head, "choices": [], "usage": self._usage(solved)})
        yield DONE


class ScalingRoutes:
    """The routes of background runs; each public method is one."""

    def __init__(self, service: Service) -> None:
        self.service = service
        folder = service.settings.scaling_runs
        self.runs = ScalingRuns(RunStore(Path(folder)) if folder else None)
        service.openers.append(self._resume)
        service.closers.append(self.runs.close)

    async def _resume(self) -> None:
        """Continue the runs of the previous server, once the engine is ready."""
        if going := await self.runs.resume(self._again):
            log.info("%d scaling runs go on where the previous server left them", going)

    async def _again(self, asked: dict[str, Any], seed: int) -> scaling.Plan:
        """The plan of an earlier server's run, with the limit that it began with, so that its calls are the same."""
        return await asyncio.to_thread(self._plan, asked["body"].encode(), asked["tenant"], asked.get("most", 0), seed)

    async def create(self, http: HttpRequest) -> Response:
        """Start a run: 202 with its id. The run continues when the client leaves."""
        service, caller = self.service, Caller(http)
        raw = await service.body(http)
        check_task(service.info, "generate")
        most = service.most_tokens(caller)
        plan = await service.prepare(caller, raw, self._plan, raw, caller.tenant, most, None, caller)
        service.concurrency.enter(caller.key)
        try:
            run = self.runs.start(
                unique_id("run", caller.id),
                caller.key,
                plan,
                lambda: service.concurrency.leave(caller.key),
                {"body": raw.decode(), "tenant": caller.tenant, "most": most},
            )
        except BaseException:
            service.concurrency.leave(caller.key)
            raise
        return Response(encode(run.object()), 202, warning_header(caller.warnings), media_type="application/json")

    def _plan(
        self, raw: bytes, tenant: str, most: int, seed: int | None = None, caller: Caller | None = None
    ) -> scaling.Plan:
        body, _ = self.service.parse(RunBody, raw)
        if caller is not None:
            caller.render(self.service.text.tokenizer, None, None)
            self.service.cut(body.max_tokens, caller)  # the plan cuts it; this tells the caller
        named = [(p.id or f"p{i}", p.messages) for i, p in enumerate(body.problems)]
        if len({name for name, _ in named}) < len(named):
            raise RequestError("two problems have the same id", param="problems", code="duplicate_id")
        return scaling.plan(
            self.service,
            body.strategy,
            named,
            body.answer,
            tenant,
            seed=body.seed if seed is None else seed,
            max_tokens=body.max_tokens,
            temperature=body.temperature,
            budget=body.budget,
            problem_budget=body.problem_budget,
            most=most,
        )

    def _get(self, name: str, http: HttpRequest) -> ScalingRun:
        """Find the caller's run. Raises RequestError 404, or 503 while runs of an earlier server are not known yet."""
        if self.service.phase == "starting":
            self.service.require_ready()
        return self.runs.get(name, Caller(http).key)

    async def status(self, name: str, http: HttpRequest) -> Response:
        return Response(encode(self._get(name, http).object()), media_type="application/json")

    async def cancel(self, name: str, http: HttpRequest) -> Response:
        """Cancel a run; one that has ended stays as it is."""
        run = self._get(name, http)
        await run.cancel()
        return Response(encode(run.object()), media_type="application/json")

    async def events(self, name: str, http: HttpRequest) -> Response:
        """Stream server-sent events from the beginning of the run to its end."""
        run = self._get(name, http)

        async def lines() -> AsyncGenerator[bytes, None]:
            async for event in run.events():
                yield sse(event, event["event"])
            yield DONE

        async def close() -> None:
            """Do nothing: the run continues without its watcher."""

        return EventStream(lines(), close, {})
