"""The full pages that a step in the making, or one in flight, computes: who needs the same page waits a step for a hit."""

from __future__ import annotations

from collections.abc import Iterable

from kvasir.engine.pages import PageManager
from kvasir.engine.spans import Step, unscored_from
from kvasir.types import Sequence


class PagesAhead:
    """Their prefix keys, from the running sequences and what the step grants them so far."""

    def __init__(self, pages: PageManager, running: Iterable[Sequence], step: Step) -> None:
        self._pages = pages
        self._keys: set[bytes] = set()
        for seq in running:
            length = seq.num_ahead + (step.spans[seq].length if seq in step.spans else 0)
            if length > 1:
                self.add(seq, length)

    def add(self, seq: Sequence, length: int) -> None:
        """``length`` rows of ``seq`` from the first that is not committed are being computed, pages in part included."""
        size = self._pages.page_slots
        for page in range(seq.num_computed // size, -(-(seq.num_computed + length) // size)):
            if key := self._pages.page_key(seq, page):
                self._keys.add(key)

    def hold_next_of(self, seq: Sequence, num_hit: int) -> bool:
        """Whether the page that ``seq`` would compute after a hit of ``num_hit`` tokens is among them."""
        if not self._keys or unscored_from(seq) is not None or num_hit + self._pages.page_slots >= seq.num_tokens:
            return False
        return self._pages.page_key(seq, num_hit // self._pages.page_slots) in self._keys
