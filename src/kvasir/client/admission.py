"""The one validator: every front end turns what a user sent into a ``Request`` here, or into a ``RequestError`` that
names the parameter. An admitted request is safe for the engine: types, ranges and sizes are checked, defaults are
resolved.

Rules that users meet: a prompt leaves room for at least one token; a prompt plus an explicit ``max_tokens`` beyond the
context is refused and not clipped (vLLM does the same); ``max_tokens=None`` means the rest of the context; booleans are
not numbers; a seed is any 64-bit integer, signed or not, taken modulo 2^64; a ``top_k`` above the vocabulary is
clipped.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from kvasir.errors import RequestError, nearest
from kvasir.types import U64, Grammar, ModelInfo, PoolingParams, ProcessorParams, Request, SamplingParams, Variant

# Limits on one request. They bound what a client can make this process and the engine store or compute.
MAX_N = 256
MAX_LEASE_SECONDS = 600.0
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 128
MAX_BIASED_IDS = 4096
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_BAD_WORD_TOKENS = 64
MAX_GRAMMAR_BYTES = 64 << 10
MAX_END_MARK_IDS = 64
MAX_PROCESSORS = 4
MAX_SPEC_CHARS = 512
MAX_HOOK_STRENGTH = 8.0
MAX_KV_POLICY = 200  # characters
I64 = (1 << 63) - 1


def admit(
    prompt_ids: list[int],
    params: SamplingParams,
    info: ModelInfo,
    *,
    id: str,
    arrival: float,
    tenant: str = "",
    priority: int = 0,
    encode: Callable[[str], list[int]] | None = None,
    adapter: str | None = None,
    processing: Callable[[SamplingParams, list[int]], list[ProcessorParams]] | None = None,
    most: int = 0,
) -> Request:
    """Check every parameter and build the request.

    ``arrival``: ``time.monotonic()`` seconds. ``encode``: text to token ids without special tokens; only ``bad_words``
    need it. ``adapter``: name of the adapter that computes it; None: the base model. ``processing``: prepares the logit
    processors of the request with this prompt; None: there may be none. ``most``: largest ``max_tokens``, to which
    larger ones are cut; 0: the context alone bounds it. Raises RequestError that names the parameter: status 400, or
    404 for an adapter that is not loaded.
    """
    check_task(info, "generate")
    ids_end = info.tokenizer_size or info.vocab_size
    _check_prompt(prompt_ids, info, ids_end)
    params = _checked(params, ids_end)
    if params.score_from is not None:
        _integer("score_from", params.score_from, 1, len(prompt_ids) - 1)
    if params.drafter is not None and params.drafter not in info.drafters:
        running = f"these do: {', '.join(info.drafters)}" if info.drafters else "this server runs none"
        _refuse("drafter", f"no drafter named {params.drafter!r} runs here; {running}")
    processors = _processors(params, prompt_ids, processing, ids_end)
    if most and params.max_tokens is not None:
        params = dataclasses.replace(params, max_tokens=min(params.max_tokens, most))
    max_tokens = _max_tokens(len(prompt_ids), params, info)
    max_tokens = min(max_tokens, most or max_tokens)
    if params.min_tokens > max_tokens:
        limit = f", this server's limit of an answer for this key is {most}" if max_tokens == most else ""
        _refuse("min_tokens", f"min_tokens={params.min_tokens} is greater than max_tokens={max_tokens}{limit}")
    return Request(
        id=id,
        prompt_ids=list(prompt_ids),
        params=params,
        seed=stream_of(params.seed),
        max_tokens=max_tokens,
        priority=_integer("priority", priority, -I64, I64),
        arrival=arrival,
        tenant=tenant,
        bad_words=_encode_bad_words(params.bad_words, encode, ids_end),
        variant=None if adapter is None else _variant(adapter, info),
        hook=_hook(params, len(prompt_ids), info),
        processors=processors,
    )


def _processors(
    params: SamplingParams,
    prompt_ids: list[int],
    processing: Callable[[SamplingParams, list[int]], list[ProcessorParams]] | None,
    ids_end: int,
) -> list[ProcessorParams]:
    if params.thinking_token_budget is None and not params.processors:
        return []
    if processing is None:
        name = "processors" if params.processors else "thinking_token_budget"
        _refuse(name, f"'{name}' is not served here; /v1 and LLM(...) serve it")
    processors = processing(params, prompt_ids)
    for one in processors:
        for ids in one.ids.values():
            _check_ids("processors", ids, ids_end)
    return processors


def _variant(adapter: str, info: ModelInfo) -> Variant:
    """The variant of a loaded adapter: its content as it is now, for all of the request's life."""
    found = info.adapters.get(adapter)
    if found is None:
        message = f"no adapter '{adapter[:200]}' is loaded; loaded are {', '.join(sorted(info.adapters)) or 'none'}"
        raise RequestError(message, status=404, param="model", code="model_not_found")
    return Variant(found.name, found.key)


