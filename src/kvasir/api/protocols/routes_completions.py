"""POST /v1/completions: continue one or several texts, with ``n`` branches of each; ``echo`` repeats the prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

from kvasir.api.http.generation import Delta, Generation, Running
from kvasir.api.http.limits import unique_id
from kvasir.api.http.service import Caller, Service
from kvasir.api.http.streaming import DONE, sse
from kvasir.api.protocols.openai import CompletionBody
from kvasir.api.protocols.sampling import format_grammar, grammar_of, sampling_params, truncated, whitespace_of
from kvasir.api.text.detokenize import Detokenizer
from kvasir.api.text.logprobs import completion_logprobs, namer, prompt_logprobs, prompt_offsets
from kvasir.types import Request, TokenLogprob

# Default of max_tokens on this route, as at OpenAI.
MAX_TOKENS = 16


class CompletionJob:
    """A completion; see ``service.Job``. The constructor admits the body, off the event loop. Raises RequestError."""

    def __init__(self, service: Service, raw: bytes, caller: Caller) -> None:
        self.service = service
        self.body, self.ignored = service.parse(CompletionBody, raw, caller, adapters=True)
        body = self.body
        self.stream = bool(body.stream)
        self.options = body.stream_settings()
        text_format = format_grammar(body.response_format, "response_format", self.ignored)
        grammar_name, grammar = grammar_of(body, {"response_format": text_format}, self.ignored)
        if grammar is not None:
            grammar = dataclasses.replace(grammar, whitespace=whitespace_of(body))
        self.names = {"grammar": grammar_name}
        self.tokenizer = service.text.tokenizer
        self.name = namer(self.tokenizer, body.return_tokens_as_token_ids)
        for prompt in body.prompt:
            if isinstance(prompt, str):
                service.text.check_size([prompt], service.info.max_model_len)
        limit = service.cut(body.max_tokens, caller)
        read = body.parse_special, body.add_special_tokens
        whole = [self.tokenizer.prompt_ids(p, *read) if isinstance(p, str) else p for p in body.prompt]
        prompts = [truncated(ids, body.truncate_prompt_tokens, limit, service.info) for ids in whole]
        only_echo = bool(body.echo) and body.max_tokens == 0
        fixed: dict[str, Any] = {"logprobs": body.logprobs, "grammar": grammar}
        fixed["max_tokens"] = 1 if only_echo else limit
        if (
            body.echo
            and body.logprobs is not None
            and (body.prompt_logprobs is None or 0 <= body.prompt_logprobs < body.logprobs)
        ):
            fixed["prompt_logprobs"] = body.logprobs  # enough for both; the reply cuts each to its own number
        shared = sampling_params(body, service.info.generation_defaults, **fixed)
        params = [
            shared if body.max_tokens is not None else dataclasses.replace(shared, max_tokens=self._default(len(ids)))
            for ids in prompts
        ]
        id = unique_id("cmpl", caller.id)
        self.requests = service.admit(prompts, params, caller, id, body.priority, self.names, self.stream, body.model)
        if only_echo:  # admission needs room for one token, but the engine shall generate none
            for request in self.requests:
                request.max_tokens = 0
        model = body.model or service.info.name
        self.head = {"id": id, "object": "text_completion", "created": caller.created, "model": model}
        # Text that echo puts before the answer: the prompt as sent, or the text of its ids.
        self.prefixes = (
            [
                p if isinstance(p, str) and len(ids) == len(all_ids) else self.tokenizer.decode(ids, skip_special=False)
                for p, ids, all_ids in zip(body.prompt, prompts, whole, strict=True)
            ]
            if body.echo
            else []
        )

    def _default(self, num_prompt: int) -> int:
        """The default ``max_tokens`` for one prompt:
        at most what fits after it, whatever other prompts the body has."""
        info = self.service.info
        return min(
            MAX_TOKENS, max(1, min(info.max_model_len, info.kv_capacity_tokens or info.max_model_len) - num_prompt)
        )

    def begin(self, release: Callable[[], None]) -> Generation:
        return Generation(self.service.client, self.service.metrics, self.requests, self.detokenizer, release)

    def detokenizer(self, request: Request) -> Detokenizer:
        return Detokenizer(self.tokenizer, request.prompt_ids, request.params)

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        begun: set[int] = set()
        async for delta in generation.deltas():
            running, first = generation.of(delta), delta.choice not in begun
            begun.add(delta.choice)
            told = delta.text or delta.finish_reason or delta.logprobs or delta.forced
            if not (first or told or self.body.return_token_ids):
                continue
            chunk = {**self.head, "choices": [self._choice(running, delta, first)]}
            if self.options.include_usage:
                chunk["usage"] = generation.usage.object() if self.options.continuous_usage_stats else None
            yield sse(chunk)
        if self.options.include_usage:
            yield sse({**self.head, "choices": [], "usage": generation.usage.object()})
        yield DONE

    async def result(self, generation: Generation) -> dict[str, Any]:
        choices: dict[int, dict[str, Any]] = {}
        async for delta in generation.deltas():
            new = self._choice(generation.of(delta), delta, delta.choice not in choices)
            old = choices.setdefault(delta.choice, new)
            if old is not new:
                _append(old, new)
        if self.body.prompt_logprobs is not None:
            for running in generation.running:
                table = prompt_logprobs(self.tokenizer, _cut(running.prompt_logprobs or [], self.body.prompt_logprobs))
                for branch in running.branches:
                    choices[branch.choice]["prompt_logprobs"] = table
        return {**self.head, "choices": [choices[i] for i in sorted(choices)], "usage": generation.usage.object()}

    def _choice(self, running: Running, delta: Delta, first: bool) -> dict[str, Any]:
        """The choice for one delta; the first delta of a choice brings the echo."""
        prefix = self.prefixes[running.index] if self.prefixes else ""
        choice: dict[str, Any] = {
            "index": delta.choice,
            "text": prefix + delta.text if first else delta.text,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self.body.logprobs is not None:
            choice["logprobs"] = completion_logprobs(
                self.name, delta.logprobs or [], delta.token_ids, delta.offsets, len(prefix)
            )
            if first and self.body.echo:
                choice["logprobs"] = {
                    name: values + choice["logprobs"][name] for name, values in self._echoed(running).items()
                }
        if self.body.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if first:
                choice["prompt_token_ids"] = running.request.prompt_ids
        if delta.forced:
            choice["kvasir"] = {"forced": delta.forced}
        return choice

    def _echoed(self, running: Running) -> dict[str, Any]:
        ids, prompt = running.request.prompt_ids, self.body.prompt[running.index]
        added = 0  # tokens before the text that the tokenizer added, which the echo does not show
        if isinstance(prompt, str) and self.prefixes[running.index] == prompt:
            bare = self.tokenizer.prompt_ids(prompt, self.body.parse_special, add_special=False)
            added = next((i for i in range(len(ids)) if ids[i : i + len(bare)] == bare), 0)
        offsets = prompt_offsets(self.tokenizer, ids, added)
        return completion_logprobs(
            self.name, _cut(running.prompt_logprobs or [None] * len(ids), self.body.logprobs or 0), ids, offsets
        )


def _cut(entries: Iterable[TokenLogprob | None], count: int) -> list[TokenLogprob | None]:
    """Keep at most ``count`` alternatives per entry."""
    return [e and dataclasses.replace(e, top=e.top[:count]) for e in entries]


def _append(choice: dict[str, Any], new: dict[str, Any]) -> None:
    """Add a later delta's choice to that of the earlier ones."""
    choice["text"] += new["text"]
    choice["finish_reason"], choice["stop_reason"] = new["finish_reason"], new["stop_reason"]
    for name, values in (new["logprobs"] or {}).items():
        choice["logprobs"][name] += values
    if "token_ids" in new:
        choice["token_ids"] += new["token_ids"]
    if "kvasir" in new:
        choice.setdefault("kvasir", {"forced": []})["forced"] += new["kvasir"]["forced"]
