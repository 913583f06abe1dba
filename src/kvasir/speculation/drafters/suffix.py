"""Propose what followed the longest suffix of the text that occurred before, in this request or another of its tenant.
Exact.

SuffixDecoding (arXiv 2411.04975) and DAS (arXiv 2511.13841) keep suffix trees. This drafter keeps one suffix automaton
for all texts of a scope (``kvasir/speculation/suffixes.py``). It grows token by token in amortised constant time, with
live texts, so samples of one prompt learn from each other at once. The proposal is a tree of the continuations seen
most often.

Scopes: ``tenant``; ``problem``, the requests of a tenant with the same prompt; ``request``. Memory is bounded twice: a
scope has two generations of ``max_tokens`` tokens, and all scopes together have ``GENERATIONS`` of them. Beyond that,
the scopes used least recently are dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any, Literal

from kvasir.errors import ConfigError
from kvasir.speculation.drafter import Ask, Drafter
from kvasir.speculation.suffixes import CONTEXT, Suffixes
from kvasir.speculation.suffixes_native import NativeSuffixes, native
from kvasir.speculation.tree import DraftTree
from kvasir.types import Sequence

PROMPT_TOKENS = 4096  # last tokens of a prompt that are read
GENERATIONS = 8  # generations of ``max_tokens`` tokens that all scopes have together
# Smallest and largest generation: more than a live text reads again, and few enough for indices of 32 bits.
LEAST, MOST = 2 * CONTEXT, 1 << 26


@dataclass(frozen=True, slots=True)
class Config:
    max_tokens: int = 1 << 17
    min_match: int = 2
    scope: Literal["tenant", "problem", "request"] = "tenant"


class Suffix(Drafter):
    """The drafter of one engine. ``plain``: run without native code."""

    topology = "tree"

    def __init__(self, config: Config, *, plain: bool = False) -> None:
        super().__init__(config)
        max_tokens, min_match = self.config.max_tokens, self.config.min_match
        if not LEAST <= max_tokens <= MOST or min_match < 1:
            raise ConfigError(
                f"suffix: max_tokens={max_tokens} must be between {LEAST} and {MOST}, min_match={min_match} at least 1"
            )
        if self.config.scope not in (scopes := ("tenant", "problem", "request")):
            raise ConfigError(f"suffix:scope={self.config.scope}: expected one of {', '.join(scopes)}")
        library = None if plain else native().library
        self._texts: Any = (
            Suffixes(max_tokens, min_match) if library is None else NativeSuffixes(library, max_tokens, min_match)
        )
        self._stores: OrderedDict[Hashable, Any] = OrderedDict()  # by scope; the one used last is at the end

    def reference(self) -> Drafter | None:
        return Suffix(self.config, plain=True) if isinstance(self._texts, NativeSuffixes) else None

    def propose(self, asks: list[Ask]) -> Many[DraftTree]:
        cursors, news = [], []
        for ask in asks:
            seq = ask.seq
            cursor = seq.state.get("suffix") or self._open(seq)
            cursors.append(cursor)
            news.append(seq.tokens[cursor.end :])
            cursor.end = len(seq.tokens)
        trees = self._texts.propose(cursors, news, asks)
        self._bound()
        return trees

    def close(self, seq: Sequence) -> None:
        cursor = seq.state.pop("suffix", None)
        if cursor is not None and self.config.scope != "request":
            self._texts.read([cursor], [seq.tokens[cursor.end :]])
            self._bound()

    def state_bytes(self) -> int:
        return self._texts.num_bytes

    def _open(self, seq: Sequence) -> Any:
        store = self._store(seq)
        cursor = seq.state["suffix"] = self._texts.cursor(store, max(0, len(seq.tokens) - PROMPT_TOKENS))
        return cursor

    def _store(self, seq: Sequence) -> Any:
        scope, request = self.config.scope, seq.request
        if scope == "request":
            return self._texts.store()
        key = request.tenant if scope == "tenant" else (request.tenant, hash(tuple(request.prompt_ids)))
        if key not in self._stores:
            self._stores[key] = self._texts.store()
        self._stores.move_to_end(key)
        return self._stores[key]

    def _bound(self) -> None:
        while self._texts.num_tokens > GENERATIONS * self.config.max_tokens and len(self._stores) > 1:
            _, store = self._stores.popitem(last=False)
            self._texts.clear(store)  # live sequences keep this store, but new ones do not find it
