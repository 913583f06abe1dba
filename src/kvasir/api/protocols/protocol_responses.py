"""The body of /v1/responses; see ``protocol``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from kvasir.api.http.body import Effort, Object, Part, SamplingBody
from kvasir.errors import RequestError


class TextFormat(Part):
    type: Literal["text", "json_object", "json_schema"]
    name: str = "schema"
    description: str | None = None
    schema_: Any = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Part):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Part):
    """``summary``: reasoning comes as it is, which "auto" allows; for other words the client is told."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


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
    conversation: Any = None
    truncation: Literal["auto", "disabled"] | None = None
    max_tool_calls: int | None = Field(None, ge=0)
    background: bool | None = None
    metadata: Object | None = None
    stream_options: ObfuscationOptions | None = None
    tools: list[Object] | None = None
    tool_choice: Literal["none", "auto", "required"] | Object | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Object | None = None

    def check(self) -> None:
        check_include(self.include or [])
        if self.conversation is not None:
            raise RequestError(
                "'conversation' is not supported: this server keeps responses and no conversations. Send the id of the "
                "last response as 'previous_response_id', or the whole conversation as 'input'",
                param="conversation",
                code="unsupported_parameter",
            )
        if self.top_logprobs is not None and not self.include:
            raise RequestError(f"'top_logprobs' needs include=['{LOGPROBS}']", param="top_logprobs")
        if self.background and self.store is False:
            raise RequestError(
                "'background' needs store=true: the response is fetched later", param="store", code="conflict"
            )

    def without_effect(self) -> Iterator[str]:
        """Yield the names of fields that are set and change nothing here. The tools of a provider, whose calls
        ``max_tool_calls`` counts, are not run."""
        if self.text is not None and self.text.verbosity in ("low", "high"):
            yield "text.verbosity"
        if self.max_tool_calls is not None:
            yield "max_tool_calls"
        for name in ("summary", "generate_summary"):
            if self.reasoning is not None and getattr(self.reasoning, name) in ("concise", "detailed"):
                yield f"reasoning.{name}"
