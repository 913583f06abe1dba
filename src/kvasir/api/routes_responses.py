"""The responses API: the same conversation as chat, with the newer API's body and events, and responses that are kept,
continued, generated in the background, fetched, cancelled and deleted."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from kvasir.api.chat import only_functions
from kvasir.api.detokenize import Detokenizer
from kvasir.api.errors import error_object
from kvasir.api.generation import Generation
from kvasir.api.limits import unique_id
from kvasir.api.logprobs import chat_logprobs
from kvasir.api.protocol import MAX_MESSAGES, ResponsesBody, check_include
from kvasir.api.responses import Output, choice_of, flat_places, items_of, messages_of, tools_of, usage_object
from kvasir.api.responses_background import BackgroundRun
from kvasir.api.responses_journal import ResponseJournal
from kvasir.api.responses_store import ResponseStore, Stored
from kvasir.api.routes_chat import prepare_prompt, template_options
from kvasir.api.sampling import format_grammar, grammar_of, sampling_params, truncated
from kvasir.api.service import Caller, Service, renamed
from kvasir.api.streaming import EventStream, encode, sse
from kvasir.errors import RequestError
from kvasir.logs import log
from kvasir.types import Request


class ResponsesJob:
    """A response; see ``service.Job``. The constructor admits the body, off the event loop. Raises RequestError.

    ``earlier(id, owner)``: the items of the response to continue. ``keep(job)``: called with the finished job of a
    response that is to be stored. ``watch``: the two callbacks of a ``BackgroundRun``. ``record``: what an earlier
    server has written of this response, which then gets the same id and seed.
    """

    def __init__(
        self,
        service: Service,
        raw: bytes,
        caller: Caller,
        earlier: Callable[[str, str], list[dict[str, Any]]],
        keep: Callable[[ResponsesJob], None],
        watch: tuple[Callable, Callable],
        record: dict[str, Any] | None = None,
    ) -> None:
        self.service, self.raw, self.owner, self.tenant = service, raw, caller.key, caller.own_tenant
        self.keep, self.watch = keep, watch
        self.body, self.ignored = service.parse(ResponsesBody, raw, caller)
        body = self.body
        self.stream, self.background, self.store = bool(body.stream), bool(body.background), body.store is not False
        if record is not None:
            self.earlier = record["items"]
        else:
            name = body.previous_response_id
            self.earlier = earlier(name, caller.key) if name is not None else []
        if not 0 < len(items_of(body.input)) <= MAX_MESSAGES - len(self.earlier):
            raise RequestError(
                f"'input' and the conversation before it must hold 1 to {MAX_MESSAGES} items", param="input"
            )
        parallel = body.parallel_tool_calls is not False
        self.names = {"prompt": "input", "max_tokens": "max_output_tokens"}
        effort = body.reasoning.effort if body.reasoning else None
        tools = only_functions(body.tools, caller.warnings)
        with renamed(self.names), flat_places():
            prompt = prepare_prompt(
                service,
                messages_of(body.input, body.instructions, self.earlier),
                tools_of(tools),
                choice_of(body.tool_choice),
                parallel,
                cut=lambda ids: truncated(ids, body.truncate_prompt_tokens, body.max_output_tokens, service.info),
                **template_options(service, body.chat_template_kwargs, effort=effort, warnings=caller.warnings),
            )
        text_format = body.text.format if body.text else None
        grammar_name, grammar = grammar_of(
            body, {"text.format": format_grammar(text_format, "text.format"), "tool_choice": prompt.forced}
        )
        if grammar is not None and grammar is not prompt.forced:
            grammar = dataclasses.replace(grammar, after=prompt.after)
        self.names["logprobs"] = "top_logprobs"
        params = sampling_params(
            body,
            service.info.generation_defaults,
            max_tokens=body.max_output_tokens,
            grammar=grammar,
            logprobs=(body.top_logprobs or 0) if body.include else None,
        )
        self.id = record["id"] if record is not None else unique_id("resp", caller.id)
        self.names["grammar"] = grammar_name
        self.requests = service.admit([prompt.ids], [params], caller, self.id, body.priority, self.names, self.stream)
        if record is not None:
            self.requests[0].seed = record["seed"]
        self.message = service.text.message(prompt.ids, prompt.tools, parallel)
        self.output = Output(self.id)
        self.head = {
            "id": self.id,
            "object": "response",
            "created_at": caller.created,
            "model": service.info.name,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "parallel_tool_calls": parallel,
            "tool_choice": body.tool_choice or "auto",
            "tools": tools or [],
            "metadata": body.metadata or {},
            "text": {
                "format": text_format.model_dump(by_alias=True, exclude_none=True) if text_format else {"type": "text"}
            },
            "previous_response_id": body.previous_response_id,
            "store": self.store,
            "truncation": "disabled",
            "background": self.background,
            "reasoning": {"effort": effort, "summary": None} if effort else None,
            "top_logprobs": body.top_logprobs or 0,
        }
        self.object = self._response("queued" if self.background else "in_progress")

    def begin(self, release: Callable[[], None]) -> Generation | BackgroundRun:
        return BackgroundRun(self, release, *self.watch) if self.background else self.generate(release)

    def generate(self, release: Callable[[], None]) -> Generation:
        """Make the work in the engine, not yet opened."""
        return Generation(self.service.client, self.service.metrics, self.requests, self.detokenizer, release)

    def detokenizer(self, request: Request) -> Detokenizer:
        return Detokenizer(self.service.text.tokenizer, (), request.params, self.service.text.keep_ids)

    @property
    def going(self) -> bool:
        return self.object["status"] in ("queued", "in_progress")

    def items(self) -> list[dict[str, Any]]:
        """The conversation up to and with the output so far."""
        return [*self.earlier, *items_of(self.body.input), *self.output.items]

    def record(self) -> dict[str, Any]:
        """What another server needs to generate the same response; see ``responses_journal``."""
        return {
            "id": self.id,
            "owner": self.owner,
            "tenant": self.tenant,
            "created": self.head["created_at"],
            "model": self.head["model"],
            "seed": self.requests[0].seed,
            "items": self.earlier,
            "body": self.raw.decode(),
        }

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        return {
            **self.head,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": self.output.items,
            "usage": None,
            **more,
        }

    async def _steps(self, generation: Generation) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        """Yield events as pairs of name and fields: the output as it grows, then the whole response."""
        reason = ""
        waiting: list[dict[str, Any]] = []  # log-probabilities of tokens whose text is still held back
        async for delta in generation.deltas():
            reason = delta.finish_reason or ""
            # Only token by token is it known which log-probabilities belong to text. A response that another server
            # generates again must give the same events.
            for part in delta.singly() if self.body.include or self.background else (delta,):
                waiting += chat_logprobs(self.service.text.tokenizer, part.logprobs or ())["content"]
                pieces = self.message.push(part.text, part.token_ids, bool(part.finish_reason))
                for i, piece in enumerate(pieces):
                    # The last piece of a delta carries them; those of reasoning and calls are not reported.
                    last = i == len(pieces) - 1
                    for step in self.output.add(piece, waiting if last else None):
                        yield step
                    if last:
                        waiting = []
        generation.usage.reasoning = self.message.reasoning_tokens
        status = "completed" if reason == "stop" else "incomplete"
        for step in self.output.finish(status):
            yield step
        details = {"stop": None, "length": {"reason": "max_output_tokens"}}.get(reason, {"reason": reason})
        self.object = self._response(status, incomplete_details=details, usage=usage_object(generation.usage))
        if self.store and not self.background:
            self.keep(self)
        yield f"response.{status}", {"response": self.object}

    async def told(self, generation: Generation) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        """Yield all events of the response. One that fails ends with ``response.failed``; when the server stops, a
        background response ends with RequestError instead, for another server may finish it."""
        yield "response.created", {"response": dict(self.object)}
        if self.background:
            yield "response.queued", {"response": dict(self.object)}
        else:
            yield "response.in_progress", {"response": dict(self.object)}
        try:
            with renamed(self.names):
                async for name, fields in self._steps(generation):
                    if self.object["status"] == "queued":
                        self.object = self._response("in_progress")
                        yield "response.in_progress", {"response": {**self.object, "output": []}}
                    yield name, fields
        except RequestError as e:
            if self.background and e.code == "shutting_down":
                raise
            error = error_object(e)["error"]
            yield "error", {"code": error["code"], "message": error["message"], "param": error["param"]}
            yield self.fail(e, generation)

    def fail(self, error: RequestError, generation: Generation | None = None) -> tuple[str, dict[str, Any]]:
        """End the response with an error; returns the event."""
        self.object = self._response(
            "failed",
            error={"code": error.code or "server_error", "message": error.message},
            usage=usage_object(generation.usage) if generation else None,
        )
        return "response.failed", {"response": self.object}

    def cancel(self) -> tuple[str, dict[str, Any]]:
        """End the response as cancelled; returns the event."""
        self.object = self._response("cancelled")
        return "response.cancelled", {"response": self.object}

    async def events(self, work: Generation | BackgroundRun) -> AsyncGenerator[bytes, None]:
        if isinstance(work, BackgroundRun):
            async for event in work.events():
                yield event
            return
        number = 0
        async for name, fields in self.told(work):
            yield sse({"type": name, "sequence_number": number, **fields}, name)
            number += 1

    async def result(self, work: Generation | BackgroundRun) -> dict[str, Any]:
        if not isinstance(work, BackgroundRun):
            async for _ in self._steps(work):
                pass
        return self.object


class ResponsesRoutes:
    """The routes of the responses API; each public method is one."""

    def __init__(self, service: Service, journal: str | None = None) -> None:
        self.service = service
        self.store = ResponseStore()
        self.journal = ResponseJournal(journal)
        self._left = self.journal.load()  # at once, so that a bad file stops the start
        service.openers.append(self._resume)
        service.enders.append(self._end)

    # ------------------------------------------------------------------------------------------------------ routes

    async def create(self, http: HttpRequest) -> Response:
        """Answer a conversation, or start to in the background. A stored response can be continued."""
        return await self.service.respond(http, self._job)

    async def get(self, name: str, http: HttpRequest) -> Response:
        """Return the caller's response as it is now; ``?stream=true`` gives its events after ``starting_after``."""
        stored, query = self._find(name, http), http.query_params
        check_include([*query.getlist("include"), *query.getlist("include[]")])
        if query.get("stream", "false") != "true":
            return _reply(stored)
        run = stored.run
        if run is None or not run.job.stream:
            raise RequestError(
                "the events of this response are not kept; create it with background=true and stream=true",
                param="stream",
                code="no_events",
            )
        after = query.get("starting_after", "-1")
        if after != "-1" and not (after.isascii() and after.isdecimal() and len(after) < 12):
            raise RequestError("starting_after must be the sequence number of an event", param="starting_after")
        run.check_start(int(after))

        async def close() -> None:
            """Do nothing: the response goes on without its reader."""

        return EventStream(run.guarded(int(after)), close, {})

    async def cancel(self, name: str, http: HttpRequest) -> Response:
        """Cancel a background response; one that has ended stays as it is."""
        stored = self._find(name, http)
        if not stored.object["background"]:
            raise RequestError(
                "only a response with background=true can be cancelled; to end another one, close its connection",
                param="response_id",
                code="not_background",
            )
        if stored.run is not None:
            await stored.run.cancel()
        return _reply(stored)

    async def delete(self, name: str, http: HttpRequest) -> Response:
        """Delete the caller's response; work that goes on is cancelled first."""
        stored = self._find(name, http)
        if stored.run is not None:
            await stored.run.cancel()
        self.store.drop(name)
        if stored.object["background"]:
            await self._write(self.journal.drop, name)
        return Response(
            encode({"id": name, "object": "response.deleted", "deleted": True}), media_type="application/json"
        )

    def _find(self, name: str, http: HttpRequest) -> Stored:
        """Find the caller's response. Raises RequestError 404, or 503 while those of an earlier server are unknown."""
        if self.service.phase == "starting":
            self.service.require_ready()
        return self.store.get(name, Caller(http).key)

    # ------------------------------------------------------------------------------------------------------- keeping

    def _job(self, service: Service, raw: bytes, caller: Caller, record: dict[str, Any] | None = None) -> ResponsesJob:
        return ResponsesJob(service, raw, caller, self._earlier, self._keep, (self._accepted, self._finished), record)

    def _earlier(self, name: str, owner: str) -> list[dict[str, Any]]:
        return self.store.get(name, owner, "previous_response_id").conversation()

    def _keep(self, job: ResponsesJob) -> None:
        self.store.put(Stored(job.id, job.owner, job.head["created_at"], job.items(), job.object))

    async def _accepted(self, run: BackgroundRun) -> None:
        """Write a background response before its client hears of it. Raises RequestError."""
        job = run.job
        try:
            await asyncio.to_thread(self.journal.begin, job.record())
        except OSError as e:
            raise RequestError(
                f"the response cannot be kept on disk: {e.strerror}", status=503, code="no_room", retry_after=60.0
            ) from e
        self.store.put(Stored(job.id, job.owner, job.head["created_at"], job.items(), job.object, run))

    async def _finished(self, run: BackgroundRun) -> None:
        """Keep what became of a background response."""
        job = run.job
        stored = Stored(job.id, job.owner, job.head["created_at"], job.items(), job.object, run)
        with contextlib.suppress(RequestError):  # it was deleted meanwhile
            self.store.get(job.id, job.owner)
            self.store.put(stored)
            record = {"id": job.id, "owner": job.owner, "created": stored.created, "items": stored.items}
            await self._write(self.journal.end, {**record, "object": stored.object})

    async def _write(self, write: Callable[[Any], None], what: Any) -> None:
        try:
            await asyncio.to_thread(write, what)
            if self.journal.full():
                kept = {stored.id for stored in self.store}
                await asyncio.to_thread(self.journal.compact, kept.__contains__)
        except OSError as e:
            log.error("the journal of background responses could not be written: %s", e)

    async def _resume(self) -> None:
        """Load the background responses of earlier servers and go on with the unfinished ones."""
        (records, requests), self._left = self._left, ({}, {})
        going = []
        for record in records.values():
            if record["record"] == "ended":
                self.store.put(
                    Stored(record["id"], record["owner"], record["created"], record["items"], record["object"])
                )
            else:
                going.append(await self._again(record, requests.get(record["id"])))
        kept = {stored.id for stored in self.store}
        try:
            await asyncio.to_thread(self.journal.compact, kept.__contains__)
        except OSError as e:
            log.error("the journal could not be rewritten: %s", e)
        if lost := len(requests.keys() - records.keys()):
            log.info("%d journalled requests are forgotten: their clients are gone", lost)
        if going := [run for run in going if run is not None]:
            log.info("%d background responses go on where the previous server left them", len(going))
        for run in going:
            run.resume()

    async def _again(self, record: dict[str, Any], left: Request | None) -> BackgroundRun | None:
        """Admit an unfinished response again. One that this server cannot serve is kept as failed."""
        caller = Caller.again(
            id=record["id"], key=record["owner"], tenant=record["tenant"], created=int(record["created"])
        )
        try:
            if record["model"] != self.service.info.name:
                raise RequestError(
                    f"this server has '{self.service.info.name}', the response is from '{record['model']}'",
                    code="model_not_found",
                )
            job = await asyncio.to_thread(self._job, self.service, record["body"].encode(), caller, record)
        except Exception as error:  # one broken record must not keep the server from starting
            if not isinstance(error, RequestError):
                log.exception("background response %s cannot go on", record["id"])
            e = error if isinstance(error, RequestError) else RequestError("its record cannot be read", status=500)
            failed = {
                "id": record["id"],
                "object": "response",
                "created_at": record["created"],
                "model": record["model"],
                "status": "failed",
                "error": {"code": e.code or "server_error", "message": e.message},
                "output": [],
                "background": True,
                "store": True,
            }
            log.error("background response %s cannot go on: %s", record["id"], e.message)
            self.store.put(Stored(record["id"], record["owner"], record["created"], record["items"], failed))
            return None
        request = job.requests[0]
        if left is not None and left.prompt_ids == request.prompt_ids and request.params.logprobs is None:
            request.emitted = left.emitted  # log-probabilities of these tokens were not kept
        run = BackgroundRun(job, lambda: None, *job.watch)
        self.store.put(Stored(job.id, job.owner, record["created"], job.items(), job.object, run))
        return run

    async def _end(self) -> None:
        """Let background work see that the engine has stopped, and give the journal back."""
        await asyncio.gather(*(stored.run.settle() for stored in self.store if stored.run is not None))
        self.journal.close()


def _reply(stored: Stored) -> Response:
    return Response(encode(stored.current()), media_type="application/json")
