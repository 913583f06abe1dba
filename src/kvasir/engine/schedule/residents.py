"""The scheduler's view of variants: which sequences can start, given the slots that variants of the model have."""

from __future__ import annotations

from kvasir.types import Sequence


class Residents:
    """Slots of variants. This one has none: every sequence runs on the base model."""

    def begin(self) -> None:
        """Begin to fill a step from the queue."""

    def may_start(self, seq: Sequence) -> bool:
        """Whether a waiting sequence finds a slot for its variant. Asked in the order of the queue, once a step: a
        sequence that finds none may keep later ones from lengthening another variant's turn."""
        return True

    def promise(self, seq: Sequence) -> None:
        """Keep a slot for a sequence that may start here but not elsewhere, so that none that is younger takes it."""

    def enter(self, seq: Sequence) -> None:
        """Give a sequence that starts the slot of its variant (``seq.variant`` or ``seq.hook``)."""

    def leave(self, seq: Sequence) -> None:
        """Take it from a sequence that ends or is preempted. The slot stays as it is while launched steps read it:
        whoever fills it does so behind them."""

    def check(self) -> None:
        """Assert the invariants of the slots. For tests and debugging."""


class AllResidents(Residents):
    """Several kinds of variants, each with slots of its own: a sequence starts once it finds all that it needs."""

    def __init__(self, kinds: list[Residents]) -> None:
        self._kinds = kinds

    def begin(self) -> None:
        for kind in self._kinds:
            kind.begin()

    def may_start(self, seq: Sequence) -> bool:
        found = [kind.may_start(seq) for kind in self._kinds]
        if not all(found):
            for kind, may in zip(self._kinds, found):
                if may:
                    kind.promise(seq)
        return all(found)

    def enter(self, seq: Sequence) -> None:
        for kind in self._kinds:
            kind.enter(seq)

    def leave(self, seq: Sequence) -> None:
        for kind in self._kinds:
            kind.leave(seq)

    def check(self) -> None:
        for kind in self._kinds:
            kind.check()
