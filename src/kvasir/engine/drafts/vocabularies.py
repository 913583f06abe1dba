"""The ids of a draft model and of the served model, where their vocabularies are not the same.

Pairs of one family often differ in tokens that were added later, or in rows that only pad the matrix, and some
vocabularies continue another. Then the texts of their tokens say which ids belong together.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvasir.errors import ConfigError
from kvasir.models.checkpoint import read_json
from kvasir.types import SamplingParams

# Spellings of a line break in vocabularies: of byte-level BPE, of SentencePiece's bytes, and as it is.
LINE_BREAKS = ("\u010a", "<0x0A>", "\n")


@dataclass(frozen=True)
class Vocabulary:
    """The ids of a tokenizer by the text of their tokens: those of its model, and those that were added."""

    base: dict[str, int]
    added: dict[str, int]

    @classmethod
    def read(cls, file: Path) -> Vocabulary:
        """Read a tokenizer.json. Raises ConfigError for a file that is none."""
        found = read_json(file)
        try:
            vocab: Any = found["model"]["vocab"]
            if isinstance(vocab, list):  # pieces with their scores
                vocab = {piece: i for i, (piece, _) in enumerate(vocab)}
            added = {str(token["content"]): int(token["id"]) for token in found.get("added_tokens") or ()}
            return cls({text: int(i) for text, i in vocab.items() if text not in added}, added)
        except (KeyError, TypeError, ValueError) as e:
            raise ConfigError(f"{file} cannot be read as a tokenizer: {e!r}") from e

    @property
    def line_break(self) -> int:
        """The id of a line break; 0 where the vocabulary has none."""
        return next((self.base[text] for text in LINE_BREAKS if text in self.base), 0)


@dataclass(frozen=True)
class Translation:
    """``served_of`` [draft ids]: the served model's id of each draft id, -1: it has none. ``draft_of`` [served ids]:
    the other way; a token that the draft model does not have is a line break to it, and ``known`` is False."""

    served_of: np.ndarray
    draft_of: np.ndarray
    known: np.ndarray

    def to_draft(self, tokens: list[int]) -> list[int]:
        """The served model's tokens as the draft model reads them."""
        return self.draft_of[tokens].tolist() if tokens else []

    def to_served(self, tokens: list[int]) -> list[int]:
        """The draft model's tokens, up to the first one that the served model does not have."""
        found = self.served_of[tokens].tolist() if tokens else []
        return found[: found.index(-1)] if -1 in found else found

    def weights(self, rows_RV: torch.Tensor) -> torch.Tensor:
        """Log-weights over draft ids as log-weights over the served model's ids: -inf for those that the draft model
        does not have."""
        columns = torch.from_numpy(self.draft_of).to(rows_RV.device)
        missing = torch.from_numpy(~self.known).to(rows_RV.device)
        return rows_RV.index_select(1, columns).masked_fill(missing, -float("inf"))

    def named(self, params: SamplingParams) -> dict[str, Any]:
        """The parameters of a request that name ids, in the draft model's."""
        allowed = params.allowed_token_ids
        if allowed is not None:
            allowed = tuple(int(self.draft_of[i]) for i in allowed if self.known[i]) or None
        bias = {int(self.draft_of[i]): weight for i, weight in params.logit_bias.items() if self.known[i]}
        return {"allowed_token_ids": allowed, "logit_bias": bias}


class SameIds:
    """The translation between vocabularies whose ids mean the same."""

    def to_draft(self, tokens: list[int]) -> list[int]:
        return tokens

    def to_served(self, tokens: list[int]) -> list[int]:
        return tokens

    def weights(self, rows_RV: torch.Tensor) -> torch.Tensor:
        return rows_RV

    def named(self, params: SamplingParams) -> dict[str, Any]:
        return {}


def translation(draft: Vocabulary, draft_size: int, served: Vocabulary, served_size: int) -> Translation | None:
    """The translation between two vocabularies, None where ids mean the same; the sizes are those of the models'
    matrices. Raises ValueError, which says where they differ, unless one base vocabulary continues the other."""
    small, large, whose = (draft, served, "served") if len(draft.base) <= len(served.base) else (served, draft, "draft")
    missing = [text for text in small.base if text not in large.base and text not in large.added]
    if missing:
        raise ValueError(
            f"{len(missing)} tokens, {missing[0]!r} for one, are not in the vocabulary of the {whose} model"
        )
    moved = [text for text, i in draft.base.items() if served.base.get(text, i) != i]
    if moved:
        text = moved[0]
        raise ValueError(
            f"{len(moved)} tokens have other ids, {text!r} for one: {draft.base[text]} in the draft model, "
            f"{served.base[text]} in the served one"
        )
    ours, theirs = draft.base | draft.added, served.base | served.added
    pairs = [
        (i, theirs[text]) for text, i in ours.items() if i < draft_size and theirs.get(text, served_size) < served_size
    ]
    if draft_size == served_size and len(pairs) == len(ours) == len(theirs) and all(a == b for a, b in pairs):
        return None
    served_of = np.full(draft_size, -1, np.int64)
    draft_of = np.full(served_size, draft.line_break, np.int64)
    known = np.zeros(served_size, bool)
    a, b = np.array(pairs, np.int64).reshape(-1, 2).T
    served_of[a], draft_of[b], known[b] = b, a, True
    return Translation(served_of, draft_of, known)