def _hook(params: SamplingParams, num_prompt: int, info: ModelInfo) -> Variant | None:
    """The set of hooks as it is now, for all of the request's life; None at strength 0."""
    if params.hook is None:
        return None
    if not _is_text(params.hook, MAX_SPEC_CHARS):
        _refuse("hook", f"hook must be the name of a set of hooks, not {_shown(params.hook)}")
    found = info.hooks.get(params.hook)
    if found is None:
        served = ", ".join(sorted(info.hooks)) or "none"
        message = f"no hooks '{params.hook[:200]}' are served; there are {served}.{nearest(params.hook, info.hooks)}"
        raise RequestError(message, status=404, param="hook", code="hook_not_found")
    if not params.hook_strength:
        return None
    start = num_prompt - 1 if found.answers else 0
    return Variant(found.name, found.key, start, found.changes_kv, params.hook_strength)


def admit_pooling(
    prompt_ids: list[int],
    params: PoolingParams,
    info: ModelInfo,
    *,
    id: str,
    arrival: float,
    tenant: str = "",
    priority: int = 0,
) -> Request:
    """Check the parameters of an embedding or a score, and build the request. Its prompt may fill the whole context.
    Raises RequestError (status 400) that names the parameter."""
    if not isinstance(params, PoolingParams):
        _refuse("pooling_params", f"expected PoolingParams(...), got {type(params).__name__}")
    if info.pooling is None:
        check_task(info, "embed")
    pooling = info.pooling
    _check_prompt(prompt_ids, info, info.tokenizer_size or info.vocab_size, spare=0)
    if params.dimensions is not None:
        if pooling.task != "embed":
            _refuse("dimensions", "a score has no dimensions")
        _integer("dimensions", params.dimensions, 1, pooling.width)
    if params.use_activation is not None and not isinstance(params.use_activation, bool):
        _refuse("use_activation", f"use_activation must be true or false, not {_shown(params.use_activation)}")
    return Request(
        id=id,
        prompt_ids=list(prompt_ids),
        params=SamplingParams(max_tokens=1, temperature=0.0),
        seed=0,
        max_tokens=1,
        priority=_integer("priority", priority, -I64, I64),
        arrival=arrival,
        tenant=tenant,
        pooling=dataclasses.replace(params, rows=pooling.rows),
    )


# Each kind of model as messages name it, and the routes of its requests.
_TASKS = {
    "generate": ("generates text", "/v1/chat/completions and /v1/completions"),
    "embed": ("is an embedding model", "/v1/embeddings, /v1/score and /v1/rerank"),
    "score": ("is a reranker", "/v1/score and /v1/rerank"),
}
_CURES = {
    "generate": "For text, start a server with a model that generates.",
    "embed": "For embeddings, start a server with an embedding checkpoint, or with --task embed to use the last hidden "
    "state of this one.",
    "score": "For scores, start a server with a reranker or an embedding checkpoint.",
}


def check_task(info: ModelInfo, task: str) -> None:
    """Raise RequestError (400) unless the served model does ``task``: generate, embed or score. An embedding model
    scores, too: by the cosine of two texts."""
    served = "generate" if info.pooling is None else info.pooling.task
    if task == served or (task, served) == ("score", "embed"):
        return
    kind, routes = _TASKS[served]
    _refuse("model", f"the model '{info.name}' {kind}; it serves {routes}. {_CURES[task]}", code="unsupported_task")


# -------------------------------------------------------------------------------------------------- prompt and lengths


