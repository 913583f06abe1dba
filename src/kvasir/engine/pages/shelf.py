"""The slots of one cache group in one tier below the device, and which node of the prefix index each holds.

A slot is *free*, *stored* (it holds a node's page), being *written*, or *dropped*. Copies hold the slots that they
read, which are then not written over.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice

from kvasir.engine.pages.prefix import Node, PrefixIndex

# Stored slots that are looked at, the least recently used first, for one that no copy holds.
SEARCH = 64


class Shelf:
    """Slots of ``group`` in ``tier`` (1: the one below the device)."""

    def __init__(self, tier: int, group: int, num_slots: int, index: PrefixIndex) -> None:
        self.tier, self.group, self.num_slots = tier, group, num_slots
        self.free = list(range(num_slots - 1, -1, -1))
        self.nodes: OrderedDict[int, Node] = OrderedDict()  # of stored slots, least recently used first
        self.written: set[int] = set()
        self.dropped: set[int] = set()  # slots that hold nothing, and that a copy still reads
        self.holds: Counter[int] = Counter()  # number of copies that read each slot
        self.fresh: dict[int, None] | None = None  # stored slots that no tier below has; None: there is no tier below
        self.evicted = [0, 0]  # slots written over: pages that no other level had, and pages that one had
        self._index = index

    def leaving(self) -> Iterator[int]:
        """The stored slots in the order in which they will be written over."""
        return iter(self.nodes)

    def victim(self) -> int | None:
        """The stored slot to write over next; None: copies hold all that were looked at."""
        return next((slot for slot in islice(self.nodes, SEARCH) if not self.holds[slot]), None)

    def reserve(self) -> int:
        """Take a free slot to write to it."""
        slot = self.free.pop()
        self.written.add(slot)
        return slot

    def settle(self, slot: int, node: Node) -> None:
        """Note that a slot that was reserved holds the page of ``node`` now."""
        self.written.remove(slot)
        self.nodes[slot] = node
        self._index.shelve(node, self.tier, self.group, slot)
        if self.fresh is not None and (self.tier + 1, self.group) not in node.slots:
            self.fresh[slot] = None

    def release(self, slot: int) -> None:
        """Give back a slot that was reserved and holds nothing."""
        self.written.remove(slot)
        self.free.append(slot)

    def touch(self, slot: int) -> None:
        """Note that a stored slot was used."""
        self.nodes.move_to_end(slot)

    def drop(self, slot: int) -> Node:
        """Forget what a stored slot holds, and give it back once no copy reads it. Returns the node that has lost
        it."""
        node = self.nodes.pop(slot)
        if self.fresh is not None:
            self.fresh.pop(slot, None)
        (self.dropped.add if self.holds[slot] else self.free.append)(slot)
        self._index.unshelve(node, self.tier, self.group)
        return node

    def hold(self, slot: int) -> None:
        """Keep a stored slot for a copy, until ``let_go``."""
        self.holds[slot] += 1

    def let_go(self, slots: Iterable[int], after_step: int | None = None) -> None:
        """End the holds of copies that have landed. No step uses a slot, so ``after_step`` means nothing here."""
        self.holds.subtract(slots)
        self.holds = +self.holds
        for slot in [slot for slot in self.dropped if not self.holds[slot]]:
            self.dropped.remove(slot)
            self.free.append(slot)

    def check(self) -> None:
        """Assert the invariants of the slots. Slow: for tests and debugging."""
        places = Counter([*self.free, *self.nodes, *self.written, *self.dropped])
        assert places == Counter(range(self.num_slots)), "a slot is in no place or in two"
        assert all(slot in self.nodes or slot in self.dropped for slot in self.holds), (
            "a copy reads a slot that holds nothing"
        )
        assert self.fresh is None or all(slot in self.nodes for slot in self.fresh)
        for slot, node in self.nodes.items():
            assert node.slots.get((self.tier, self.group)) == slot, f"slot {slot}: stale node"
            assert self._index.nodes.get(node.key) is node, f"slot {slot}: its node is not indexed"
