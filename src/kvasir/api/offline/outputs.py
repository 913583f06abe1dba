"""Results of the Python API, and the collector that builds them from a request's events."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvasir.api.text.detokenize import Detokenizer
from kvasir.errors import RequestError
from kvasir.models.tokenizer import Tokenizer
from kvasir.types import Event, PromptScore, Request, TokenLogprob


@dataclass(slots=True)
class Logprob:
    """Natural log-probability of one token, its rank (1 = most likely) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """The output of one branch. ``token_ids`` include the token that ended it; ``text`` does not.

    ``confidences``: one per token, if the request asked for them; ``kvasir.decoding.confidence.summed_up`` gives their
    mean and their lowest window.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    confidences: list[float] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """The result of one request.

    ``score``: score of the prompt's tokens from ``score_from`` on. ``error``: why the request failed after it had begun
    (a grammar that cannot be compiled, a fault in its step). Its unfinished branches then have
    ``finish_reason="error"``; the other requests of the call are not affected.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    score: PromptScore | None = None
    num_cached_tokens: int = 0
    finished: bool = False
    error: RequestError | None = None


class Collector:
    """The builder of one request's output from its events."""

    def __init__(self, request: Request, text: str | None, tokenizer: Tokenizer | None) -> None:
        n, params = request.params.n, request.params
        self.params = params
        self.tokenizer = tokenizer
        self.output = RequestOutput(request.id, text, request.prompt_ids, [CompletionOutput(i) for i in range(n)])
        self._texts = (
            [Detokenizer(tokenizer, request.prompt_ids, params) for _ in range(n)]
            if tokenizer and params.detokenize
            else []
        )

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far, for the progress bar."""
        return sum(len(out.token_ids) for out in self.output.outputs)

    def newly_done(self) -> bool:
        """Whether the last branch has ended since the previous call; true only once."""
        if self.output.finished:
            return False
        for out in self.output.outputs:
            if out.finish_reason is None:
                return False
        self.output.finished = True
        return True

    def add(self, event: Event) -> list[int]:
        """Take an event; return the branches that a stop string has just ended, which the engine should cancel."""
        if event.kind == "error":
            self.output.error = RequestError(event.message, status=event.status, param=event.param, code=event.code)
            for out in self.output.outputs:
                out.finish_reason = out.finish_reason or "error"
        if event.kind != "tokens":
            return []
        out = self.output.outputs[event.branch]
        if out.finish_reason is not None:
            return []  # the engine still ends a branch that a stop string ended here
        self.output.num_cached_tokens = max(self.output.num_cached_tokens, event.num_cached)
        if event.prompt_logprobs is not None:
            self.output.prompt_logprobs = [p and self._named(p) for p in event.prompt_logprobs]
        self.output.score = event.score or self.output.score
        tokens, stopped = event.token_ids, None
        if self._texts:
            delta = self._texts[event.branch].push(
                tokens, event.finish_reason is not None, event.finish_reason == "stop"
            )
            out.text += delta.text
            stopped = delta.stop
            if stopped is not None:
                tokens = tokens[: delta.num_tokens]
        out.token_ids += tokens
        if event.logprobs is not None:
            entries = event.logprobs[: len(tokens)]
            if self.params.confidence:
                out.confidences = out.confidences or []
                out.confidences += [p.confidence for p in entries]
            out.logprobs = out.logprobs or []
            out.logprobs += [self._named(p) for p in entries]
            out.cumulative_logprob = (out.cumulative_logprob or 0.0) + sum(p.logprob for p in entries)
        out.finish_reason, out.stop_reason = (
            ("stop", stopped) if stopped is not None else (event.finish_reason, event.stop_reason)
        )
        return [event.branch] if stopped is not None and event.finish_reason is None else []

    def _named(self, entry: TokenLogprob) -> dict[int, Logprob]:
        def named(token: int, logprob: float, rank: int) -> Logprob:
            return Logprob(logprob, rank, self.tokenizer.token_text(token) if self.tokenizer else None)

        table = {entry.id: named(entry.id, entry.logprob, entry.rank)}
        for place, (token, logprob) in enumerate(entry.top, start=1):
            table.setdefault(token, named(token, logprob, place))
        return table
