"""The second gate of new weights: a token must take no longer with them than with the version before.

The two versions take turns, some steps each, so that load and context drift alike for both. What counts is the time of
steps without prompts, drafted or not, for each token of a sequence: drafts that are accepted more often but cost more
than they save do not pass. The verdict comes once enough rows were verified with the new version. Where drafts of the
old one do not pay at all, there is little to compare and little to lose, and it comes sooner.
"""

from __future__ import annotations

from dataclasses import dataclass

# Rows verified with the new version before the verdict; and steps after which it comes all the same, because drafting
# may not pay with it at all.
ROWS, STEPS = 2000, 2048
# Steps of each version after which the new one passes if drafts never paid with the old one, and the part by which a
# token may then take longer: few steps tell less, and a drafter that learns from nothing must not wait.
EARLY_STEPS, EARLY_TOLERANCE = 200, 0.05
# Steps of a turn, of which the first do not count: the controller has to find out what drafts are worth now.
TURN, SETTLING = 48, 8
# Part by which a token may take longer.
TOLERANCE = 0.01


@dataclass(slots=True)
class _Side:
    """Measurements of a version: the time of its steps times their sequences (seconds), tokens, verified rows,
    steps."""

    seconds: float = 0.0
    tokens: int = 0
    rows: int = 0
    steps: int = 0
    paid: int = 0  # steps in which drafts paid

    @property
    def token_seconds(self) -> float:
        return self.seconds / self.tokens if self.tokens else 0.0


class SwapGate:
    """Compares a new version with the old one. ``new``: which of them is to be served now. ``rows``: see ``ROWS``."""

    def __init__(self, rows: int = ROWS, turn: int = TURN, settling: int = SETTLING) -> None:
        self.new = True
        self._rows, self._turn, self._settling = rows, turn, settling
        self._sides = {True: _Side(), False: _Side()}
        self._steps = 0  # of this turn

    def stepped(self, seconds: float, num_seqs: int, tokens: int, rows: int, pays: bool = True) -> bool | None:
        """Take a step without prompts of ``num_seqs`` sequences, which gave ``tokens`` and verified ``rows``. ``pays``:
        whether drafts are found to.

        Returns the verdict: whether the new version passes; None: not known yet. It comes at the end of a turn of the
        old one, so that both have run as long."""
        self._steps += 1
        if self._steps > self._settling:
            side = self._sides[self.new]
            side.seconds += seconds * num_seqs
            side.tokens += tokens
            side.rows += rows
            side.steps += 1
            side.paid += pays
        if self._steps < self._turn:
            return None
        self._steps, ended = 0, self.new
        self.new = not self.new
        new, old = self._sides[True], self._sides[False]
        if ended:
            return None
        if new.rows < self._rows and new.steps < STEPS:
            early = not old.paid and new.steps >= EARLY_STEPS
            return True if early and new.token_seconds <= (1 + EARLY_TOLERANCE) * old.token_seconds else None
        return new.token_seconds <= (1 + TOLERANCE) * old.token_seconds

    @property
    def undecided(self) -> bool:
        """Whether so little was verified with the new version that a newer one may take its place."""
        return self._sides[True].rows < self._rows

    def __str__(self) -> str:
        """The evidence in words."""
        new, old = (self._sides[side].token_seconds * 1e3 for side in (True, False))
        return (
            f"a token took {new:.3f} ms with it and {old:.3f} ms without, over {self._sides[True].rows} verified rows"
        )
