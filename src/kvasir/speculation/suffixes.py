"""What followed a text's longest known suffix, in the texts of a store: suffix automata in plain Python.

Each new token extends the automaton of its store in amortised constant time, so live texts learn from each other at once; a
text's place in it *is* its longest match, which no step has to look for. An automaton knows every substring of its texts, to
any length, in at most two states a token.

A store is bounded by two *generations*: when the young automaton holds ``max_tokens`` tokens it becomes the old one, which is
read and no longer extended, and what was old is gone. Only tokens that added a state count, so a prompt that many samples
share takes its memory once.

The same in C, with the same results, is ``suffixes_native.py``; this is what it is tested against, and what runs without it.
"""

from __future__ import annotations

import heapq
import weakref
from dataclasses import dataclass, field

from kvasir.speculation.drafter import Ask
from kvasir.speculation.tree import DraftTree

CONTEXT = 32  # tokens read again by a text that lives on into a new generation
MAX_COUNTED = 64  # suffixes of a place whose counts are kept up: the longest ones
BRANCHES = 4  # continuations of a place that are proposed: those seen most often
FLOOR = 0.03  # of the chance that a node is reached and right: below, it is not worth the time to look at
STATE_BYTES = 420  # a state: by measurement


class Automaton:
    """Of many texts at once. State 0 is the empty string; a state stands for the suffixes that end at the same places.

    ``nexts``: token -> state; ``links``: the state of the longest suffix that ends at more places; ``lengths``: of the longest
    string; ``counts``: how often it was seen. ``num_tokens``: those that added a state.
    """

    def __init__(self) -> None:
        self.nexts: list[dict[int, int]] = [{}]
        self.links, self.lengths, self.counts = [-1], [0], [0]
        self.num_tokens = 0

    def extend(self, last: int, token: int) -> int:
        """The state of the text that ended in ``last``, one token later."""
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


@dataclass(slots=True, eq=False, weakref_slot=True)
class Store:
    """Texts that learn from each other: two generations of them. ``age`` counts the generations."""

    young: Automaton = field(default_factory=Automaton)
    old: Automaton | None = None
    age: int = 0


@dataclass(slots=True, eq=False)
class Cursor:
    """Where a text stands: ``end`` tokens of it were read, the last ones are ``context``; its state in the young automaton; its
    longest match in the old."""

    store: Store
    end: int
    age: int = -1
    last: int = 0
    state: int = 0
    length: int = 0
    context: list[int] = field(default_factory=list)


class Suffixes:
    """Stores, and cursors in them. ``max_tokens``: of a generation; ``min_match``: tokens that must have been seen before what is
    proposed."""

    def __init__(self, max_tokens: int, min_match: int) -> None:
        self._max_tokens, self._min_match = max_tokens, min_match
        self._stores: weakref.WeakSet[Store] = weakref.WeakSet()

    @property
    def num_tokens(self) -> int:
        """Held in all stores."""
        return sum(a.num_tokens for a in self._automata())

    @property
    def num_bytes(self) -> int:
        return STATE_BYTES * sum(len(a.links) for a in self._automata())

    def _automata(self) -> list[Automaton]:
        return [a for s in self._stores for a in (s.young, s.old) if a is not None]

    def store(self) -> Store:
        """An empty one, which lives as long as somebody holds it."""
        store = Store()
        self._stores.add(store)
        return store

    def clear(self, store: Store) -> None:
        """Forget its texts. Live ones start anew with their context."""
        store.young, store.old, store.age = Automaton(), None, store.age + 1

    def cursor(self, store: Store, end: int) -> Cursor:
        """Of a text that will be read from token ``end`` on."""
        return Cursor(store, end)

    def read(self, cursors: list[Cursor], news: list[list[int]]) -> None:
        """The next tokens of each."""
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
        """Read, all first, so that they learn from each other; then a tree for each, with the most likely path first."""
        self.read(cursors, news)
        return [self._tree(cursor, ask) for cursor, ask in zip(cursors, asks)]

    def _read(self, cursor: Cursor, token: int) -> None:
        store = cursor.store
        cursor.last = store.young.extend(cursor.last, token)
        if store.old is not None:
            cursor.state, cursor.length = store.old.follow(cursor.state, cursor.length, token)

    def _tree(self, cursor: Cursor, ask: Ask) -> DraftTree:
        """Of the two generations', the one that promises more right tokens (SuffixDecoding's score)."""
        store = cursor.store
        if cursor.age != store.age:
            return DraftTree()
        tree, worth = self._grow(store.young, cursor.last, store.young.lengths[cursor.last], ask)
        if store.old is not None:
            other, more = self._grow(store.old, cursor.state, cursor.length, ask)
            tree = other if more > worth else tree
        return tree if tree.is_chain else tree.keep(range(len(tree)))

    def _grow(self, automaton: Automaton, state: int, length: int, ask: Ask) -> tuple[DraftTree, float]:
        """The most likely nodes below a match of ``length`` tokens, best first; and how many of them will be right."""
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
            if len(below) == 1:  # nearly always
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
