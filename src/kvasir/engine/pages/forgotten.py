"""The pages of a sequence that forgets tokens: where those go that stay, and what it gives back."""

from __future__ import annotations

from kvasir.engine.pages.page_pool import pages_for
from kvasir.engine.pages.pages import PageManager
from kvasir.types import Sequence


def to_keep(pages: PageManager, seq: Sequence, group: int, left: int) -> list[int] | None:
    """The pages that the ``left`` tokens which stay of ``seq`` move to: the first ones of its table, and fresh ones in
    place of those that others use or that are indexed. None: others use more than there are free pages.

    Where free pages run out, indexed pages that nobody else uses leave the index."""
    pool, table = pages.pools[group], seq.tables[group]
    targets = table[: pages_for(left, pages.page_slots)]
    shared = [i for i, page in enumerate(targets) if pool.refs[page] > 1]
    if len(shared) > pool.num_available:
        return None
    indexed = [i for i, page in enumerate(targets) if pool.refs[page] == 1 and pool.nodes[page] is not None]
    replaced = [*shared, *indexed][: pool.num_available]
    for i in indexed[len(replaced) - len(shared) :]:
        pool.unlist(targets[i])
    for i, page in zip(replaced, pool.take(len(replaced))):
        targets[i] = page
    return targets


def forget(
    pages: PageManager, seq: Sequence, group: int, left: int, targets: list[int], after_step: int | None
) -> None:
    """Give ``seq``, which is not in flight, the pages of ``to_keep`` for its table, once its tokens were moved there.
    From now on its pages are not indexed any more. ``after_step``: the last step that may use the others."""
    pool, table = pages.pools[group], seq.tables[group]
    forgotten = list(seq.forgotten) or [0] * len(seq.tables)
    forgotten[group] = seq.num_computed - left
    seq.forgotten, seq.num_sent = tuple(forgotten), 0
    count, node = pages.tails.get(seq, (0, None))
    if node is not None:
        pages.tails[seq] = count, None
        pages.index.drop(node)
    kept, seq.tables[group] = set(targets), targets
    pool.drop([page for page in table if page not in kept], after_step, pages.visits.kind(seq))
