"""The base of drafters whose guests write the next draft: it keeps the guesses, and learns what a guest is worth.

Legend: K guests of a chain.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

from kvasir.speculation.drafter import Drafter
from kvasir.speculation.tree import DraftTree
from kvasir.types import Guess, Sequence

PRIOR, PRIOR_WEIGHT = 0.5, 8.0  # prior hazard of a depth, and the observations that it counts for
FORGETTING = 0.998  # factor of the counts, at each observation


class SelfDrafter(Drafter):
    """A drafter whose draft is what its guests guessed in the step before.

    A subclass calls ``learn_depths`` in ``attach`` and builds its trees from ``guesses_of``. Guesses are kept in
    ``Sequence.state`` with the number of tokens that they continue: those of an older step are void."""

    place = "same_device"

    def learn_depths(self, count: int) -> None:
        """Start to learn how often drafts of each of ``count`` depths are accepted."""
        self._counts = [[0.0, 0.0] for _ in range(count)]  # by depth: [accepted, tried]

    def answer(self, seq: Sequence, tree: DraftTree, node: int, guesses: list[list[Guess]]) -> None:
        if guesses:
            seq.state[self.name] = len(seq.tokens), guesses
        else:
            seq.state.pop(self.name, None)

    def guesses_of(self, seq: Sequence) -> list[list[Guess]]:
        """Return what the guests behind the sequence's last row guessed; [] where there were none."""
        found = seq.state.get(self.name)
        return found[1] if found is not None and found[0] == len(seq.tokens) else []

    def observe(self, seq: Sequence, tree: DraftTree, path: list[int]) -> None:
        if not tree.tokens:
            return
        deepest = 1 + max(tree.depths[node] for node, parent in enumerate(tree.parents) if parent in {-1, *path})
        for depth, counts in enumerate(self._counts[: min(deepest, len(path) + 1)]):
            counts[0] = FORGETTING * counts[0] + (depth < len(path))
            counts[1] = FORGETTING * counts[1] + 1.0

    def hazards(self) -> list[float]:
        """Chances, by depth, that a draft is accepted when the one before it was."""
        return [(right + PRIOR * PRIOR_WEIGHT) / (tried + PRIOR_WEIGHT) for right, tried in self._counts]

    def promise(self) -> tuple[float, ...]:
        gains, gain = [], 1.0
        for hazard in self.hazards():
            gain *= hazard
            gains.append(gain)
        return tuple(gains)

    def close(self, seq: Sequence) -> None:
        seq.state.pop(self.name, None)


def merged(members: Many[list[Guess]], count: int) -> list[Guess]:
    """The ``count`` likeliest tokens by the mean of what several rows guess for one place."""
    if len(members) == 1:
        return members[0][:count]
    means: dict[int, float] = {}
    for row in members:
        for token, chance in row:
            means[token] = means.get(token, 0.0) + chance / len(members)
    return sorted(means.items(), key=lambda pair: (-pair[1], pair[0]))[:count]
