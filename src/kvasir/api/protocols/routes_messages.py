"""POST /v1/messages and /v1/messages/count_tokens: the same conversation as chat, for Anthropic's clients."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from kvasir.api.http.errors import id_headers
from kvasir.api.http.generation import Generation
from kvasir.api.http.limits import unique_id
from kvasir.api.http.service import Caller, Service, ignored_header, renamed
from kvasir.api.http.streaming import encode, sse
from kvasir.api.protocols.messages import (
    Content,
    choice_of,
    messages_of,
    own_places,
    stop_fields,
    tools_of,
    usage_object,
)
from kvasir.api.protocols.messages_protocol import Conversation, CountTokensBody, MessagesBody, OutputFormat
from kvasir.api.protocols.routes_chat import THINKING_SWITCHES, Prompt, answer_grammar, prepare_prompt, template_options
from kvasir.api.protocols.sampling import sampling_params
from kvasir.api.text.detokenize import Detokenizer
from kvasir.api.text.ignored import tell_ignored
from kvasir.errors import RequestError
from kvasir.types import Request

# Fields of Anthropic's own service that a reply may not need to honour: what was ignored stands in a header.
IGNORED = ("context_management", "diagnostics", "container", "mcp_servers", "betas", "anthropic_beta")


class AskedPrompt:
    """The prompt of a conversation, and how its answer is read. Raises RequestError.

    ``continues``: the conversation ends with a message of the assistant, which the answer continues. ``ignored``: what
    of the body was ignored. ``budget``: most tokens of thinking; None: no limit.
    """

    def __init__(self, service: Service, body: Conversation, caller: Caller) -> None:
        text = service.text
        self.ignored = [name for name in IGNORED if getattr(body, name) not in (None, [])]
        for name in self.ignored:
            tell_ignored(name)
        self.budget: int | None = None
        options = template_options(service, body.chat_template_kwargs)
        options = {**self._thinking(service, body), **options}
        messages = messages_of(body.messages, body.system, self.ignored)
        last = messages[-1] if messages else {}
        self.continues = last.get("role") == "assistant" and "tool_calls" not in last
        if self.continues:
            messages.pop()
        tools, ignored = tools_of(body.tools)
        self.ignored += ignored
        choice, self.parallel = choice_of(body.tool_choice)
        with own_places(body.tools):
            self.prompt: Prompt = prepare_prompt(
                service, messages, tools, choice, self.parallel, options, caller, dropped=self.ignored
            )
        if self.continues:
            thinking = text.reasoning(self.prompt.ids)
            if "reasoning_content" in last or (thinking is not None and thinking.opened):
                raise RequestError(
                    "the last message is the assistant's and would be continued, which thinking rules out. End with a "
                    "user's message, or send thinking={'type': 'disabled'} and no thinking block at the end",
                    param="messages",
                    code="unsupported_parameter",
                )
            self.prompt.ids += text.encode(last["content"])
            self.prompt.after = ()  # this answer does not think, so a grammar starts at once
            if self.prompt.forced is not None:
                self.prompt.forced = dataclasses.replace(self.prompt.forced, after=())

    def _thinking(self, service: Service, body: Conversation) -> dict[str, Any]:
        """The template's variables for ``thinking`` and ``output_config.effort``."""
        options: dict[str, Any] = {}
        reads = service.text.reads
        if body.thinking is not None:
            on = body.thinking.type != "disabled"
            options |= (switches := {name: on for name in THINKING_SWITCHES if name in reads})
            thinks = service.text.reasoning([]) is not None
            if not switches and on != thinks:  # a model that cannot think, or one that always does
                self.ignored.append("thinking.type")
            if body.thinking.budget_tokens is not None:
                if thinks:
                    self.budget = body.thinking.budget_tokens
                else:
                    self.ignored.append("thinking.budget_tokens")
        if body.output_config is not None and body.output_config.effort is not None:
            if "reasoning_effort" in reads:
                options["reasoning_effort"] = body.output_config.effort
            else:
                self.ignored.append("output_config.effort")
        return options


def output_format(body: Conversation) -> tuple[str, OutputFormat | None]:
    """The format of the answer, and its name in the body. Raises RequestError when both of its names are given."""
    newer = body.output_config.format if body.output_config is not None else None
    if newer is not None and body.output_format is not None:
        raise RequestError(
            "'output_format' is the older name of 'output_config.format'; send one of them",
            param="output_format",
            code="conflict",
        )
    return ("output_config.format", newer) if body.output_format is None else ("output_format", body.output_format)


