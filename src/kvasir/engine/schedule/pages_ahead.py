"""Full pages that are being computed, or copied from a lower tier: who needs one of them waits for a cache hit."""

from __future__ import annotations

from collections.abc import Iterable

from kvasir.engine.pages.pages import PageManager
from kvasir.engine.schedule.spans import Step, computed_from
from kvasir.types import Sequence


class PagesAhead:
    """Prefix keys of the pages that the step in flight computes, or that ``step`` grants running sequences so far."""

    def __init__(self, pages: PageManager, running: Iterable[Sequence], step: Step) -> None:
        self._pages = pages
        self._keys: set[bytes] = set()
        for seq in running:
            length = seq.num_ahead + (step.spans[seq].length if seq in step.spans else 0)
            if length > 1:
                self.add(seq, length)

    def add(self, seq: Sequence, length: int) -> None:
        """Note that ``length`` rows of ``seq`` are being computed, from the first that is not committed. Pages that
        these rows touch only in part count, too."""
        size = self._pages.page_slots
        for page in range(seq.num_computed // size, -(-(seq.num_computed + length) // size)):
            if key := self._pages.page_key(seq, page):
                self._keys.add(key)

    def hold_next_of(self, seq: Sequence, num_hit: int) -> bool:
        """Whether the page that ``seq`` would compute first, after a hit of ``num_hit`` tokens, is being computed or
        copied."""
        if self._pages.arriving(seq):
            return True
        if not self._keys or computed_from(seq) is not None or num_hit + self._pages.page_slots >= seq.num_tokens:
            return False
        return self._pages.page_key(seq, num_hit // self._pages.page_slots) in self._keys
