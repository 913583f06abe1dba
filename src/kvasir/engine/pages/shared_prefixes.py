"""A prefix index whose keys others compute, too: the router of a cluster, which follows its pages."""

from __future__ import annotations

from kvasir.engine.pages.page_log import PageLog
from kvasir.engine.pages.pages import PageManager
from kvasir.types import ModelInfo


def share(pages: PageManager, info: ModelInfo, secret: bytes) -> PageLog | None:
    """Key the prefix index with ``secret`` and name the weights of ``info`` in its root, so that whoever knows both
    computes the same keys; note root and page size in ``info``. Nothing may be indexed yet. Returns the log of its
    pages; None: there is no prefix caching."""
    index = pages.index
    if index is None:
        return None
    assert not index.nodes, "the keys of indexed pages would change"
    index.share(secret, info.weights)
    whole = [pool.group for pool in pages.pools if pool.window is None]
    index.log = PageLog(whole[0] if whole else 0)
    info.prefix_root, info.page_slots = index.root, index.page_slots
    return index.log
