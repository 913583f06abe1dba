"""The responses API: the same conversation as chat, with the newer API's body and events, and responses that are kept,
continued, generated in the background, fetched, cancelled and deleted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from kvasir.api.http.service import Caller, Service
from kvasir.api.http.streaming import EventStream, encode
from kvasir.api.protocols.protocol_responses import check_include
from kvasir.api.protocols.responses_background import BackgroundRun
from kvasir.api.protocols.responses_job import ResponsesJob
from kvasir.api.protocols.responses_journal import ResponseJournal
from kvasir.api.protocols.responses_store import ResponseStore, Stored
from kvasir.errors import RequestError
from kvasir.logs import log
from kvasir.types import Request


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
        if query.get("stream", "").lower() not in ("true", "1"):
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
        if stored.object["background"]:
            try:  # first: otherwise the next server would have it again
                await asyncio.to_thread(self.journal.drop, name)
            except OSError as e:
                raise _no_room("the deletion", e) from e
        self.store.drop(name)
        await self._compact()
        return Response(encode({"id": name, "object": "response", "deleted": True}), media_type="application/json")

    def _find(self, name: str, http: HttpRequest) -> Stored:
        """Find the caller's response. Raises RequestError 404, or 503 while those of an earlier server are unknown."""
        if self.service.phase == "starting":
            self.service.require_ready()
        return self.store.get(name, Caller(http).key)

    # ------------------------------------------------------------------------------------------------------- keeping

    def _job(self, service: Service, raw: bytes, caller: Caller, record: dict[str, Any] | None = None) -> ResponsesJob:
        watch = (self._accepted, self._finished)
        return ResponsesJob(service, raw, caller, self._earlier, self.store.item, self._keep, watch, record)

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
            raise _no_room("the response", e) from e
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
        except OSError as e:
            log.error("the journal of background responses could not be written: %s", e)
        await self._compact()

    async def _compact(self, always: bool = False) -> None:
        """Rewrite the journal without what is forgotten, when it has grown or ``always``."""
        if not (always or self.journal.full()):
            return
        kept = {stored.id for stored in self.store}
        try:
            await asyncio.to_thread(self.journal.compact, kept.__contains__)
        except OSError as e:
            log.error("the journal could not be rewritten: %s", e)

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
        await self._compact(always=True)
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
            request.max_tokens = left.max_tokens  # this server's limit may be lower than what it has already
            request.emitted = left.emitted  # log-probabilities of these tokens were not kept
        run = BackgroundRun(job, lambda: None, *job.watch)
        self.store.put(Stored(job.id, job.owner, record["created"], job.items(), job.object, run))
        return run

    async def _end(self) -> None:
        """Let background work see that the engine has stopped, and give the journal back."""
        await asyncio.gather(*(stored.run.settle() for stored in self.store if stored.run is not None))
        self.journal.close()


def _no_room(what: str, error: OSError) -> RequestError:
    return RequestError(
        f"{what} cannot be kept on disk: {error.strerror}", status=503, code="no_room", retry_after=60.0
    )


def _reply(stored: Stored) -> Response:
    return Response(encode(stored.current()), media_type="application/json")