class MessagesJob:
    """A message; see ``service.Job``. The constructor admits the body, off the event loop. Raises RequestError."""

    ping = sse({"type": "ping"}, "ping")

    def __init__(self, service: Service, raw: bytes, caller: Caller) -> None:
        self.service = service
        body, unknown = service.parse(MessagesBody, raw, caller, adapters=True)
        self.stream = bool(body.stream)
        if body.stop is not None and body.stop_sequences is not None:
            raise RequestError("'stop' is another name of 'stop_sequences'; send one of them", param="stop")
        self.names = {"prompt": "messages", "stop": "stop" if body.stop_sequences is None else "stop_sequences"}
        with renamed(self.names):
            asked = AskedPrompt(service, body, caller)
        self.ignored = [*unknown, *asked.ignored]
        output = output_format(body)
        with own_places(body.tools):
            grammar_name, grammar = answer_grammar(service, asked.prompt, body, asked.parallel, output, self.ignored)
        stop = body.stop if body.stop_sequences is None else body.stop_sequences
        params = sampling_params(
            body,
            service.info.generation_defaults,
            max_tokens=service.cut(body.max_tokens, caller),
            grammar=grammar,
            **({} if stop is None else {"stop": stop}),
            **self._budget(body, asked),
        )
        self.names["grammar"] = grammar_name
        id = unique_id("msg", caller.id)
        ids = asked.prompt.ids
        self.requests = service.admit([ids], [params], caller, id, body.priority, self.names, self.stream, body.model)
        self.message = service.text.message(ids, asked.prompt.tools, asked.parallel)
        self.content = Content(body.thinking is not None and body.thinking.display == "omitted")
        self.head = {"id": id, "type": "message", "role": "assistant", "model": body.model or service.info.name}

    def _budget(self, body: MessagesBody, asked: AskedPrompt) -> dict[str, int]:
        """The parameter that ``thinking.budget_tokens`` becomes."""
        if asked.budget is None:
            return {}
        if body.thinking_token_budget is not None:
            raise RequestError(
                "'thinking_token_budget' is another name of 'thinking.budget_tokens'; send one of them",
                param="thinking_token_budget",
                code="conflict",
            )
        self.names["thinking_token_budget"] = "thinking.budget_tokens"
        return {"thinking_token_budget": asked.budget}

    def begin(self, release: Callable[[], None]) -> Generation:
        return Generation(self.service.client, self.service.metrics, self.requests, self.detokenizer, release)

    def detokenizer(self, request: Request) -> Detokenizer:
        return Detokenizer(self.service.text.tokenizer, (), request.params, self.service.text.keep_ids)

    async def _steps(self, generation: Generation) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of the message.

        The first comes with the first token, when it is known how much of the prompt was cached, because some clients
        read that only there.
        """
        begun = False
        end: dict[str, Any] = {}
        async for delta in generation.deltas():
            if not begun:
                begun = True
                message = {**self.head, "content": [], "stop_reason": None, "stop_sequence": None}
                yield {"type": "message_start", "message": {**message, "usage": usage_object(generation.usage)}}
                yield {"type": "ping"}
            for piece in self.message.push(delta.text, delta.token_ids, delta.finish_reason is not None):
                for event in self.content.add(piece):
                    yield event
            if delta.finish_reason is not None:
                end = stop_fields(self.message.finish_reason(delta.finish_reason), delta.stop_reason)
        for event in self.content.finish():
            yield event
        generation.usage.reasoning = self.message.reasoning_tokens
        yield {"type": "message_delta", "delta": end, "usage": usage_object(generation.usage)}
        yield {"type": "message_stop"}

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        async for event in self._steps(generation):
            yield sse(event, event["type"])

    async def result(self, generation: Generation) -> dict[str, Any]:
        last: dict[str, Any] = {}
        async for event in self._steps(generation):
            last = event if event["type"] == "message_delta" else last
        return {**self.head, "content": self.content.blocks, **last["delta"], "usage": last["usage"]}


class MessagesRoutes:
    """The routes of the messages API beside the generating one; each public method is one."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def count_tokens(self, http: HttpRequest) -> Response:
        caller = Caller(http)
        raw = await self.service.body(http)
        count, ignored = await self.service.prepare(caller, raw, self._count, raw, caller)
        headers = {**id_headers(http.scope), **ignored_header(ignored)}
        return Response(encode({"input_tokens": count}), 200, headers, media_type="application/json")

    def _count(self, raw: bytes, caller: Caller) -> tuple[int, list[str]]:
        body, unknown = self.service.parse(CountTokensBody, raw, adapters=True)
        with renamed({"prompt": "messages"}):
            asked = AskedPrompt(self.service, body, caller)
        return len(asked.prompt.ids), [*unknown, *asked.ignored]
