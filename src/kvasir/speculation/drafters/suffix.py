"""What followed the longest suffix of the text that occurred before, in this request or another of its tenant. Exact.

SuffixDecoding (arXiv 2411.04975) and DAS (arXiv 2511.13841) keep suffix trees; this is a suffix automaton of all texts of a
tenant, extended token by token in amortised constant time, live ones included, so that samples of one prompt learn from
each other at once. The proposal is a tree: continuations by how often they were seen, the most likely nodes first.

Memory is bounded by two generations: when the young automaton holds ``max_tokens`` tokens it becomes the old one, which is
read and no longer extended, and what was old is gone. ``scope=request`` keeps every text to itself.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Literal

from kvasir.speculation.drafter import Ask, Drafter
from kvasir.speculation.tree import DraftTree
from kvasir.types import Sequence

PROMPT_TOKENS = 4096  # of a prompt, from its end, that are read in
CONTEXT_TOKENS = 32  # read again by a sequence that lives on into a new generation
MAX_COUNTED = 64  # suffixes of a place whose counts are kept up: the longest ones
FLOOR = 0.03  # of the chance that a node is reached and right: below, it is not worth the time to look at
STATE_BYTES = 420  # of an automaton, a state: by measurement


@dataclass(frozen=True, slots=True)
class Config:
    max_tokens: int = 1 << 17
    min_match: int = 2
    scope: Literal["tenant", "request"] = "tenant"


class Automaton:
    """Of many texts at once. State 0 is the empty string; a state stands for the suffixes that end at the same places.

    ``nexts``: token -> state; ``links``: the state of the longest suffix that ends at more places; ``lengths``: of the longest
    string; ``counts``: how often it was seen.
    """

    def __init__(self) -> None:
        self.nexts: list[dict[int, int]] = [{}]
        self.links, self.lengths, self.counts = [-1], [0], [0]
        self.num_tokens = 0

    def extend(self, last: int, token: int) -> int:
        """The state of the text that ended in ``last``, one token later."""
        nexts, links, lengths = self.nexts, self.links, self.lengths
        state = nexts[last].get(token)
        if state is not None:
            if lengths[state] != lengths[last] + 1:
                state = self._split(last, token, state)
        else:
            state = self._state({}, 0, lengths[last] + 1, 0)
            at = last
            while at >= 0 and token not in nexts[at]:
                nexts[at][token] = state
                at = links[at]
            if at >= 0:
                target = nexts[at][token]
                links[state] = target if lengths[target] == lengths[at] + 1 else self._split(at, token, target)
        self.num_tokens += 1
        at, left = state, MAX_COUNTED
        while at > 0 and left:
            self.counts[at] += 1
            at, left = links[at], left - 1
        return state

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The longest suffix of a foreign text that is known, one token later: its state and its length."""
        while state > 0 and token not in self.nexts[state]:
            state = self.links[state]
            length = self.lengths[state]
        target = self.nexts[state].get(token)
        return (0, 0) if target is None else (target, length + 1)

    def alive(self, state: int, length: int) -> tuple[int, int]:
        """The longest suffix of that string which was ever followed by something."""
        while state > 0 and not self.nexts[state]:
            state = self.links[state]
            length = min(length, self.lengths[state])
        return state, length

    def _state(self, nexts: dict[int, int], link: int, length: int, count: int) -> int:
        self.nexts.append(nexts)
        self.links.append(link)
        self.lengths.append(length)
        self.counts.append(count)
        return len(self.links) - 1

    def _split(self, at: int, token: int, state: int) -> int:
        """Some suffixes of ``state`` now end at more places than the others: a state of their own."""
        clone = self._state(dict(self.nexts[state]), self.links[state], self.lengths[at] + 1, self.counts[state])
        self.links[state] = clone
        while at >= 0 and self.nexts[at].get(token) == state:
            self.nexts[at][token] = clone
            at = self.links[at]
        return clone


@dataclass(slots=True)
class _Store:
    """Two generations of a tenant's texts. ``age`` counts the generations."""

    young: Automaton = field(default_factory=Automaton)
    old: Automaton | None = None
    age: int = 0


