"""Translation of a body to SamplingParams: the client's values, then the model's defaults, then ours; one grammar at
most."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvasir.api.http.body import SamplingBody, StructuredOutputs
from kvasir.api.http.limits import check_shape
from kvasir.decoding.json_schema import served_schema
from kvasir.errors import RequestError
from kvasir.types import Grammar, ModelInfo, SamplingParams

SHARED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "logprobs_mode",
    "n",
    "prompt_logprobs",
    "num_draft_tokens",
    "drafter",
    "thinking_token_budget",
    "processors",
    "hook",
    "hook_strength",
    "learn",
    "kv_policy",
)
# A rule of EBNF, as vLLM and llama.cpp write it; Lark has a colon.
EBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
# Parameters that a model's generation config may set.
DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_params(body: SamplingBody, defaults: Mapping[str, Any], **fixed: Any) -> SamplingParams:
    """The sampling parameters of a body. Admission checks their ranges.

    ``fixed``: parameters whose names or meaning differ by route (max_tokens, logprobs, grammar). Raises RequestError
    for values that SamplingParams cannot hold.
    """
    values = {name: defaults[name] for name in DEFAULTED if defaults.get(name) is not None}
    values |= {name: value for name in SHARED if (value := getattr(body, name, None)) is not None}
    return SamplingParams(**{**values, **fixed})


def truncated(ids: Sequence[int], count: int | None, max_tokens: int | None, info: ModelInfo) -> list[int]:
    """The last ``count`` ids of a prompt: vLLM's ``truncate_prompt_tokens``.

    -1: as many as leave room for ``max_tokens`` (None: for one token) in the context. Raises RequestError.
    """
    if count is None:
        return list(ids)
    if count != -1 and not 1 <= count <= info.max_model_len:
        raise RequestError(
            f"'truncate_prompt_tokens' must be 1 to {info.max_model_len}, the context, or -1 for what fits",
            param="truncate_prompt_tokens",
        )
    if count == -1:
        room = min(info.max_model_len, info.kv_capacity_tokens or info.max_model_len)
        count = max(1, room - max(1, max_tokens or 1))
    return list(ids[-count:])


def schema_grammar(schema: Any, param: str, dropped: list[str] | None = None) -> Grammar:
    """The grammar of a JSON schema, given as an object or as JSON text. Raises RequestError that names ``param``.

    ``dropped``: collects the paths of keywords that no grammar can express; None refuses them."""
    if isinstance(schema, str):
        try:
            check_shape(schema.encode())
            schema = json.loads(schema)
        except RequestError as e:
            e.param, e.message = param, e.message.replace("the body", f"'{param}'", 1)
            raise
        except (ValueError, RecursionError) as e:
            raise RequestError(f"'{param}' is not valid JSON: {e}", param=param, code="invalid_schema") from e
    if not isinstance(schema, dict | bool):
        raise RequestError(
            f"'{param}' must be a JSON schema: an object or a boolean", param=param, code="invalid_schema"
        )
    found: list[str] | None = None if dropped is None else []
    schema = served_schema(schema, param, found)
    if found:
        dropped += [f"{param}{path.removeprefix('#')}" for path in found]
    return Grammar("json_schema", msgspec.json.encode(schema).decode())


def format_grammar(response_format: Any, param: str, dropped: list[str] | None = None) -> Grammar | None:
    """The grammar for OpenAI's ``response_format``, or for ``text.format`` of
    the responses API, which is one level flatter. ``dropped``: collects what ``strict: false`` leaves out."""
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return Grammar("json_object")
    holder = getattr(response_format, "json_schema", response_format)
    if holder is None or holder.schema_ is None:
        raise RequestError(f"'{param}' of type json_schema needs a schema", param=param, code="missing_parameter")
    return schema_grammar(holder.schema_, param, dropped if getattr(holder, "strict", None) is False else None)


def grammar_of(
    body: SamplingBody, extra: dict[str, Grammar | None], dropped: list[str] | None = None
) -> tuple[str, Grammar | None]:
    """The one grammar of a request, and the parameter that its errors name. ``extra``: grammars of other fields, by
    parameter. ``dropped``: collects what ``strict: false`` leaves out of schemas.

    Raises RequestError when two are given, because we cannot know which of them should win.
    """
    wanted = {name: grammar for name, grammar in extra.items() if grammar is not None}
    structured = body.structured_outputs or StructuredOutputs()
    for prefix, value in (("guided_json", body.guided_json), ("structured_outputs.json", structured.json_)):
        if value is not None:
            wanted[prefix] = schema_grammar(value, prefix, dropped if structured.strict is False else None)
    for kind, names in {
        "regex": ("guided_regex", "regex"),
        "grammar": ("guided_grammar", "grammar"),
        "choice": ("guided_choice", "choice"),
    }.items():
        for param, value in (
            (names[0], getattr(body, names[0])),
            (f"structured_outputs.{names[1]}", getattr(structured, names[1])),
        ):
            if value is not None:
                text = value if isinstance(value, str) else json.dumps(value)
                wanted[param] = Grammar(kind if kind != "grammar" else "ebnf" if EBNF.search(text) else "lark", text)
    if structured.json_object:
        wanted["structured_outputs.json_object"] = Grammar("json_object")
    if len(wanted) > 1:
        raise RequestError(
            f"only one constraint can hold at a time, got {', '.join(wanted)}", param=list(wanted)[1], code="conflict"
        )
    name, grammar = next(iter(wanted.items()), ("grammar", None))
    return ("tools" if name == "tool_choice" else name), grammar  # the grammar of a forced call is made from the tools


def whitespace_of(body: SamplingBody) -> str:
    """``Grammar.whitespace`` that a body asks for. Raises RequestError when its two names for it differ."""
    structured = body.structured_outputs or StructuredOutputs()
    fixed = structured.disable_any_whitespace
    if fixed and structured.whitespace not in (None, "fixed"):
        raise RequestError(
            "'whitespace' and 'disable_any_whitespace' differ; send one of them",
            param="structured_outputs.whitespace",
            code="conflict",
        )
    return structured.whitespace or ("short" if fixed is False else "fixed")
