"""POST /v1/responses: the same conversation as chat, with the newer API's body and events. Stateless."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

from kvasir.api.detokenize import Detokenizer
from kvasir.api.errors import error_object
from kvasir.api.generation import Generation
from kvasir.api.limits import unique_id
from kvasir.api.logprobs import chat_logprobs
from kvasir.api.protocol import MAX_MESSAGES, ResponsesBody
from kvasir.api.responses import Output, choice_of, flat_places, messages_of, tools_of, usage_object
from kvasir.api.routes_chat import answer_grammar, prepare_prompt, template_options
from kvasir.api.sampling import sampling_params
from kvasir.api.service import Caller, Service, renamed
from kvasir.api.streaming import sse
from kvasir.errors import RequestError
from kvasir.types import Request


class ResponsesJob:
    """A response; see ``service.Job``. The constructor admits the body, off the event loop. Raises RequestError."""

    def __init__(self, service: Service, raw: bytes, caller: Caller) -> None:
        self.service = service
        self.body, self.ignored = service.parse(ResponsesBody, raw)
        body = self.body
        self.stream = bool(body.stream)
        if isinstance(body.input, list) and not 0 < len(body.input) <= MAX_MESSAGES:
            raise RequestError(f"'input' must hold 1 to {MAX_MESSAGES} items", param="input")
        parallel = body.parallel_tool_calls is not False
        self.names = {"prompt": "input", "max_tokens": "max_output_tokens"}
        with renamed(self.names), flat_places():
            prompt = prepare_prompt(
                service,
                messages_of(body.input, body.instructions),
                tools_of(body.tools),
                choice_of(body.tool_choice),
                parallel,
                self.ignored,
                **template_options(service, body.chat_template_kwargs),
            )
        text_format = body.text.format if body.text else None
        with flat_places():
            grammar_name, grammar = answer_grammar(
                service, prompt, body, parallel, ("text.format", text_format), self.ignored
            )
        if body.top_logprobs is not None and not body.include:
            raise RequestError("'top_logprobs' needs include=['message.output_text.logprobs']", param="top_logprobs")
        self.names["logprobs"] = "top_logprobs"
        params = sampling_params(
            body,
            service.info.generation_defaults,
            max_tokens=body.max_output_tokens,
            grammar=grammar,
            logprobs=(body.top_logprobs or 0) if body.include else None,
        )
        self.id = unique_id("resp", caller.id)
        self.names["grammar"] = grammar_name
        self.requests = service.admit([prompt.ids], [params], caller, self.id, body.priority, self.names, self.stream)
        self.message = service.text.message(prompt.ids, prompt.tools, parallel)
        self.output = Output()
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
            "tools": body.tools or [],
            "metadata": {},
            "text": {
                "format": text_format.model_dump(by_alias=True, exclude_none=True) if text_format else {"type": "text"}
            },
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "background": False,
            "reasoning": None,
            "top_logprobs": body.top_logprobs or 0,
        }

    def begin(self, release: Callable[[], None]) -> Generation:
        return Generation(self.service.client, self.service.metrics, self.requests, self.detokenizer, release)

    def detokenizer(self, request: Request) -> Detokenizer:
        return Detokenizer(self.service.text.tokenizer, (), request.params, self.service.text.keep_ids)

    def _response(self, status: str, generation: Generation | None = None, **more: Any) -> dict[str, Any]:
        usage = usage_object(generation.usage) if generation else None
        return {
            **self.head,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": self.output.items,
            "usage": usage,
            **more,
        }

    async def _steps(self, generation: Generation) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        """Yield events as pairs of name and fields: the output as it grows, then the whole response."""
        reason = ""
        waiting: list[dict[str, Any]] = []  # log-probabilities of tokens whose text is still held back
        async for delta in generation.deltas():
            reason = delta.finish_reason or ""
            # Only token by token is it known which log-probabilities belong to text.
            for part in delta.singly() if self.body.include else (delta,):
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
        yield f"response.{status}", {"response": self._response(status, generation, incomplete_details=details)}

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        number = 0

        def event(name: str, fields: dict[str, Any]) -> bytes:
            nonlocal number
            number += 1
            return sse({"type": name, "sequence_number": number - 1, **fields}, name)

        yield event("response.created", {"response": self._response("in_progress")})
        yield event("response.in_progress", {"response": self._response("in_progress")})
        try:
            with renamed(self.names):
                async for name, fields in self._steps(generation):
                    yield event(name, fields)
        except RequestError as e:
            error = error_object(e)["error"]
            failure = {"code": e.code or "server_error", "message": e.message}
            yield event("error", {"code": error["code"], "message": error["message"], "param": error["param"]})
            yield event("response.failed", {"response": self._response("failed", generation, error=failure)})

    async def result(self, generation: Generation) -> dict[str, Any]:
        last: dict[str, Any] = {}
        async for _, fields in self._steps(generation):
            last = fields
        return last["response"]
