"""One response of the responses API: its body admitted, its events and objects."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

from kvasir.api.http.errors import error_object
from kvasir.api.http.generation import Generation
from kvasir.api.http.limits import unique_id
from kvasir.api.http.service import Caller, Service, renamed
from kvasir.api.http.streaming import sse
from kvasir.api.protocols.openai import MAX_MESSAGES
from kvasir.api.protocols.protocol_responses import ResponsesBody
from kvasir.api.protocols.responses import (
    Output,
    choice_of,
    flat_places,
    items_of,
    messages_of,
    references,
    tools_of,
    usage_object,
)
from kvasir.api.protocols.responses_background import BackgroundRun
from kvasir.api.protocols.routes_chat import answer_grammar, prepare_prompt, template_options
from kvasir.api.protocols.sampling import sampling_params, truncated
from kvasir.api.text.chat import only_functions
from kvasir.api.text.detokenize import Detokenizer
from kvasir.api.text.ignored import ignore
from kvasir.api.text.logprobs import chat_logprobs
from kvasir.errors import RequestError
from kvasir.types import Request


class ResponsesJob:
    """A response; see ``service.Job``. The constructor admits the body, off the event loop. Raises RequestError.

    ``earlier(id, owner)``: the items of the response to continue. ``item(id, owner, param)``: a kept output item.
    ``keep(job)``: called with the finished job of a response that is to be stored. ``watch``: the two callbacks of a
    ``BackgroundRun``. ``record``: what an earlier server has written of this response, which then gets the same id and
    seed.
    """

    def __init__(
        self,
        service: Service,
        raw: bytes,
        caller: Caller,
        earlier: Callable[[str, str], list[dict[str, Any]]],
        item: Callable[[str, str, str], dict[str, Any]],
        keep: Callable[[ResponsesJob], None],
        watch: tuple[Callable, Callable],
        record: dict[str, Any] | None = None,
    ) -> None:
        self.service, self.raw, self.owner, self.tenant = service, raw, caller.key, caller.own_tenant
        self.keep, self.watch = keep, watch
        self.body, self.ignored = service.parse(ResponsesBody, raw, caller, adapters=True)
        body = self.body
        self.stream, self.background, self.store = bool(body.stream), bool(body.background), body.store is not False
        for name in body.without_effect():
            ignore(name, self.ignored)
        if record is not None:
            self.earlier = record["items"]
        else:
            name = body.previous_response_id
            self.earlier = earlier(name, caller.key) if name is not None else []
        self.input = items_of(body.input)
        if not 0 < len(self.input) <= MAX_MESSAGES - len(self.earlier):
            raise RequestError(
                f"'input' and the conversation before it must hold 1 to {MAX_MESSAGES} items", param="input"
            )
        self.referenced: dict[str, dict[str, Any]] = {}
        written = {} if record is None else record.get("referenced", {})
        for i, name in references(self.input):
            found = written[name] if name in written else item(name, caller.key, f"input[{i}].id")
            self.input[i] = self.referenced[name] = found
        parallel = body.parallel_tool_calls is not False
        self.names = {"prompt": "input", "max_tokens": "max_output_tokens"}
        limit = service.cut(body.max_output_tokens, caller, "max_output_tokens")
        effort = body.reasoning.effort if body.reasoning else None
        with renamed(self.names), _cutting(body), only_functions(body.tools, caller.warnings) as tools, flat_places():
            prompt = prepare_prompt(
                service,
                messages_of(self.input, body.instructions, self.earlier),
                tools_of(tools),
                choice_of(body.tool_choice),
                parallel,
                template_options(service, body.chat_template_kwargs, effort=effort, warnings=caller.warnings),
                caller,
                cut=lambda ids: truncated(ids, body.truncate_prompt_tokens, limit, service.info),
                dropped=self.ignored,
            )
            text_format = body.text.format if body.text else None
            asked = ("text.format", text_format)
            grammar_name, grammar = answer_grammar(service, prompt, body, parallel, asked, self.ignored)
        self.names["logprobs"] = "top_logprobs"
        params = sampling_params(
            body,
            service.info.generation_defaults,
            max_tokens=limit,
            grammar=grammar,
            logprobs=(body.top_logprobs or 0) if body.include else None,
        )
        self.id = record["id"] if record is not None else unique_id("resp", caller.id)
        self.names["grammar"] = grammar_name
        with _cutting(body):
            self.requests = service.admit(
                [prompt.ids], [params], caller, self.id, body.priority, self.names, self.stream, body.model
            )
        if record is not None:
            self.requests[0].seed = record["seed"]
        self.message = service.text.message(prompt.ids, prompt.tools, parallel)
        self.output = Output(self.id)
        self.head = {
            "id": self.id,
            "object": "response",
            "created_at": caller.created,
            "model": body.model or service.info.name,
            "instructions": body.instructions,
            "max_output_tokens": limit,
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
            "truncation": body.truncation or "disabled",
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
        return [*self.earlier, *self.input, *self.output.items]

    def record(self) -> dict[str, Any]:
        """The record from which another server generates the same response; see ``responses_journal``."""
        return {
            "id": self.id,
            "owner": self.owner,
            "tenant": self.tenant,
            "created": self.head["created_at"],
            "model": self.head["model"],
            "seed": self.requests[0].seed,
            "items": self.earlier,
            "body": self.raw.decode(),
            **({"referenced": self.referenced} if self.referenced else {}),
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
        for step in self.output.finish(status, self.message.cut):
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


@contextlib.contextmanager
def _cutting(body: ResponsesBody) -> Iterator[None]:
    """Make the error of a prompt that does not fit say what ``truncation: "auto"`` cannot do. Which items may go is the
    client's to say: a call belongs to its output, and an answer to its question."""
    try:
        yield
    except RequestError as e:
        if e.code == "context_length_exceeded" and body.truncation == "auto":
            e.message += (
                ". truncation='auto' drops no items here: send fewer items, or truncate_prompt_tokens=-1, which keeps "
                "the last tokens that fit"
            )
        raise
