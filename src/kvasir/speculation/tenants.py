"""A drafter in two versions: one that learns, for the tenants who agreed, and one that never changes, for all others.

The two share nothing. What was learned from some tenants therefore cannot be told from how quickly another's tokens
come. They cost twice the memory, and a step that drafts for both runs both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from typing import Any

from kvasir.speculation.drafter import Ask, Capture, Drafter, Host, ServedModel
from kvasir.speculation.tree import DraftTree
from kvasir.types import Sequence


class Tenants(Drafter):
    """Asks ``learned`` for the sequences that ``agreed`` says yes to, and ``first`` for the others."""

    learns = True

    def __init__(self, first: Drafter, learned: Drafter, agreed: Callable[[Sequence], bool]) -> None:
        super().__init__()
        self.first, self.learned, self._agreed = first, learned, agreed
        self.name, self.place, self.topology = first.name, first.place, first.topology
        self.exact = first.exact

    @property
    def parts(self) -> list[Drafter]:
        return [self.first, self.learned]

    @property
    def version(self) -> int:  # type: ignore[override]
        """The version of the weights that learn."""
        return self.learned.version

    @version.setter
    def version(self, version: int) -> None:
        self.learned.version = version

    def _of(self, seq: Sequence) -> Drafter:
        return self.learned if self._agreed(seq) else self.first

    def prepare(self, host: Host) -> None:
        for drafter in self.parts:
            drafter.prepare(host)

    def attach(self, model: ServedModel, capture: Capture | None = None) -> None:
        for drafter in self.parts:
            drafter.attach(model, capture)
        self.hidden_layers = self.first.hidden_layers

    def device_bytes(self, model: ServedModel) -> int:
        return sum(drafter.device_bytes(model) for drafter in self.parts)

    def propose(self, asks: list[Ask]) -> Many[DraftTree]:
        trees = [DraftTree() for _ in asks]
        for drafter in self.parts:
            mine = [i for i, ask in enumerate(asks) if self._of(ask.seq) is drafter]
            if mine:
                for i, tree in zip(mine, drafter.propose([asks[i] for i in mine])):
                    # Counted apart: what the controller has learnt of one says nothing about the other.
                    tree.source = drafter.name if drafter is self.first else f"{drafter.name}.learned"
                    trees[i] = tree
        return trees

    def open(self, seq: Sequence) -> None:
        self._of(seq).open(seq)

    def ingest(self, seq: Sequence, hidden: Any, start: int) -> None:
        self._of(seq).ingest(seq, hidden, start)

    def observe(self, seq: Sequence, tree: DraftTree, path: list[int]) -> None:
        self._of(seq).observe(seq, tree, path)

    def close(self, seq: Sequence) -> None:
        self._of(seq).close(seq)

    def weights(self) -> Mapping[str, Any]:
        return self.learned.weights()

    def export(self, weights: Mapping[str, Any], folder: Any) -> None:
        self.learned.export(weights, folder)

    def state_bytes(self) -> int:
        return sum(drafter.state_bytes() for drafter in self.parts)
