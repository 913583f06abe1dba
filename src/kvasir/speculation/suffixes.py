"""Find what followed the longest known suffix of a text among the texts of a store: suffix automata in plain Python.

Each new token extends the automaton of its store in amortised constant time, so live texts learn from each other at
once. The state of a text in the automaton is its longest match; no step has to search for it. An automaton knows every
substring of its texts, of any length, in at most two states a token.

A store is bounded by two *generations*. When the young automaton has ``max_tokens`` tokens it becomes the old one,
which is read but no longer extended; the former old one is dropped. Only tokens that add a state count, so a prompt
that many samples share takes its memory once.

``suffixes_native.py`` is the same in C, with the same results. This module is its reference, and runs without a
compiler.
"""

from __future__ import annotations

import heapq
import weakref
from dataclasses import dataclass, field

from kvasir.speculation.drafter import Ask
from kvasir.speculation.tree import DraftTree

CONTEXT = 32  # tokens that a live text reads again when a new generation begins
MAX_COUNTED = 64  # suffixes of a place whose counts are updated: the longest ones
BRANCHES = 4  # continuations of a place that are proposed: those seen most often
FLOOR = 0.03  # survival below which a node is not worth proposing
STATE_BYTES = 420  # measured bytes of a state


class Automaton:
    """A suffix automaton of many texts. State 0 is the empty string; a state stands for suffixes that end at the same
    places.

    By state: ``nexts`` (token -> state), ``links`` (the state of the longest suffix that ends at more places),
    ``lengths`` (of its longest string) and ``counts`` (how often it was seen). ``num_tokens`` counts the tokens that
    added a state.
    """

    def __init__(self) -> None:
        self.nexts: list[dict[int, int]] = [{}]
        self.links, self.lengths, self.counts = [-1], [0], [0]
        self.num_tokens = 0

    def extend(self, last: int, token: int) -> int:
        """Append a token to the text that ends in state ``last``. Returns the new state."""
        nexts, links, lengths, before = self.nexts, self.links, self.lengths, len(self.links)
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
        self.num_tokens += len(links) > before
        at, left = state, MAX_COUNTED
        while at > 0 and left:
            self.counts[at] += 1
            at, left = links[at], left - 1
        return state

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Advance a text that is not part of the automaton by a token. Returns state and length of its longest known
        suffix."""
        while state > 0 and token not in self.nexts[state]:
            state = self.links[state]
            length = self.lengths[state]
        target = self.nexts[state].get(token)
        return (0, 0) if target is None else (target, length + 1)

    def alive(self, state: int, length: int) -> tuple[int, int]:
        """Return state and length of the longest suffix of this match that was ever followed by a token."""
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
        """Give the suffixes of ``state`` that now end at more places than the others a state of their own."""
        clone = self._state(dict(self.nexts[state]), self.links[state], self.lengths[at] + 1, self.counts[state])
        self.links[state] = clone
        while at >= 0 and self.nexts[at].get(token) == state:
            self.nexts[at][token] = clone
            at = self.links[at]
        return clone


@dataclass(slots=True, eq=False, weakref_slot=True)
class Store:
    """Two generations of texts that learn from each other. ``age`` counts the generations."""

    young: Automaton = field(default_factory=Automaton)
    old: Automaton | None = None
    age: int = 0


@dataclass(slots=True, eq=False)
class Cursor:
    """The state of a text: the first ``end`` tokens were read, and ``context`` holds the last of these. ``last``: its
    state in the young automaton; ``state`` and ``length``: its longest match in the old one."""

    store: Store
    end: int
    age: int = -1
    last: int = 0
    state: int = 0
    length: int = 0
    context: list[int] = field(default_factory=list)


class Suffixes:
    """Stores of texts, and cursors in them.

    ``max_tokens``: size of a generation; ``min_match``: shortest match whose continuations are proposed."""

    def __init__(self, max_tokens: int, min_match: int) -> None:
        self._max_tokens, self._min_match = max_tokens, min_match
        self._stores: weakref.WeakSet[Store] = weakref.WeakSet()

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all stores."""
        return sum(a.num_tokens for a in self._automata())

    @property
    def num_bytes(self) -> int:
        return STATE_BYTES * sum(len(a.links) for a in self._automata())

    def _automata(self) -> list[Automaton]:
        return [a for s in self._stores for a in (s.young, s.old) if a is not None]

    def store(self) -> Store:
        """Return a new, empty store. It lives as long as there is a reference to it."""
        store = Store()
        self._stores.add(store)
        return store

    def clear(self, store: Store) -> None:
        """Forget the texts of a store. Live ones start again with their context."""
        store.young, store.old, store.age = Automaton(), None, store.age + 1

    def cursor(self, store: Store, end: int) -> Cursor:
        """Return the cursor of a text that will be read from token ``end`` on."""
        return Cursor(store, end)

    def read(self, cursors: list[Cursor], news: list[list[int]]) -> None:
        """Read the next tokens of each text."""
        for cursor, tokens in zip(cursors, news):
            store = cursor.store
            for token in tokens:
                if cursor.age != store.age:
                    cursor.age, cursor.last, cursor.state, cursor.length = store.age, 0, 0, 0
                    for known in cursor.context:
                        self._read(cursor, known)
                self._read(cursor, token)
                cursor.context = [*cursor.context[1 - CONTEXT :], token]
                if store.young.num_tokens >= self._max_tokens:
                    store.young, store.old, store.age = Automaton(), store.young, store.age + 1

    def propose(self, cursors: list[Cursor], news: list[list[int]], asks: list[Ask]) -> list[DraftTree]:
        """Read the next tokens of all texts, so that they learn from each other; then propose a tree for each.

        The most likely path of a tree comes first."""
        self.read(cursors, news)
        return [self._tree(cursor, ask) for cursor, ask in zip(cursors, asks)]

    def _read(self, cursor: Cursor, token: int) -> None:
        store = cursor.store
        cursor.last = store.young.extend(cursor.last, token)
        if store.old is not None:
            cursor.state, cursor.length = store.old.follow(cursor.state, cursor.length, token)

    def _tree(self, cursor: Cursor, ask: Ask) -> DraftTree:
        """Propose the tree of the generation that promises more accepted tokens (SuffixDecoding's score)."""
        store = cursor.store
        if cursor.age != store.age:
            return DraftTree()
        tree, worth = self._grow(store.young, cursor.last, store.young.lengths[cursor.last], ask)
        if store.old is not None:
            other, more = self._grow(store.old, cursor.state, cursor.length, ask)
            tree = other if more > worth else tree
        return tree if tree.is_chain else tree.keep(range(len(tree)))

    def _grow(self, automaton: Automaton, state: int, length: int, ask: Ask) -> tuple[DraftTree, float]:
        """Return the most likely nodes below a match of ``length`` tokens, best first, and their expected number of
        accepted tokens."""
        tree, worth, counts = DraftTree(), 0.0, automaton.counts
        heap: list[tuple[float, int, float, int, int, int]] = []  # -survival, order, est, parent, token, state
        offered = 0

        def push(parent: int, state: int, matched: int, above: float) -> None:
            nonlocal offered
            state, matched = automaton.alive(state, matched)
            below = automaton.nexts[state]
            if matched < self._min_match or not below:
                return
            trust = matched / (matched + 1)
            if len(below) == 1:  # the usual case
                offers = [(*below.items(), trust)]
            else:
                trust /= sum([counts[s] for s in below.values()])
                best = heapq.nlargest(BRANCHES, below.items(), key=lambda item: counts[item[1]])
                offers = [(item, counts[item[1]] * trust) for item in best]
            for (token, target), est in offers:
                if above * est >= FLOOR:
                    heapq.heappush(heap, (-above * est, offered, est, parent, token, target))
                    offered += 1

        push(-1, state, length, 1.0)
        while heap and len(tree) < ask.max_nodes:
            survival, _, est, parent, token, state = heapq.heappop(heap)
            node = tree.add(parent, token, est)
            worth -= survival
            depth = tree.depths[node] + 1
            if depth < ask.max_depth:
                push(node, state, length + depth, -survival)
        return tree, worth
