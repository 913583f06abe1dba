"""The bodies of /v1/messages and /v1/messages/count_tokens, with Anthropic's names. Types only, as in ``protocol``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from kvasir.api.http.body import Body, Object, Part, SamplingBody
from kvasir.api.protocols.openai import MAX_MESSAGES

# Schemas for the OpenAPI document; ``messages`` checks the values by hand, which gives better messages.
_TEXT_BLOCK = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}, "cache_control": {"type": "object"}},
}
_TEXT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_BLOCK}]}
_USER_BLOCKS = [
    _TEXT_BLOCK,
    {
        "type": "object",
        "required": ["type", "tool_use_id"],
        "properties": {
            "type": {"const": "tool_result"},
            "tool_use_id": {"type": "string", "minLength": 1},
            "content": _TEXT,
            "is_error": {"type": "boolean"},
        },
    },
]
_ASSISTANT_BLOCKS = [
    _TEXT_BLOCK,
    {
        "type": "object",
        "required": ["type", "thinking"],
        "properties": {
            "type": {"const": "thinking"},
            "thinking": {"type": "string"},
            "signature": {"type": "string"},
        },
    },
    {
        "type": "object",
        "required": ["type", "id", "name", "input"],
        "properties": {
            "type": {"const": "tool_use"},
            "id": {"type": "string", "minLength": 1},
            "name": {"type": "string", "minLength": 1},
            "input": {"type": "object"},
        },
    },
]


def _turn(role: str, blocks: list[dict[str, Any]]) -> dict[str, Any]:
    content = {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": {"anyOf": blocks}}]}
    return {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"const": role}, "content": content},
    }


TURN = {"anyOf": [_turn("user", _USER_BLOCKS), _turn("assistant", _ASSISTANT_BLOCKS)]}
TOOL = {
    "type": "object",
    "required": ["name", "input_schema"],
    "additionalProperties": False,
    "properties": {
        "type": {"const": "custom"},
        "name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,128}$"},
        "description": {"type": "string"},
        "input_schema": {"type": "object", "properties": {"type": {"const": "object"}}},
        "cache_control": {"type": "object"},
        "strict": {"type": "boolean"},
    },
}
Turn = Annotated[Object, WithJsonSchema(TURN)]
Tool = Annotated[Object, WithJsonSchema(TOOL)]


class ToolChoice(Part):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Part):
    """``budget_tokens`` is accepted with a warning: the model decides how long it thinks."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, gt=0)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Part):
    type: Literal["json_schema"]
    schema_: Any = Field(None, alias="schema")


class OutputConfig(Part):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Conversation(Body):
    """The part of both bodies that makes the prompt.

    The names of the second block say who asks, or tune a cache and a service that are Anthropic's own.
    ``output_format``: the older name of ``output_config.format``.
    """

    messages: list[Turn] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: Annotated[str | list[Object] | None, WithJsonSchema(_TEXT)] = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    chat_template_kwargs: Object | None = None

    cache_control: Object | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    speed: Literal["standard"] | None = None
    inference_geo: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    context_management: Object | None = None
    diagnostics: Object | None = None
    container: Object | str | None = None
    mcp_servers: list[Object] | None = None
    betas: list[str] | None = None
    anthropic_beta: list[str] | str | None = None
    anthropic_version: str | None = None


class CountTokensBody(Conversation):
    """Body of /v1/messages/count_tokens."""


class MessagesBody(Conversation, SamplingBody):
    """Body of /v1/messages: Anthropic's parameters, and the sampling parameters of the other routes."""

    max_tokens: int
    stop_sequences: list[str] | None = None
