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


@dataclass(slots=True)
class Turn:
    """A resident variant. ``began``: number of its turn; ``users``: its running sequences; ``closing``: it takes no
    more of them, because an older one waits for the slot."""

    slot: int
    began: int
    users: int = 0
    closing: bool = False


class Turns:
    """Turns for ``num_slots`` slots. ``fill(slot, key)`` puts a variant into a slot; ``empty(slot)`` is told of one
    that was given up."""

    def __init__(
        self, num_slots: int, fill: Callable[[int, str], None], empty: Callable[[int], None] = lambda slot: None
    ) -> None:
        self.num_slots = num_slots
        self._fill, self._empty = fill, empty
        self._turns: OrderedDict[str, Turn] = OrderedDict()  # by key, least recently used first
        self._free = list(range(num_slots - 1, -1, -1))
        self._promised: set[str] = set()  # keys that get a slot next, ahead of what is younger
        self._began = count()

    def __contains__(self, key: str) -> bool:
        return key in self._turns

    def begin(self) -> None:
        """Begin to fill a step from the queue."""
        self._promised.clear()
        for turn in self._turns.values():
            turn.closing = False

    def may_start(self, key: str) -> bool:
        """Whether a waiting sequence finds a slot for its variant. Asked in the order of the queue, once a step: a
        sequence that finds none may keep later ones from lengthening another variant's turn."""
        turn = self._turns.get(key)
        if turn is not None:
            return not turn.closing
        spare = len(self._free) + sum(not turn.users for turn in self._turns.values())
        if spare > len(self._promised - {key}):
            return True
        first = min((t for t in self._turns.values() if not t.closing), key=lambda t: t.began, default=None)
        if first is not None:
            first.closing = True
        return False

    def promise(self, key: str) -> None:
        """Keep a slot for a sequence that waits for something else, until the next step."""
        if key not in self._turns:
            self._promised.add(key)

    def enter(self, key: str) -> int:
        """The slot of a sequence that starts, filled if need be."""
        turn = self._turns.get(key)
        if turn is None:
            if not self._free:
                self.vacate(next(key for key, turn in self._turns.items() if not turn.users))
            slot = self._free.pop()
            self._fill(slot, key)
            turn = self._turns[key] = Turn(slot, next(self._began))
        self._promised.discard(key)
        self._turns.move_to_end(key)
        turn.users += 1
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

    def check(self) -> None:
        """Assert that every slot is in one place."""
        slots = [turn.slot for turn in self._turns.values()] + self._free
        assert sorted(slots) == list(range(self.num_slots)), "a slot is in no place or in two"
        assert all(turn.users >= 0 for turn in self._turns.values()), "a variant is left twice"
