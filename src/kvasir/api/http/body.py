"""Reads the bodies of requests, and has the parameters that all generation routes share, with OpenAI's names and vLLM's
extras. Types only; admission checks ranges.

A parameter is either honoured, listed in ``METADATA`` (it changes nothing by definition), ignored with a warning
(``FOREIGN``), accepted at its one supported value (``ONLY``), or refused by name. Numbers are strict: booleans and
floats are not integers, and NaN is refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from kvasir.api.text.ignored import ignore
from kvasir.errors import RequestError, nearest

MAX_PROMPTS = 128
# Parameters that say who asks and what for, but not what to compute.
METADATA = {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier"}
# Parameters of other services that a model's answer does not need: they are ignored, with one warning a name.
FOREIGN = {
    *("store", "prediction", "web_search_options", "vllm_xargs", "verbosity", "moderation"),
    # Gateways: where the request goes and what is reported of it. Other servers: which library checks a grammar, and
    # which slot or cache serves the request.
    *("provider", "route", "session_id", "usage", "cache_control", "litellm_metadata"),
    *("guided_decoding_backend", "cache_prompt", "id_slot", "keep_alive"),
}
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
    "detokenize": (True,),
    "continue_final_message": (False,),
    "include_reasoning": (True,),
    "return_tokens_as_token_ids": (False,),
}
# Fields of other services, each with the advice what to send here.
_SWITCH = " Send reasoning_effort, or chat_template_kwargs with the switch of the model's template."
INSTEAD = {
    **dict.fromkeys(("thinking", "reasoning", "enable_thinking"), _SWITCH),
    "thinking_budget": " Send thinking_token_budget.",
    "extra_body": " Its fields belong into the body itself: only an SDK takes extra_body.",
    "options": " Its fields belong into the body itself, under OpenAI's names.",
    "format": " Send response_format.",
    "n_predict": " Send max_tokens.",
    "random_seed": " Send seed.",
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
    kv_policy: str | None = Field(None, max_length=200)
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
            ignore(name, ignored)
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
                f"the parameter '{name[:80]}' is not supported.{INSTEAD.get(name) or nearest(name[:80], known)}",
                param=name[:80],
                code="unsupported_parameter",
            )
    return ignored


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
