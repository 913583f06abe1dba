"""Description of a family's rerankers, for the family's file. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.types import PairTemplate


@dataclass(frozen=True, slots=True)
class Reranker:
    """The rerankers of a family that score by two tokens (``RERANKER`` in its file).

    ``tokens``: for no and yes, in the vocabulary's spelling. ``template``: the text of a pair."""

    tokens: tuple[str, str]
    template: PairTemplate
