"""The bodies that the routes read, with OpenAI's names and vLLM's extras. Types only; admission checks ranges.

A parameter is either honoured, listed in ``METADATA`` (it changes nothing by definition), ignored with a warning
(``FOREIGN``), accepted at its one supported value (``ONLY``), or refused by name. Numbers are strict: booleans and
floats are not integers, and NaN is refused.
"""

from __future__ import annotations

import functools
import logging
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from kvasir.errors import RequestError, nearest

MAX_MESSAGES = 4096
MAX_PROMPTS = 128
MAX_RUN_PROBLEMS = 256

# Parameters that say who asks and what for, but not what to compute.
METADATA = {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier"}
# Parameters of other services that a model's answer does not need: they are ignored, with one warning a name.
FOREIGN = {"store", "prediction", "web_search_options", "vllm_xargs"}
# Most names that are told about, so that a client cannot fill the log.
MAX_TOLD = 200
log = logging.getLogger(__name__)
# Parameters with their only supported values, most of which switch a feature off: clients send whole objects.
ONLY: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "background": (False,),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
    "functions": ([],),
    "function_call": ("none",),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "num_beams": (1,),
    "best_of": (1,),
    "n": (1,),
    "echo": (False,),
    "typical_p": (1, 1.0),
    "tfs_z": (1, 1.0),
    "top_a": (0, 0.0),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "no_repeat_ngram_size": (0,),
    "spaces_between_special_tokens": (True,),
    "continue_final_message": (False,),
    "include_reasoning": (True,),
    "return_tokens_as_token_ids": (False,),
}
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def _strings(value: Any) -> Any:
    """Turn a string or a list of strings into a list."""
    if isinstance(value, str):
        return [value]
    if value is None or (isinstance(value, list) and all(isinstance(v, str) for v in value)):
        return value
    raise PydanticCustomError("strings", "must be a string or a list of strings")


def prompts(value: Any, most: int = MAX_PROMPTS) -> Any:
    """Turn every form of ``prompt`` into a list of at most ``most`` prompts, which are all strings or all lists of
    ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise PydanticCustomError(
            "prompt", "must be a non-empty string, list of strings, list of token ids, or list of those lists"
        )
    if all(type(v) is int for v in value):
        return [value]
    texts, ids = (all(isinstance(v, kind) for v in value) for kind in (str, list))
    if not texts and not (ids and all(type(i) is int for v in value for i in v)):
        raise PydanticCustomError("prompt", "must not mix strings and token ids; ids are integers")
    if len(value) > most:
        raise PydanticCustomError("prompt", f"holds {len(value)} prompts; at most {most} fit in a request")
    return value


def _bias(value: Any) -> Any:
    """Turn the string keys of JSON into token ids: ``{"123": -1.5}``.
    Keys are plain decimal, without sign or spaces."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise PydanticCustomError("logit_bias", "must be an object of token id: bias")
    if bad := next((k for k in value if not (k.isascii() and k.isdecimal() and len(k) < 12)), None):
        raise PydanticCustomError("logit_bias", "has a key that is no token id: {key}", {"key": repr(bad[:40])})
    return {int(k): v for k, v in value.items()}


STRINGS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
IDS = {"type": "array", "items": {"type": "integer"}}
PROMPT = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, IDS, {"type": "array", "items": IDS}]
}
Strings = Annotated[list[str] | None, BeforeValidator(_strings), WithJsonSchema(STRINGS)]
Prompts = Annotated[list[Any], BeforeValidator(prompts), WithJsonSchema(PROMPT)]
BIAS = {"type": ["object", "null"], "additionalProperties": {"type": "number"}}
Bias = Annotated[dict[int, float] | None, BeforeValidator(_bias), WithJsonSchema(BIAS)]
Object = dict[str, Any]

# Schemas for the OpenAPI document. The values are checked by hand where they are used, which gives better messages.
_NAME = {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,128}$"}
_CALL = {
    "type": "object",
    "required": ["id", "type", "function"],
    "additionalProperties": False,
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}},
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
            ["content"],
            tool_calls={"type": "array", "items": _CALL},
            reasoning_content={"type": "string"},
        ),
        _message(["tool"], ["content", "tool_call_id"], tool_call_id={"type": "string", "minLength": 1}),
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


