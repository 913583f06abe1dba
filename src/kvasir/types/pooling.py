"""Pooling: one vector or one score of a whole prompt instead of tokens. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

PoolRows = Literal["last", "cls", "mean"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """Parameters of a request for an embedding or a score, by vLLM's names.

    ``dimensions``: keep the first so many numbers of an embedding, and normalise those (Matryoshka).
    ``use_activation``: for an embedding, scale it to length 1; for a score, put it through a sigmoid; None: as the
    checkpoint says. ``rows``: the prompt rows whose hidden states are averaged; admission fills it in.
    """

    dimensions: int | None = None
    use_activation: bool | None = None
    rows: PoolRows = "last"

    def rows_of(self, start: int, stop: int, num_prompt: int) -> range:
        """The pooled ones of the prompt rows ``start`` .. ``stop``."""
        if self.rows == "mean":
            return range(start, stop)
        at = 0 if self.rows == "cls" else num_prompt - 1
        return range(max(start, at), min(stop, at + 1))


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """The text of a query and a document as a reranker was trained on it.

    ``before`` and ``after`` may hold special tokens. ``pair`` has ``{instruction}``, ``{query}`` and ``{document}`` in
    it, whose texts are plain. ``instruction``: the default one.
    """

    before: str
    pair: str
    after: str
    instruction: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """The way a checkpoint turns a prompt into numbers, read from its folder (`kvasir.models.pooling`).

    ``task``: ``embed`` (a vector) or ``score`` (how well a document answers a query). ``rows``: which rows are
    averaged. ``activation``: default of `PoolingParams.use_activation`. ``width``: numbers of a whole embedding.
    ``labels``: outputs of the head for classes; 0: there is none. ``tokens``: without such a head, the ids of the
    tokens for no (None: nothing is subtracted) and for yes, whose logits make the score.
    ``prompts``: texts to put before an input, by name. ``default_prompt``: the name that applies if none is given.
    ``template``: the text of a pair (None: the two follow each other).
    """

    task: Literal["embed", "score"]
    rows: PoolRows = "last"
    activation: bool = True
    width: int = 0
    labels: int = 0
    tokens: tuple[int | None, int] | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    template: PairTemplate | None = None
