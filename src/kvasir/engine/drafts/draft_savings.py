"""Seconds that drafts saved: what plain steps would have taken for the tokens that drafted steps gave, minus what those
took.

A drafted step of S decodes that found A tokens right gave S + A tokens, which plain steps of the same size give in 1 +
A / S steps. How long one of them would have taken is predicted by the step times measured in this run
(``draft_times.py``). How long the drafted step took is measured from the end of the step before to its own, drafting
included. A plain step right behind a drafted one lost its overlap, so what it took beyond its usual time counts as a
loss, up to that time again. Steps that also compute prompts are not compared. Nothing is compared before a plain step
of the same sort was measured, which may be never with ``draft_control=fixed``.
"""

from __future__ import annotations

from collections.abc import Callable


class Savings:
    """Running total. ``plain(decodes, context tokens)`` predicts the seconds of a plain step; None where none of its
    sort was measured yet. ``seconds`` were saved since the start: negative where drafts cost more than they gave, None
    before a step was compared."""

    def __init__(self, plain: Callable[[int, int], float | None]) -> None:
        self._plain = plain
        self._accepted = 0  # tokens since the start, up to the last step
        self.seconds: float | None = None

    def drafted(self, decodes: int, context: int, accepted: int, seconds: float) -> None:
        """Count a step that verified drafts. ``decodes`` is 0 if it did more than decode; ``accepted`` counts tokens
        since the start."""
        right, self._accepted = accepted - self._accepted, accepted
        usual = self._plain(decodes, context) if decodes else None
        if usual is not None:
            self.seconds = (self.seconds or 0.0) + (1.0 + right / decodes) * usual - seconds

    def behind(self, decodes: int, context: int, seconds: float) -> None:
        """Count a plain step right behind a drafted one."""
        usual = self._plain(decodes, context)
        if usual is not None and self.seconds is not None:
            self.seconds -= min(max(0.0, seconds - usual), usual)
