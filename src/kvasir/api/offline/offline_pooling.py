"""``LLM.embed`` and ``LLM.score``: what they send to the engine, and their results under vLLM's names. Also how prompts
and grammars are read before they are sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from kvasir.api.text.pooling import PoolingText, cosine, paired, vector
from kvasir.client.admission import MAX_GRAMMAR_BYTES, check_task
from kvasir.errors import RequestError
from kvasir.models.tokenizer import Tokenizer
from kvasir.types import Event, Grammar, ModelInfo, PoolingParams, Request, SamplingParams

if TYPE_CHECKING:
    import numpy as np


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float] = field(default_factory=list)


@dataclass(slots=True)
class ScoringOutput:
    score: float = float("nan")


T = TypeVar("T", EmbeddingOutput, ScoringOutput)


@dataclass(slots=True)
class PoolingRequestOutput(Generic[T]):
    """The result of one request, under vLLM's names. ``error``: why it failed after it had begun."""

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = False
    error: RequestError | None = None


class PoolingCollector:
    """The collector of one request's vector; see ``outputs.Collector``. ``vector``: None until it has come."""

    def __init__(self, request: Request) -> None:
        self.output = PoolingRequestOutput(request.id, EmbeddingOutput(), request.prompt_ids)
        self.vector: np.ndarray | None = None
        self._ended = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, for the progress bar."""
        return len(self.output.prompt_token_ids)

    def newly_done(self) -> bool:
        """Whether the request has ended since the previous call; true only once."""
        if self.output.finished or not self._ended:
            return False
        self.output.finished = True
        return True

    def add(self, event: Event) -> list[int]:
        """Take an event. Nothing is to be cancelled."""
        if event.kind == "error":
            self.output.error = RequestError(event.message, status=event.status, param=event.param, code=event.code)
        if event.pooled is not None:
            self.vector = vector(event)
            self.output.num_cached_tokens = event.num_cached
        self._ended = event.kind == "error" or event.finish_reason is not None
        return []


class Pools(Protocol):
    """The part of ``LLM`` that is used here."""

    info: ModelInfo

    def get_tokenizer(self) -> Tokenizer: ...

    def pool(self, prompts: list[list[int]], params: PoolingParams, use_tqdm: bool = False) -> list[PoolingCollector]:
        """Compute the vectors of prompts, in order."""


def reading(prompt: Any) -> tuple[bool, bool]:
    """Return ``parse_special`` and ``add_special_tokens`` of a prompt, which are true unless its dict says otherwise.
    Raises RequestError."""
    found = []
    for name in ("parse_special", "add_special_tokens"):
        value = prompt.get(name) if isinstance(prompt, dict) else None
        if value is not None and not isinstance(value, bool):
            raise RequestError(f"{name} must be true or false, got {value!r}", param=name)
        found.append(value is not False)
    return found[0], found[1]


def without_annotations(params: SamplingParams) -> SamplingParams:
    """The parameters with a schema that has room among the limits once its annotations are left out, as they are over
    HTTP. Raises RequestError."""
    grammar = params.grammar
    if not isinstance(grammar, Grammar) or len(grammar.text) <= MAX_GRAMMAR_BYTES:
        return params
    from kvasir.decoding.grammar_source import without_annotations as shortened

    return dataclasses.replace(params, grammar=shortened(grammar))


def embed(
    llm: Pools,
    prompts: Any,
    params: PoolingParams | None,
    use_tqdm: bool,
    prompt_name: str | None,
    most: int | None,
) -> list[PoolingRequestOutput[EmbeddingOutput]]:
    """Embed every prompt; see ``LLM.embed``."""
    check_task(llm.info, "embed")
    many = [prompts] if isinstance(prompts, (str, dict)) else list(prompts)
    ids = []
    for prompt in many:
        if isinstance(prompt, dict) and "prompt_token_ids" in prompt:
            ids.append(list(prompt["prompt_token_ids"])[:most])
            continue
        text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        read = reading(prompt)
        if not isinstance(text, str):
            raise RequestError(
                'a prompt is a string, {"prompt": "..."} or {"prompt_token_ids": [...]}', param="prompts"
            )
        side = PoolingText(llm.get_tokenizer(), llm.info)
        ids.append(side.ids(text, side.prompt(prompt_name), most, *read))
    collectors = llm.pool(ids, params or PoolingParams(), use_tqdm)
    for collector in collectors:
        if collector.vector is not None:
            collector.output.outputs.embedding = collector.vector.tolist()
    return [collector.output for collector in collectors]


def score(
    llm: Pools,
    data_1: str | Sequence[str],
    data_2: str | Sequence[str],
    params: PoolingParams | None,
    use_tqdm: bool,
    instruction: str | None,
    most: int | None,
) -> list[PoolingRequestOutput[ScoringOutput]]:
    """Score pairs of texts; see ``LLM.score``."""
    check_task(llm.info, "score")
    first, second = ([d] if isinstance(d, str) else list(d) for d in (data_1, data_2))
    side = PoolingText(llm.get_tokenizer(), llm.info)
    pairs = paired(first, second, ("data_1", "data_2"))
    params = params or PoolingParams()
    if side.pooling.task == "score":
        ids = [side.pair_ids(first[i], second[j], instruction, most) for i, j in pairs]
        collectors = llm.pool(ids, params, use_tqdm)
        values = [float("nan") if c.vector is None else float(c.vector[0]) for c in collectors]
        ended = collectors
    else:
        if instruction is not None:
            raise RequestError("an embedding model reads no instruction; write it into the text", param="instruction")
        collectors = llm.pool([side.ids(text, most=most) for text in first + second], params, use_tqdm)
        left, right = collectors[: len(first)], collectors[len(first) :]
        values = [_cosine(left[i], right[j]) for i, j in pairs]
        ended = right
    results = []
    for collector, value in zip(ended, values, strict=True):
        out = collector.output
        results.append(
            PoolingRequestOutput(
                out.request_id, ScoringOutput(value), out.prompt_token_ids, out.num_cached_tokens, True, out.error
            )
        )
    return results


def _cosine(a: PoolingCollector, b: PoolingCollector) -> float:
    """The cosine of two vectors; NaN where one request failed."""
    if a.vector is None or b.vector is None:
        b.output.error = b.output.error or a.output.error
        return float("nan")
    return cosine(a.vector, b.vector)
