"""Pages that a copy to another tier holds: nobody writes to them, takes them or frees them before it has landed."""

from __future__ import annotations

import pytest

from kvasir.engine.pages.page_pool import PagePool
from kvasir.types import PageCopy
from tests.engine.fake import manager
from tests.engine.test_pages import start


def test_a_held_page_is_not_taken_before_its_copy_has_landed():
    pages = manager(5, 4)
    seq = start(pages, 16)
    table, (pool,) = list(seq.tables[0]), pages.pools
    pages.release(seq)
    pool.hold(table[0])
    assert pool.num_available == 3 and sorted(pool.take(3)) == sorted(table[1:]) and pool.num_landing() == 1
    pool.drop(table[1:], None)
    pool.let_go([table[0]], None)
    assert pool.num_available == 4 and not pool.num_landing()
    pages.check([])


def test_a_held_page_is_copied_before_somebody_writes_to_it():
    """The child has the parent's last page alone, and would write to it in place."""
    pages = manager(9, 4)
    parent = start(pages, 8)
    child = start(pages, 1)
    pages.release(child)
    pages.fork(parent, child, 6)
    pages.release(parent)
    shared, (pool,) = child.tables[0][1], pages.pools
    pool.hold(shared)
    child.tokens = [*child.tokens, *range(9)]
    copies: list[PageCopy] = []
    assert pages.grow(child, 8, copies) and [copy.source for copy in copies] == [shared]
    pool.let_go([shared], None)


def test_pages_let_go_wait_for_the_step_in_flight():
    pages = manager(5, 4)
    seq = start(pages, 16)
    (pool,), page = pages.pools, seq.tables[0][0]
    pool.hold(page)
    pages.release(seq, after_step=7)
    pool.let_go([page], 7)
    assert not pool.num_available
    pages.retire(7)
    assert pool.num_available == 4
    pages.check([])


def test_a_sequence_waits_for_pages_that_land_instead_of_others_giving_way():
    pages = manager(5, 4)
    other, seq = start(pages, 8), start(pages, range(50, 58))
    pages.release(other)
    (pool,) = pages.pools
    for page in list(pool.cached):
        pool.hold(page)
    seq.tokens += range(8)
    assert not pages.grow(seq, 16, []) and pages.awaits(seq, 16) and not pages.awaits(seq, 17)


@pytest.mark.parametrize("broken", [False, True])
def test_the_check_finds_holds_that_were_lost(broken, monkeypatch):
    """Negative control: a pool that forgets holds fails its own check."""
    pages = manager(5, 4)
    seq = start(pages, 16)
    pool, page = pages.pools[0], seq.tables[0][0]
    if broken:
        monkeypatch.setattr(PagePool, "hold", lambda self, page: self.share(page))
    pool.hold(page)
    if broken:
        with pytest.raises(AssertionError, match="references"):
            pages.check([seq])
    else:
        pages.check([seq])
