"""How much of a GPU's memory an engine counts as its own."""

import pytest

from kvasir.engine.start.sizing import GIB, OUTSIDE_ALLOCATOR, own_bytes


@pytest.mark.parametrize(
    "before, now, reserved, own, others",
    [
        (100, 80, 19.5, 20, 0),  # code and workspaces lie outside the allocator
        (100, 60, 19.5, 20.5, 19.5),  # an engine that started meanwhile took the rest
        (100, 95, 19.5, 19.5, 0),  # another process gave memory back meanwhile, which does not make ours smaller
        (100, 120, 0, 0, 0),
    ],
)
def test_memory_of_others_is_not_counted_as_ours(before, now, reserved, own, others):
    assert OUTSIDE_ALLOCATOR == GIB
    assert own_bytes(before * GIB, now * GIB, int(reserved * GIB)) == (int(own * GIB), int(others * GIB))
