"""The body of /v1/responses; see ``protocol``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from kvasir.api.protocol import Effort, Object, Part, SamplingBody
from kvasir.errors import RequestError


class TextFormat(Part):
    type: Literal["text", "json_object", "json_schema"]
    name: str = "schema"
    description: str | None = None
    schema_: Any = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Part):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Part):
    """``summary``: reasoning comes as it is, which "auto" allows."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class ObfuscationOptions(Part):
    include_obfuscation: Literal[False] | None = None


LOGPROBS = "message.output_text.logprobs"


def check_include(names: list[str]) -> None:
    """Check what a request for a response wants included. Raises RequestError."""
    for i, name in enumerate(names):
        if name != LOGPROBS:
            why = (
                "reasoning is not encrypted here: send its items back as they came, or use previous_response_id"
                if name == "reasoning.encrypted_content"
                else f"served is '{LOGPROBS}'"
            )
            raise RequestError(
                f"include: '{name[:80]}' is not supported; {why}", param=f"include[{i}]", code="unsupported_parameter"
            )


class ResponsesBody(SamplingBody):
    """Body of /v1/responses. ``store`` is true by default, as at OpenAI."""

    input: str | list[Object]
    instructions: str | None = None
    max_output_tokens: int | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    metadata: Object | None = None
    stream_options: ObfuscationOptions | None = None
    tools: list[Object] | None = None
    tool_choice: Literal["none", "auto", "required"] | Object | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Object | None = None

    def check(self) -> None:
        check_include(self.include or [])
        if self.top_logprobs is not None and not self.include:
            raise RequestError(f"'top_logprobs' needs include=['{LOGPROBS}']", param="top_logprobs")
        if self.background and self.store is False:
            raise RequestError(
                "'background' needs store=true: the response is fetched later", param="store", code="conflict"
            )