@dataclass(slots=True)
class _Cursor:
    """Where a sequence stands: ``end`` tokens were read; its state in the young automaton; its longest match in the old."""

    store: _Store
    age: int
    end: int
    last: int = 0
    state: int = 0
    length: int = 0


class Suffix(Drafter):
    topology = "tree"

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config or Config())
        self._stores: dict[str, _Store] = {}

    def propose(self, asks: list[Ask]) -> list[DraftTree]:
        cursors = [self._read(ask.seq) for ask in asks]  # all first, so that they learn from each other
        return [self._tree(cursor, ask) for cursor, ask in zip(cursors, asks)]

    def close(self, seq: Sequence) -> None:
        if "suffix" in seq.state and self.config.scope == "tenant":
            self._read(seq)

    def state_bytes(self) -> int:
        return STATE_BYTES * sum(len(a.links) for s in self._stores.values() for a in (s.young, s.old) if a is not None)

    def _store(self, seq: Sequence) -> _Store:
        if self.config.scope == "request":
            return _Store()
        return self._stores.setdefault(seq.request.tenant, _Store())

    def _read(self, seq: Sequence) -> _Cursor:
        """Bring the automaton and the cursor up to the sequence's last token."""
        cursor = seq.state.get("suffix")
        if cursor is None:
            store = self._store(seq)
            cursor = seq.state["suffix"] = _Cursor(store, store.age, max(0, len(seq.tokens) - PROMPT_TOKENS))
        store = cursor.store
        while cursor.end < len(seq.tokens):
            if cursor.age != store.age:
                cursor.age, cursor.last, cursor.state, cursor.length = store.age, 0, 0, 0
                cursor.end = max(0, cursor.end - CONTEXT_TOKENS)
            token = seq.tokens[cursor.end]
            cursor.last = store.young.extend(cursor.last, token)
            if store.old is not None:
                cursor.state, cursor.length = store.old.follow(cursor.state, cursor.length, token)
            cursor.end += 1
            if store.young.num_tokens >= self.config.max_tokens:
                store.young, store.old, store.age = Automaton(), store.young, store.age + 1
        return cursor

    def _tree(self, cursor: _Cursor, ask: Ask) -> DraftTree:
        store, found = cursor.store, []
        if cursor.age == store.age:
            found.append((store.young, cursor.last, store.young.lengths[cursor.last]))
            if store.old is not None:
                found.append((store.old, cursor.state, cursor.length))
        trees = [self._grow(automaton, *automaton.alive(state, length), ask) for automaton, state, length in found]
        return max(trees, key=lambda t: sum(t.est), default=DraftTree())

    def _grow(self, automaton: Automaton, state: int, length: int, ask: Ask) -> DraftTree:
        """The most likely nodes below a match of ``length`` tokens, best first."""
        tree, counts = DraftTree(), automaton.counts
        heap: list[tuple[float, int, float, int, int, int]] = []  # -survival, order, est, parent, token, state

        def push(parent: int, state: int, matched: int, survival: float) -> None:
            if matched < self.config.min_match:
                return
            below, trust = automaton.nexts[state], matched / (matched + 1)
            if len(below) == 1:  # nearly always
                (token, target), = below.items()
                if survival * trust >= FLOOR:
                    heapq.heappush(heap, (-survival * trust, len(heap), trust, parent, token, target))
                return
            trust /= sum([counts[s] for s in below.values()])
            for token, target in heapq.nlargest(4, below.items(), key=lambda item: counts[item[1]]):
                est = counts[target] * trust
                if survival * est >= FLOOR:
                    heapq.heappush(heap, (-survival * est, len(heap), est, parent, token, target))

        push(-1, state, length, 1.0)
        while heap and len(tree) < ask.max_nodes:
            survival, _, est, parent, token, state = heapq.heappop(heap)
            node = tree.add(parent, token, est)
            depth = tree.depths[node] + 1
            if depth < ask.max_depth:
                push(node, *automaton.alive(state, length + depth), -survival)
        return tree if tree.is_chain else tree.keep(range(len(tree)))