def _check_prompt(prompt_ids: list[int], info: ModelInfo, ids_end: int, spare: int = 1) -> None:
    """Raise RequestError for a prompt that is no list of known ids, or leaves no room for ``spare`` tokens."""
    if not isinstance(prompt_ids, (list, tuple)):
        _refuse("prompt", f"token ids must be a list, not {type(prompt_ids).__name__}")
    if not prompt_ids:
        _refuse("prompt", "the prompt is empty")
    _check_ids("prompt", prompt_ids, ids_end)
    room = info.max_model_len - spare
    if len(prompt_ids) > room:
        _refuse(
            "prompt",
            f"the prompt has {len(prompt_ids)} tokens; a context of {info.max_model_len} allows at most {room}",
            code="context_length_exceeded",
        )
    if info.kv_capacity_tokens and len(prompt_ids) + spare > info.kv_capacity_tokens:
        _refuse(
            "prompt",
            f"the prompt has {len(prompt_ids)} tokens; the cache of this server holds {info.kv_capacity_tokens}",
            code="context_length_exceeded",
        )


def _max_tokens(num_prompt: int, params: SamplingParams, info: ModelInfo) -> int:
    """The request's ``max_tokens``; by default, what the context and the cache leave after the prompt."""
    limits = [(info.max_model_len, "the model's context")]
    if info.kv_capacity_tokens:
        limits.append((info.kv_capacity_tokens, "this server's cache"))
    if params.max_tokens is None:
        return min(limit for limit, _ in limits) - num_prompt
    for limit, what in limits:
        if num_prompt + params.max_tokens > limit:
            _refuse(
                "max_tokens",
                f"{num_prompt} prompt tokens and max_tokens={params.max_tokens} make {num_prompt + params.max_tokens}, "
                f"more than {what} of {limit} tokens",
                code="context_length_exceeded",
            )
    return params.max_tokens


def stream_of(seed: int | None) -> int:
    """The noise stream (unsigned 64 bits) of a seed, or a random one for None. Raises RequestError."""
    if seed is None:
        return int.from_bytes(os.urandom(8), "little")
    return _integer("seed", seed, -I64 - 1, U64) & U64


# ------------------------------------------------------------------------------------------------------- the parameters


def _checked(p: SamplingParams, ids_end: int) -> SamplingParams:
    """Return the parameters, each with its proper type and in range. Raises RequestError."""
    if not isinstance(p, SamplingParams):
        _refuse("params", f"expected SamplingParams(...), got {type(p).__name__}")
    for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
        if not isinstance(getattr(p, name), bool):
            _refuse(name, f"{name} must be true or false, not {getattr(p, name)!r}")
    if p.logprobs_mode not in ("raw", "processed"):
        _refuse("logprobs_mode", f"logprobs_mode={p.logprobs_mode!r} is neither 'raw' nor 'processed'")
    _check_grammar(p.grammar)
    _check_stops(p)
    _check_confidence(p)
    _check_kv_policy(p)
    _check_processors(p)
    top_k = _integer("top_k", p.top_k, -1, I64)
    return dataclasses.replace(
        p,
        n=_integer("n", p.n, 1, MAX_N),
        finish_after=None if p.finish_after is None else _integer("finish_after", p.finish_after, 1, p.n),
        lease=_number("lease", p.lease, 0.0, MAX_LEASE_SECONDS),
        temperature=_number("temperature", p.temperature, 0.0, 10.0),
        top_k=0 if top_k == -1 else min(top_k, ids_end),
        top_p=_number("top_p", p.top_p, 0.0, 1.0, open_low=True),
        min_p=_number("min_p", p.min_p, 0.0, 1.0),
        presence_penalty=_number("presence_penalty", p.presence_penalty, -2.0, 2.0),
        frequency_penalty=_number("frequency_penalty", p.frequency_penalty, -2.0, 2.0),
        repetition_penalty=_number("repetition_penalty", p.repetition_penalty, 0.0, 10.0, open_low=True),
        max_tokens=None if p.max_tokens is None else _integer("max_tokens", p.max_tokens, 1, I64),
        min_tokens=_integer("min_tokens", p.min_tokens, 0, I64),
        stop_token_ids=_ids("stop_token_ids", p.stop_token_ids, ids_end, MAX_STOP_IDS),
        logprobs=(0 if p.confidence else None)
        if p.logprobs is None
        else _integer("logprobs", p.logprobs, 0, MAX_LOGPROBS),
        prompt_logprobs=None
        if p.prompt_logprobs is None
        else _integer("prompt_logprobs", p.prompt_logprobs, 0, MAX_LOGPROBS),
        num_draft_tokens=None
        if p.num_draft_tokens is None
        else _integer("num_draft_tokens", p.num_draft_tokens, 0, I64),
        hook_strength=_number("hook_strength", p.hook_strength, 0.0, MAX_HOOK_STRENGTH),
        logit_bias=_bias(p.logit_bias, ids_end),
        allowed_token_ids=_allowed(p.allowed_token_ids, ids_end),
    )