class Body(BaseModel):
    """Base class of all bodies. Unknown names go to ``model_extra``, so that they can be refused by name."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())
    model: str | None = None

    def check(self) -> None:
        """Check rules that bind several parameters. Raises RequestError."""


class Part(BaseModel):
    """Base class of nested objects, in which an unknown name is an error at once."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        """Drop nulls, also under unknown names: clients send whole objects, as they do with the body itself."""
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


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


class StructuredOutputs(Part):
    """Form of vLLM's constraint, with one of the first five fields. ``json`` is a schema, as object or text;
    ``grammar`` is Lark, EBNF or GBNF. ``whitespace`` between the tokens of JSON, of ``response_format`` too:
    ``fixed`` (default, vLLM's ``disable_any_whitespace``), ``short`` or ``any``. ``strict`` false leaves
    out what no grammar can express of a schema."""

    json_: Object | bool | str | None = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    whitespace: Literal["short", "any", "fixed"] | None = None
    disable_any_whitespace: bool | None = None
    strict: bool | None = None


class SamplingBody(Body):
    """The parameters that all three generation routes share. None means "the server's default"."""

    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    request_id: str | None = None
    cache_salt: str | None = Field(None, min_length=1)
    truncate_prompt_tokens: int | None = None
    min_tokens: int | None = None
    num_draft_tokens: int | None = None
    drafter: str | None = None
    thinking_token_budget: int | None = None
    processors: list[str] | None = None
    hook: str | None = None
    hook_strength: float | None = None
    learn: bool | None = None
    stop: Strings = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: Bias = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logprobs_mode: Literal["raw", "processed"] | None = None
    priority: int | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Object | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


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


class RunProblem(Part):
    """One problem of a run. Without an id, its place is its id."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    id: str | None = Field(None, pattern=r"^[A-Za-z0-9._-]{1,64}$")


class RunBody(Body):
    """A strategy on many problems, in the background. ``budget`` bounds the run, ``problem_budget`` each problem."""

    strategy: str = Field(max_length=400)
    problems: list[RunProblem] = Field(min_length=1, max_length=MAX_RUN_PROBLEMS)
    answer: Literal["marked", "last_line", "text"] = "marked"
    seed: int | None = None
    max_tokens: int | None = Field(None, gt=0)
    temperature: float | None = Field(None, ge=0, le=10)
    budget: ScalingBudget | None = None
    problem_budget: ScalingBudget | None = None


class LoadAdapterBody(Body):
    """Body of /v1/load_lora_adapter."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str = Field(min_length=1, max_length=4096)


class UnloadAdapterBody(Body):
    """Body of /v1/unload_lora_adapter. vLLM's clients may send the adapter's number, which means nothing here."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_int_id: int | None = None


class TokenizeBody(Body):
    """Body of /tokenize, with either ``prompt`` or ``messages``."""

    prompt: str | None = None
    parse_special: bool | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    tools: list[Object] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: Object | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    tokens: list[int]


B = TypeVar("B", bound=Body)


def parse(kind: type[B], value: Object, lenient: bool = False) -> tuple[B, list[str]]:
    """Parse a body; return it with the names that ``lenient`` ignored.
    Raises RequestError 400 that names the parameter."""
    try:
        body = kind.model_validate(value)
    except pydantic.ValidationError as e:
        raise _request_error(e) from e
    body.check()
    return body, _unknown(kind, body.model_extra or {}, lenient)


def _unknown(kind: type[Body], extra: Object, lenient: bool) -> list[str]:
    ignored = []
    for name, value in extra.items():
        if value is None or name in METADATA or any(type(value) is type(v) and value == v for v in ONLY.get(name, ())):
            continue
        if name in FOREIGN and value is False:
            continue
        if name in FOREIGN:
            tell_ignored(name)
            ignored.append(name)
        elif lenient:
            ignored.append(name)
        elif name in ONLY:
            raise RequestError(
                f"'{name}' is supported only as {' or '.join(repr(v) for v in ONLY[name])}",
                param=name,
                code="unsupported_parameter",
            )
        else:
            known = [*kind.model_fields, *METADATA]
            raise RequestError(
                f"the parameter '{name[:80]}' is not supported.{nearest(name[:80], known)}",
                param=name[:80],
                code="unsupported_parameter",
            )
    return ignored


@functools.cache
def _tell(name: str) -> None:
    log.warning("%s is ignored: it changes nothing here", name)


def tell_ignored(name: str) -> None:
    """Log that a client's field is ignored: once a name in this process, escaped, and at most MAX_TOLD names."""
    if _tell.cache_info().currsize < MAX_TOLD:
        _tell(ascii(name[:80]))


def _request_error(error: pydantic.ValidationError) -> RequestError:
    """The first error, with a path as people write it: ``stream_options.include_usage``, ``messages[3]``."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = [f"[{part}]" if isinstance(part, int) else str(part) for part in first["loc"]]
    # Branches of a union end the path with the name of a type, which is not part of the body.
    while len(path) > 1 and (path[-1] in _UNION_TAGS or path[-1].endswith((")", "]")) and path[-1][0] != "["):
        path.pop()
    param = ".".join(path).replace(".[", "[") or None
    missing = first["type"] == "missing"
    message = f"'{param}' is required" if missing else f"'{param}': {first['msg']}"
    return RequestError(message, param=param, code="missing_parameter" if missing else "invalid_parameter")


_UNION_TAGS = {"str", "bool", "int", "float", "literal", "dict", "list"}
