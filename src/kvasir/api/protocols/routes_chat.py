"""POST /v1/chat/completions: answer messages with one assistant message per choice (reasoning, content, tool calls)."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from typing import Any

from kvasir.api.calls import tools
from kvasir.api.http.body import SamplingBody
from kvasir.api.http.generation import Delta, Generation
from kvasir.api.http.limits import unique_id
from kvasir.api.http.service import Caller, Service, renamed
from kvasir.api.http.streaming import DONE, sse
from kvasir.api.protocols.openai import ChatBody
from kvasir.api.protocols.sampling import format_grammar, grammar_of, sampling_params, truncated, whitespace_of
from kvasir.api.text.chat import Call, Message, Piece, check_messages, only_functions, texts
from kvasir.api.text.detokenize import Detokenizer
from kvasir.api.text.logprobs import chat_logprobs, prompt_logprobs
from kvasir.errors import RequestError
from kvasir.models.chat_messages import strings
from kvasir.types import Grammar, Request


@dataclasses.dataclass(slots=True)
class Prompt:
    """A conversation as a prompt: its ids, the tools that it shows, and the grammar that a forced call imposes on the
    answer. ``offered``, ``choice``: the tools of the request, and its ``tool_choice``."""

    ids: list[int]
    tools: list[dict[str, Any]] | None
    after: tuple[int, ...]  # a grammar starts after these ids: the end of the reasoning
    forced: Grammar | None
    continued: str | None = None  # text of the message that the answer continues
    offered: list[dict[str, Any]] | None = None
    choice: Any = None


def prepare_prompt(
    service: Service,
    messages: list[dict[str, Any]],
    offered: list[dict[str, Any]] | None,
    tool_choice: Any,
    parallel: bool,
    template: Mapping[str, Any],
    caller: Caller,
    *,
    continued: bool = False,
    cut: Callable[[list[int]], list[int]] = list,
    dropped: list[str] | None = None,
) -> Prompt:
    """Check, render and encode a conversation. Raises RequestError.

    ``template``: the options of the chat template. ``caller``: whose turn it is. ``continued``: the answer continues
    the last message. ``cut`` shortens the prompt's ids. ``dropped``: collects what the grammar of a forced call leaves
    out of the schemas of tools with ``strict: false``.
    """
    text = service.text
    shown = tools.validate(offered, tool_choice).shown(offered)
    if shown and text.tool_format is None:
        raise RequestError(
            "this model has no known tool-call format; start the server with --tool-call-parser to name one",
            param="tools",
            code="no_tool_parser",
        )
    caller.render(text.tokenizer, template.get("chat_template"), shown)
    messages = check_messages(messages)
    check = partial(text.check_size, max_model_len=service.info.max_model_len)
    check([*texts(messages), *strings(template.get("documents"))])
    ids = text.tokenizer.encode_chat(messages, tools=shown, continue_final_message=continued, check=check, **template)
    ids = cut(ids)
    last = "".join(texts(messages[-1:])) if continued else None
    thinking = text.reasoning(ids, last)
    after = thinking.end_ids(text.tokenizer) if thinking else ()
    forced = tools.grammar(offered, tool_choice, text.tool_format, text.tokenizer, parallel, after, dropped=dropped)
    return Prompt(ids, shown, after, forced, last, offered, tool_choice)


def answer_grammar(
    service: Service,
    prompt: Prompt,
    body: SamplingBody,
    parallel: bool,
    response_format: tuple[str, Any],
    dropped: list[str],
) -> tuple[str, Grammar | None]:
    """The one grammar of an answer, and the parameter that its errors name.

    ``response_format``: its name on this route, and its value. It holds for text: a forced call leaves none, and where
    tools are offered the answer is text in that format or calls. ``dropped`` collects what ``strict: false`` leaves out
    of schemas. Raises RequestError.
    """
    name, value = response_format
    whitespace = whitespace_of(body)
    answer = format_grammar(value, name, dropped)
    if answer is not None:
        answer = dataclasses.replace(answer, whitespace=whitespace)
        text = service.text
        if prompt.forced is not None:
            answer = None
        elif prompt.tools:
            answer = tools.grammar(
                prompt.offered,
                prompt.choice,
                text.tool_format,
                text.tokenizer,
                parallel,
                text_format=answer,
                dropped=dropped,
            )
    found, grammar = grammar_of(body, {name: answer, "tool_choice": prompt.forced}, dropped)
    if grammar is not None:
        # The grammar of a forced call says itself where it starts: some formats reason within it.
        after = grammar.after if grammar is prompt.forced else prompt.after
        grammar = dataclasses.replace(grammar, after=after, whitespace=whitespace)
    return found, grammar


# Names by which chat templates know the switch for thinking.
THINKING_SWITCHES = ("enable_thinking", "thinking")


def template_options(
    service: Service,
    kwargs: dict[str, Any] | None,
    chat_template: str | None = None,
    effort: str | None = None,
    documents: list[dict[str, Any]] | None = None,
    warnings: list[str] | None = None,
) -> dict[str, Any]:
    """The template's options besides the messages. Raises RequestError for a client's template unless it is enabled.

    ``effort``: reasoning effort, a variable of the template; "none" also turns its switch for thinking off, others turn
    it on. The client's ``kwargs`` win. ``warnings``: gets a line for what the template does not read.
    """
    wanted: dict[str, Any] = {}
    reads = service.text.reads if chat_template is None else None
    if effort is not None:
        found = {"reasoning_effort": effort, **dict.fromkeys(THINKING_SWITCHES, effort != "none")}
        wanted |= {name: value for name, value in found.items() if reads is None or name in reads}
        if not wanted and warnings is not None:
            warnings.append(
                f"reasoning effort '{effort}' has no effect: this model's chat template has no such setting"
            )
    if documents is not None:
        wanted["documents"] = documents
        if reads is not None and "documents" not in reads and warnings is not None:
            warnings.append("documents have no effect: this model's chat template does not read them")
    options = wanted | (kwargs or {})
    for name in ("self", "messages", "tools", "add_generation_prompt", "chat_template", "continue_final_message"):
        if name in options:
            raise RequestError(
                f"'{name}' cannot be set through chat_template_kwargs",
                param="chat_template_kwargs",
                code="reserved_name",
            )
    if chat_template is not None:
        if not service.settings.enable_client_chat_template:
            raise RequestError(
                "this server takes no 'chat_template' from clients (--enable-client-chat-template enables it)",
                param="chat_template",
                code="unsupported_parameter",
            )
        options["chat_template"] = chat_template
    return options


class ChatJob:
    """A chat completion; see ``service.Job``. The constructor admits the body, off the event loop.
    Raises RequestError."""

    def __init__(self, service: Service, raw: bytes, caller: Caller) -> None:
        self.service = service
        self.body, self.ignored = service.parse(ChatBody, raw, caller, adapters=True)
        body = self.body
        self.stream = bool(body.stream)
        self.options = body.stream_settings()
        self.parallel = body.parallel_tool_calls is not False
        self.names = {
            "prompt": "messages",
            "logprobs": "top_logprobs",
            "max_tokens": "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
        }
        options = template_options(
            service,
            body.chat_template_kwargs,
            body.chat_template,
            body.reasoning_effort,
            body.documents,
            caller.warnings,
        )
        limit = service.cut(max_tokens_of(body), caller, self.names["max_tokens"])
        with renamed(self.names), only_functions(body.tools, caller.warnings) as functions:
            self.prompt = prepare_prompt(
                service,
                body.messages,
                functions,
                body.tool_choice,
                self.parallel,
                {"add_generation_prompt": body.add_generation_prompt is not False, **options},
                caller,
                continued=bool(body.continue_final_message),
                cut=lambda ids: truncated(ids, body.truncate_prompt_tokens, limit, service.info),
                dropped=self.ignored,
            )
        grammar_name, grammar = answer_grammar(
            service, self.prompt, body, self.parallel, ("response_format", body.response_format), self.ignored
        )
        params = sampling_params(
            body,
            service.info.generation_defaults,
            max_tokens=limit,
            logprobs=_logprobs(body),
            grammar=grammar,
        )
        self.names["grammar"] = grammar_name
        id = unique_id("chatcmpl", caller.id)
        self.requests = service.admit(
            [self.prompt.ids], [params], caller, id, body.priority, self.names, self.stream, body.model
        )
        self.messages = [
            service.text.message(self.prompt.ids, self.prompt.tools, self.parallel, self.prompt.continued)
            for _ in range(params.n)
        ]
        self.head = {
            "id": id,
            "object": "chat.completion.chunk" if self.stream else "chat.completion",
            "created": caller.created,
            "model": body.model or service.info.name,
        }

    def begin(self, release: Callable[[], None]) -> Generation:
        return Generation(self.service.client, self.service.metrics, self.requests, self.detokenizer, release)

    def detokenizer(self, request: Request) -> Detokenizer:
        return Detokenizer(self.service.text.tokenizer, (), request.params, self.service.text.keep_ids)

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        begun: set[int] = set()
        async for delta in generation.deltas():
            choices = self._push(delta, generation)
            if delta.choice not in begun:
                begun.add(delta.choice)
                yield self._chunk(
                    generation,
                    {
                        "index": delta.choice,
                        "delta": {"role": "assistant", "content": ""},
                        "logprobs": None,
                        "finish_reason": None,
                    },
                    first=True,
                )
            for choice in choices:
                yield self._chunk(generation, choice)
        if self.options.include_usage:
            yield sse({**self.head, "choices": [], "usage": generation.usage.object()})
        yield DONE

    def _chunk(self, generation: Generation, choice: dict[str, Any], first: bool = False) -> bytes:
        chunk: dict[str, Any] = {**self.head, "choices": [choice]}
        if self.options.include_usage:
            chunk["usage"] = generation.usage.object() if self.options.continuous_usage_stats else None
        if first and self.body.return_token_ids:
            chunk["prompt_token_ids"] = self.prompt.ids
        return sse(chunk)

    def _push(self, delta: Delta, generation: Generation) -> list[dict[str, Any]]:
        """The chunks' choices for one delta, one per piece.
        The last carries log-probabilities, ids and finish reason."""
        message = self.messages[delta.choice]
        pieces = message.push(delta.text, delta.token_ids, delta.finish_reason is not None)
        generation.usage.reasoning = sum(m.reasoning_tokens for m in self.messages)
        shown = self.body.include_reasoning is not False
        deltas = [piece_delta(p) for p in pieces if shown or p.kind != "reasoning"]
        told = delta.finish_reason is not None or delta.logprobs or delta.forced or self.body.return_token_ids
        if not deltas and told:
            deltas = [{}]
        choices = [{"index": delta.choice, "delta": d, "logprobs": None, "finish_reason": None} for d in deltas]
        if choices:
            if delta.logprobs:
                choices[-1]["logprobs"] = chat_logprobs(
                    self.service.text.tokenizer,
                    delta.logprobs,
                    self.body.return_tokens_as_token_ids,
                    self.body.return_drafters,
                )
            if self.body.return_token_ids:
                choices[-1]["token_ids"] = delta.token_ids
            if delta.forced:
                choices[-1]["kvasir"] = {"forced": delta.forced}
            if delta.finish_reason is not None:
                choices[-1] |= {
                    "finish_reason": message.finish_reason(delta.finish_reason),
                    "stop_reason": delta.stop_reason,
                }
        return choices

    async def result(self, generation: Generation) -> dict[str, Any]:
        choices: list[dict[str, Any]] = [{"index": i} for i in range(len(self.messages))]
        logprobs: list[list[dict[str, Any]]] = [[] for _ in self.messages]
        ids: list[list[int]] = [[] for _ in self.messages]
        forced: list[list[int]] = [[] for _ in self.messages]
        async for delta in generation.deltas():
            for choice in self._push(delta, generation):
                if choice["finish_reason"] is not None:
                    choices[delta.choice] |= {
                        "finish_reason": choice["finish_reason"],
                        "stop_reason": choice["stop_reason"],
                    }
                logprobs[delta.choice] += (choice["logprobs"] or {"content": []})["content"]
            ids[delta.choice] += delta.token_ids
            forced[delta.choice] += delta.forced
        for i, (choice, message) in enumerate(zip(choices, self.messages, strict=True)):
            choice["message"] = message_object(message, self.body.include_reasoning is not False)
            choice["logprobs"] = {"content": logprobs[i]} if self.body.logprobs else None
            if self.body.return_token_ids:
                choice["token_ids"] = ids[i]
            if forced[i]:
                choice["kvasir"] = {"forced": forced[i]}
        result = {**self.head, "choices": choices, "usage": generation.usage.object()}
        if self.body.prompt_logprobs is not None:
            result["prompt_logprobs"] = prompt_logprobs(
                self.service.text.tokenizer, generation.running[0].prompt_logprobs or []
            )
        if self.body.return_token_ids:
            result["prompt_token_ids"] = self.prompt.ids
        return result


def max_tokens_of(body: ChatBody) -> int | None:
    """The token limit under either name; None: to the end of the context. Raises RequestError when the two differ."""
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise RequestError(
            "'max_tokens' and 'max_completion_tokens' differ; send one of them",
            param="max_completion_tokens",
            code="conflict",
        )
    return body.max_completion_tokens if body.max_tokens is None else body.max_tokens


def _logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("'top_logprobs' needs logprobs=true", param="top_logprobs")
    if body.return_drafters and not body.logprobs:
        raise RequestError("'return_drafters' needs logprobs=true", param="return_drafters")
    return (body.top_logprobs or 0) if body.logprobs else None


def reasoning_fields(text: str) -> dict[str, str]:
    """The reasoning under DeepSeek's name, which most clients read, and under vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text}


def piece_delta(piece: Piece) -> dict[str, Any]:
    """The ``delta`` of a chunk for one piece."""
    if piece.kind == "reasoning":
        return reasoning_fields(piece.text)
    if piece.kind == "content":
        return {"content": piece.text}
    if piece.started is None:
        return {"tool_calls": [{"index": piece.call, "function": {"arguments": piece.text}}]}
    function = {"name": piece.started.name, "arguments": piece.text}
    return {"tool_calls": [{"index": piece.call, "id": piece.started.id, "type": "function", "function": function}]}


def message_object(message: Message, with_reasoning: bool = True) -> dict[str, Any]:
    """The ``message`` of a collected reply. ``content`` is null when there are only calls."""

    def call(c: Call) -> dict[str, Any]:
        return {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}

    out: dict[str, Any] = {
        "role": "assistant",
        "content": message.content or (None if message.calls else ""),
        "refusal": None,
    }
    if message.reasoning and with_reasoning:
        out |= reasoning_fields(message.reasoning)
    if message.calls:
        out["tool_calls"] = [call(c) for c in message.calls]
    return out