def _check_kv_policy(p: SamplingParams) -> None:
    """The engine knows which policies there are, and what of them may change."""
    if p.kv_policy is not None and not (isinstance(p.kv_policy, str) and len(p.kv_policy) <= MAX_KV_POLICY):
        _refuse(
            "kv_policy", f"kv_policy is a text of at most {MAX_KV_POLICY} characters, such as 'off' or 'budget=512'"
        )


def _check_confidence(p: SamplingParams) -> None:
    if _integer("confidence", p.confidence, 0, MAX_LOGPROBS) == 1:
        _refuse(
            "confidence",
            "confidence=1 would invert the score: with the likeliest token alone it is high where the model is unsure. "
            "Take 5 to 20.",
        )
    if p.confidence and p.logprobs_mode != "raw":
        _refuse("confidence", "confidence is computed from the model's own distribution: leave logprobs_mode at 'raw'")
    if _integer("confidence_window", p.confidence_window, 0, I64) and not p.confidence:
        _refuse("confidence_window", "confidence_window needs confidence, for example confidence=20")
    if p.score_from is not None and p.prompt_logprobs is not None:
        _refuse("score_from", "prompt_logprobs already score every token: send score_from or prompt_logprobs, not both")


def _check_processors(p: SamplingParams) -> None:
    if p.thinking_token_budget is not None:
        _integer("thinking_token_budget", p.thinking_token_budget, 0, I64)
    if len(p.processors) > MAX_PROCESSORS:
        _refuse("processors", f"{len(p.processors)} processors, at most {MAX_PROCESSORS} are allowed")
    for spec in p.processors:
        if not _is_text(spec, MAX_SPEC_CHARS) or not spec.strip():
            _refuse("processors", f"every processor must be text of 1 to {MAX_SPEC_CHARS} characters: name:key=value")


def _check_stops(p: SamplingParams) -> None:
    if len(p.stop) > MAX_STOPS:
        _refuse("stop", f"{len(p.stop)} stop strings, at most {MAX_STOPS} are allowed")
    for text in p.stop:
        if not text or not _is_text(text, MAX_STOP_CHARS):
            _refuse("stop", f"every stop string must be text of 1 to {MAX_STOP_CHARS} characters")
    if p.stop and not p.detokenize:
        _refuse("stop", "stop strings are matched in text, so they need detokenize=True")


WHITESPACE = ("short", "any", "fixed")


def _check_grammar(grammar: Grammar | None) -> None:
    """Check types and size; whether the grammar is valid is for the compiler to say."""
    if grammar is None:
        return
    kinds = ("json_schema", "json_object", "regex", "choice", "lark", "ebnf")
    if not isinstance(grammar, Grammar) or grammar.kind not in kinds or grammar.whitespace not in WHITESPACE:
        _refuse("grammar", f"not a grammar: {str(grammar)[:80]}")
    if not _is_text(grammar.text, MAX_GRAMMAR_BYTES) or len(grammar.text.encode()) > MAX_GRAMMAR_BYTES:
        _refuse("grammar", f"the grammar must be text of at most {MAX_GRAMMAR_BYTES} bytes")
    if len(grammar.after) > MAX_END_MARK_IDS:
        _refuse("grammar", f"the end-of-reasoning mark has more than {MAX_END_MARK_IDS} tokens")


