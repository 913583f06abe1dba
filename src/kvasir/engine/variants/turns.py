"""Slots of the device that variants take in turns.

A variant has a slot from the start of its first sequence, and keeps it when the last one ends, until another one needs
the slot: the one used least recently goes. A sequence whose variant finds no slot waits in the queue, and the variant
whose turn began first takes no more sequences until it has given up its slot. So turns go by age, and none starves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Protocol


class Filling(Protocol):
    """A slot that is filled while steps run. ``done``: whatever is launched now finds the variant there."""

    @property
    def done(self) -> bool: ...

    def advance(self) -> None:
        """Go on without waiting."""

    def finish(self) -> None:
        """Fill the rest now."""


@dataclass(slots=True)
class Turn:
    """A resident variant. ``began``: number of its turn; ``filling``: what its slot lacks (None: nothing); ``kept``: a
    sequence will start with it soon, so it gives way to none before the next step; ``users``: its running sequences;
    ``closing``: it takes no more of them, because an older one waits for the slot."""

    slot: int
    began: int
    filling: Filling | None = None
    kept: bool = False
    users: int = 0
    closing: bool = False

    @property
    def may_go(self) -> bool:
        """Whether another variant may have the slot now."""
        return not self.users and self.filling is None and not self.kept


class Turns:
    """Turns for ``num_slots`` slots. ``fill(slot, key)`` puts a variant into a slot: at once, as its first sequence
    starts, or with ``ahead`` while steps run before it starts, and one slot at a time. ``empty(slot)`` is told of one
    that was given up.

    ``filled``: slots so far."""

    def __init__(
        self,
        num_slots: int,
        fill: Callable[[int, str], Filling | None],
        empty: Callable[[int], None] = lambda slot: None,
        ahead: bool = False,
    ) -> None:
        self.num_slots, self.filled = num_slots, 0
        self._fill, self._empty, self._ahead = fill, empty, ahead
        self._turns: OrderedDict[str, Turn] = OrderedDict()  # by key, least recently used first
        self._free = list(range(num_slots - 1, -1, -1))
        self._promised: set[str] = set()  # keys that get a slot next, ahead of what is younger
        self._began = count()

    def __contains__(self, key: str) -> bool:
        return key in self._turns

    def begin(self) -> None:
        """Begin to fill a step from the queue, and go on with the slot that is being filled."""
        self._promised.clear()
        for turn in self._turns.values():
            turn.closing = turn.kept = False
        if (turn := self._being_filled()) is not None and turn.filling is not None:
            turn.filling.advance()
            self._look_at(turn)

    def finish(self) -> bool:
        """Fill the slot that is being filled. Returns whether there is one."""
        if (turn := self._being_filled()) is None or turn.filling is None:
            return False
        turn.filling.finish()
        self._look_at(turn)
        return True

    def may_start(self, key: str) -> bool:
        """Whether a waiting sequence finds a slot for its variant. Asked in the order of the queue, once a step: a
        sequence that finds none may keep later ones from lengthening another variant's turn."""
        turn = self._turns.get(key)
        if turn is not None:
            return turn.filling is None and not turn.closing
        spare = len(self._free) + sum(turn.may_go for turn in self._turns.values())
        if spare > len(self._promised - {key}):
            if self._ahead and self._being_filled() is None:
                self._begin_turn(key)
            return not self._ahead
        open_turns = (turn for turn in self._turns.values() if turn.users and not turn.closing)
        first = min(open_turns, key=lambda t: t.began, default=None)
        if first is not None:
            first.closing = True
        return False

    def promise(self, key: str) -> None:
        """Keep a slot for a sequence that waits for something else, until the next step."""
        if key in self._turns:
            self._turns[key].kept = True
        else:
            self._promised.add(key)

    def enter(self, key: str) -> int:
        """The slot of a sequence that starts, filled if need be."""
        turn = self._turns.get(key) or self._begin_turn(key)
        self._promised.discard(key)
        self._turns.move_to_end(key)
        turn.users += 1
        turn.kept = False
        return turn.slot

    def leave(self, key: str) -> None:
        """Count a sequence off that ends or is preempted."""
        self._turns[key].users -= 1

    def vacate(self, key: str) -> None:
        """Give up the slot of a variant that has no sequences, if it has one."""
        turn = self._turns.pop(key, None)
        if turn is not None:
            self._free.append(turn.slot)
            self._empty(turn.slot)

    def _begin_turn(self, key: str) -> Turn:
        """Begin to fill a slot with a variant."""
        if not self._free:
            self.vacate(next(key for key, turn in self._turns.items() if turn.may_go))
        slot = self._free.pop()
        turn = self._turns[key] = Turn(slot, next(self._began), self._fill(slot, key))
        self.filled += turn.filling is None
        return turn

    def _being_filled(self) -> Turn | None:
        return next((turn for turn in self._turns.values() if turn.filling is not None), None)

    def _look_at(self, turn: Turn) -> None:
        """Let sequences start with a slot once it is filled."""
        if turn.filling is not None and turn.filling.done:
            turn.filling, turn.kept = None, True
            self.filled += 1

    def check(self) -> None:
        """Assert that every slot is in one place."""
        slots = [turn.slot for turn in self._turns.values()] + self._free
        assert sorted(slots) == list(range(self.num_slots)), "a slot is in no place or in two"
        assert all(turn.users >= 0 for turn in self._turns.values()), "a variant is left twice"
