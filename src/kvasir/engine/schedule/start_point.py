"""Find where a waiting sequence starts: at the end of what the cache, its parent or a lease has computed of it."""

from __future__ import annotations

from kvasir.engine.pages.pages import PageManager
from kvasir.engine.schedule.room import Room
from kvasir.engine.schedule.spans import computed_from
from kvasir.types import Sequence, Status


def start_point(seq: Sequence, pages: PageManager, room: Room) -> tuple[Sequence | None, int]:
    """Return the sequence to fork from (None: the prefix cache) and the first position left to compute: the longest
    reuse wins.

    A lease comes first: a branch of a request that goes on from one must not copy the copy its parent has just begun
    with. Rows whose score or hidden state is wanted must be computed: the cache holds keys and values alone.
    """
    needed = computed_from(seq)
    if needed is None and (holder := room.resumed(seq)) is not None:
        return holder, seq.num_tokens - 1
    hit = pages.match(seq, needed)
    prompt = seq.num_prompt - 1
    if (
        seq.parent is not None
        and seq.parent.status is Status.RUNNING
        and needed is None
        and prompt > hit
        and pages.states is None  # the parent goes on in its page, and has left a snapshot in the index
        and pages.can_fork(seq.parent, prompt)
    ):
        return seq.parent, prompt
    return None, hit