def _bias(bias: Any, ids_end: int) -> dict[int, float]:
    """The map from token id to added logit. JSON objects have string keys, so decimal strings are ids, too."""
    if len(bias) > MAX_BIASED_IDS:
        _refuse("logit_bias", f"{len(bias)} entries, at most {MAX_BIASED_IDS} are allowed")
    keys = [int(k) if isinstance(k, str) and k.isascii() and k.isdecimal() and len(k) < 20 else k for k in bias]
    _check_ids("logit_bias", keys, ids_end)
    return {key: _number("logit_bias", value, -100.0, 100.0) for key, value in zip(keys, bias.values())}


def _allowed(ids: tuple[int, ...] | None, ids_end: int) -> tuple[int, ...] | None:
    if ids is None:
        return None
    if not ids:
        _refuse("allowed_token_ids", "allowed_token_ids is empty: nothing could be generated")
    return _ids("allowed_token_ids", ids, ids_end, MAX_BIASED_IDS)


def _ids(name: str, ids: tuple[int, ...], ids_end: int, most: int) -> tuple[int, ...]:
    """The distinct ids, in the order of their first occurrence."""
    if len(ids) > most:
        _refuse(name, f"{len(ids)} ids, at most {most} are allowed")
    _check_ids(name, ids, ids_end)
    return tuple(dict.fromkeys(ids))


def _encode_bad_words(
    words: tuple[str, ...], encode: Callable[[str], list[int]] | None, ids_end: int
) -> list[list[int]]:
    """Token ids of each word, at the start of a text and after a space: tokenizers give different ids for the two."""
    if len(words) > MAX_BAD_WORDS:
        _refuse("bad_words", f"{len(words)} words, at most {MAX_BAD_WORDS} are allowed")
    found: list[list[int]] = []
    for word in words:
        if not _is_text(word, MAX_BAD_WORD_CHARS) or not word.strip():
            _refuse(
                "bad_words",
                f"every bad word must be text of 1 to {MAX_BAD_WORD_CHARS} characters that are not all blank",
            )
        if encode is None:
            _refuse("bad_words", "bad_words need a tokenizer, and this server runs without one")
        for text in (word.lstrip(), " " + word.lstrip()):
            ids = encode(text)
            if len(ids) > MAX_BAD_WORD_TOKENS:
                _refuse("bad_words", f"a bad word has {len(ids)} tokens, at most {MAX_BAD_WORD_TOKENS} are allowed")
            if ids and ids not in found:
                found.append(ids)
    _check_ids("bad_words", [i for ids in found for i in ids], ids_end)
    return found


# -------------------------------------------------------------------------------------------------------- single values


def _refuse(param: str, message: str, code: str | None = None) -> NoReturn:
    raise RequestError(message, param=param, code=code)


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if type(value) is not int:
        _refuse(name, f"{name} must be an integer, not {_shown(value)}")
    if not low <= value <= high:
        _refuse(name, f"{name}={_shown(value)} is out of range: {low} to {high}")
    return value


def _number(name: str, value: Any, low: float, high: float, open_low: bool = False) -> float:
    if type(value) not in (int, float):
        _refuse(name, f"{name} must be a number, not {_shown(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        _refuse(name, f"{name} must be finite, not {value}")
    if not low <= value <= high or (open_low and value == low):
        _refuse(name, f"{name}={_shown(value)} is out of range: {'above' if open_low else 'from'} {low:g} to {high:g}")
    return float(value)


def _is_text(value: Any, most: int) -> bool:
    """Whether ``value`` is Unicode text of at most ``most`` characters; tokenizers raise on lone surrogates."""
    return isinstance(value, str) and len(value) <= most and not any("\ud800" <= c <= "\udfff" for c in value)


def _check_ids(name: str, ids: Iterable[Any], ids_end: int) -> None:
    ids = list(ids)
    if set(map(type, ids)) <= {int} and (not ids or min(ids) >= 0 and max(ids) < ids_end):
        return  # the fast path: a prompt may hold a million ids
    for token in ids:
        if type(token) is not int:
            _refuse(name, f"{name}: a token id must be an integer, not {_shown(token)}")
        if not 0 <= token < ids_end:
            _refuse(name, f"{name}: token id {_shown(token)} is out of range: 0 to {ids_end - 1}")


def _shown(value: Any) -> str:
    """Short text of a value for a message: an integer of a million digits must not be written out."""
    if type(value) is int and abs(value) > 1 << 80:
        return "an integer above 2^80"
    return f"{value!r:.60}"
