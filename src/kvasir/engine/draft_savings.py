"""What drafts saved: what plain steps would have taken for the tokens that drafted steps gave, less what those took.

A drafted step of S decodes that found A tokens right gave S + A tokens, which plain steps of the same size give in 1 + A / S steps. What
one of them would have taken is what the step times measured in this run predict (``draft_times.py``); what the step took is measured,
from the end of the step before to its own, drafting included. A plain step right behind a drafted one lost its overlap: what it took
longer than usual is a loss, too, up to its usual time again. Steps that also compute prompts are not compared, and none is before a plain
step of its sort was measured: with ``draft_control=fixed`` that may be never.
"""

from __future__ import annotations

from collections.abc import Callable


class Savings:
    """``plain``: predicted seconds of a plain step of (decodes, their context tokens), or None where none like it was measured yet.
    ``seconds``: saved since the start, below 0 where drafts cost more than they gave; None: no step was compared yet."""

    def __init__(self, plain: Callable[[int, int], float | None]) -> None:
        self._plain = plain
        self._accepted = 0  # since the start, up to the last step
        self.seconds: float | None = None

    def drafted(self, decodes: int, context: int, accepted: int, seconds: float) -> None:
        """A step that verified drafts has ended. ``decodes`` 0: it did more than decode. ``accepted``: tokens since the start."""
        right, self._accepted = accepted - self._accepted, accepted
        usual = self._plain(decodes, context) if decodes else None
        if usual is not None:
            self.seconds = (self.seconds or 0.0) + (1.0 + right / decodes) * usual - seconds

    def behind(self, decodes: int, context: int, seconds: float) -> None:
        """A plain step right behind a drafted one has ended."""
        usual = self._plain(decodes, context)
        if usual is not None and self.seconds is not None:
            self.seconds -= min(max(0.0, seconds - usual), usual)
