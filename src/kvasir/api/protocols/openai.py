"""The bodies of chat and completions, with OpenAI's names and vLLM's extras. Types only; admission checks ranges."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from kvasir.api.http.body import Effort, Object, Part, Prompts, SamplingBody
from kvasir.errors import RequestError

MAX_MESSAGES = 4096
# Schemas for the OpenAPI document. The values are checked by hand where they are used, which gives better messages.
_NAME = {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,128}$"}
_CALL = {
    "type": "object",
    "required": ["function"],
    "additionalProperties": False,
    "properties": {
        "id": {"type": ["string", "null"]},
        "type": {"enum": ["function", None]},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"type": "string"}, "arguments": {"type": ["string", "object", "null"]}},
            "additionalProperties": False,
        },
    },
}
_PART = {
    "type": "object",
    "required": ["type", "text"],
    "additionalProperties": False,
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART, "minItems": 1}]}
_ANY_CONTENT = {"anyOf": [{"type": ["string", "null"]}, {"type": "array", "items": _PART}]}


def _message(roles: list[str], required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["role", *required],
        "additionalProperties": False,
        "properties": {"role": {"enum": roles}, "content": _CONTENT, "name": {"type": "string"}, **properties},
    }


MESSAGE = {
    "anyOf": [
        _message(["system", "developer", "user"], ["content"]),
        _message(
            ["assistant"],
            [],
            content=_ANY_CONTENT,
            tool_calls={"type": "array", "items": _CALL},
            reasoning_content={"type": "string"},
        ),
        _message(["tool"], ["tool_call_id"], content=_ANY_CONTENT, tool_call_id={"type": "string", "minLength": 1}),
    ]
}
TOOL = {
    "type": "object",
    "required": ["type", "function"],
    "additionalProperties": False,
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": _NAME,
                "description": {"type": "string"},
                "parameters": {"type": "object"},
                "strict": {"type": "boolean"},
            },
        },
    },
}
Message = Annotated[Object, WithJsonSchema(MESSAGE)]
Tool = Annotated[Object, WithJsonSchema(TOOL)]


class StreamOptions(Part):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class JsonSchemaFormat(Part):
    name: str = "schema"
    description: str | None = None
    schema_: Any = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class ChoicesBody(SamplingBody):
    """The parameters that chat and plain completions share."""

    n: int | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    best_of: int | None = None

    def check(self) -> None:
        if self.best_of is not None and self.best_of != (1 if self.n is None else self.n):
            raise RequestError(
                "'best_of' is supported only when it equals 'n'", param="best_of", code="unsupported_parameter"
            )

    def stream_settings(self) -> StreamOptions:
        """The stream options with their defaults. Raises RequestError for options that need, or exclude, a stream."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("'stream_options' needs stream=true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("'prompt_logprobs' cannot be streamed", param="prompt_logprobs")
        return self.stream_options or StreamOptions()


class CompletionBody(ChoicesBody):
    """Body of /v1/completions. ``parse_special``, ``add_special_tokens``: how text is read; see
    ``Tokenizer.prompt_ids``."""

    prompt: Prompts
    parse_special: bool | None = None
    add_special_tokens: bool | None = None
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None


class ScalingBudget(Part):
    """Upper bounds for ``scaling.ledger.Budget``; a missing one means the server's ceiling."""

    tokens: int | None = Field(None, gt=0)
    generated: int | None = Field(None, gt=0)
    calls: int | None = Field(None, gt=0)


class Scaling(Part):
    """Test-time scaling for one answer.

    ``strategy``: as in ``kvasir solve``, for example ``majority:n=8``. ``answer``: the part in which two replies that
    agree are equal: the text after their last "Answer:" (marked), their last line, or the whole text.
    """

    strategy: str = Field(max_length=400)
    answer: Literal["marked", "last_line", "text"] = "marked"
    budget: ScalingBudget | None = None


class ChatBody(ChoicesBody):
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    return_drafters: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | Object | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[Object] | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Object | None = None
    add_special_tokens: Literal[False] | None = None  # the chat template writes them
    scaling: Scaling | None = None

    def check(self) -> None:
        super().check()
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "'continue_final_message' continues the last message, 'add_generation_prompt' begins another one; "
                "send one of them",
                param="continue_final_message",
                code="conflict",
            )
