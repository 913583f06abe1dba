"""The number of pages that a sequence has: exactly what its positions and windows need."""

from __future__ import annotations

import pytest

from tests.engine.fake import FULL, manager, sequence, window_group


@pytest.mark.parametrize("page_slots", [1, 3, 4])
@pytest.mark.parametrize("window", [None, 1, 5])
def test_a_sequence_has_exactly_the_pages_that_its_positions_need(page_slots, window):
    """Mutations: ``grow`` takes a page too many; ``truncate`` keeps one; ``commit`` keeps a page that the window has
    left, or ``grow`` takes two for the last position of a page. The bound is exact from below and from above."""
    pages = manager(60, page_slots, (FULL if window is None else window_group(window),))
    seq = sequence(40)
    pages.admit(seq, 0)

    def numbers(first: int, end: int) -> list[bool]:
        return [i >= first // page_slots for i in range(-(-end // page_slots))]

    for step, look_ahead in zip([1, 2, 3, 1, 5, 8, 1, 1, 1, 7], [0, 4, 1, 0, 9, 2, 3, 1, 5, 0]):
        before = seq.num_computed
        end = before + step
        sees = (0, 0) if window is None else tuple(max(0, p - window + 1) for p in (before, end))
        assert pages.grow(seq, end + look_ahead, [])
        assert [page > 0 for page in seq.tables[0]] == numbers(sees[0], end + look_ahead)
        seq.num_computed = end
        pages.commit(seq)
        pages.truncate(seq, end)
        assert [page > 0 for page in seq.tables[0]] == numbers(sees[1], end)
        if window is not None:
            assert sum(page > 0 for page in seq.tables[0]) <= pages._peak(pages.pools[0], 1)
        pages.check([seq])
