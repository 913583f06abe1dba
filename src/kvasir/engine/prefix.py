"""The prefix index: the full pages of committed tokens that are in the pools, found by their whole prefix.

A page's key is a chained hash, ``key[i] = blake2b(key[i - 1] + tokens of page i + variant)``, of 128 bits. It is keyed
with bytes drawn when the process starts (one of several replicas gets those of its cluster), so that nobody can
construct a collision. The chain starts from everything
that changes KV (the engine's ``prefix_root``) and the tenant. A page with a row whose keys and values a variant of the
model changed has that variant's content key in its own key, and so in those of all pages behind it; the pages before it
are shared with everybody. The hash only leads to an entry: a walk also compares the tokens and checks that the entry is
a child of the one before, so even a collision never gives a wrong page.

An entry is a ``Node``: one run of ``page_slots`` tokens after one exact prefix, with the page that each cache group has
for it (0: none; a window group keeps few). Nodes form a tree. A node lives as long as it has a page, a child, or a
sequence that will add a child.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from kvasir.client import page_keys
from kvasir.engine.page_log import PageLog
from kvasir.types import Sequence


class Node:
    """One indexed page of tokens. A tenant's root is a node, too: its ``tokens`` holds the tenant's name, and it has no
    pages.

    ``variant``: content key of the variant that changed its keys and values ("": none did).
    ``users``: number of children, plus the sequences whose last indexed page this is. ``pages``: one page id a cache
    group.
    """

    __slots__ = ("key", "tokens", "variant", "parent", "users", "pages")

    def __init__(self, key: bytes, tokens: list, variant: str, parent: Node | None, num_groups: int) -> None:
        self.key = key
        self.tokens = tokens
        self.variant = variant
        self.parent = parent
        self.users = 0
        self.pages = [0] * num_groups


class PrefixIndex:
    """Nodes by key. The index knows page ids but owns no page; ``pages.PageManager`` keeps it up to date. ``log``:
    follows its pages (None: nobody asks)."""

    def __init__(self, root: bytes, page_slots: int, num_groups: int) -> None:
        self.root = root
        self.page_slots = page_slots
        self.num_groups = num_groups
        self.nodes: dict[bytes, Node] = {}
        self.log: PageLog | None = None
        self._secret = os.urandom(32)

    def digest(self, data: bytes) -> bytes:
        """Keyed hash of ``data``: 16 bytes."""
        return page_keys.keyed(self._secret, data)

    def share(self, secret: bytes, weights: str) -> None:
        """Take the key of a cluster, and the weights' content into the root."""
        self._secret = secret
        self.root = self.digest(self.root + weights.encode())

    def forget(self) -> None:
        """Hide all that is indexed so far from later lookups."""
        self.root = self.digest(self.root)
        if self.log is not None:
            self.log.clear()

    def key(self, seq: Sequence, page: int) -> bytes:
        """The key of full page ``page`` of ``seq.tokens`` (-1: of the tenant's root). Keys are computed once and kept
        in ``seq.page_keys``."""
        if page < 0:
            return self._root_key(seq.request.tenant)
        keys, size = seq.page_keys, self.page_slots
        while len(keys) <= page:
            i = len(keys)
            assert (i + 1) * size <= len(seq.tokens), f"page {i} of {seq} is not full"
            before = keys[-1] if keys else self._root_key(seq.request.tenant)
            tokens, variant = seq.tokens[i * size : (i + 1) * size], seq.kv_variant((i + 1) * size)
            keys.append(page_keys.page_key(self.digest, before, tokens, variant))
        return keys[page]

    def walk(self, seq: Sequence, limit: int) -> Iterator[Node]:
        """The nodes of the first ``limit`` pages of ``seq``, as far as they are indexed."""
        node, size = self.nodes.get(self._root_key(seq.request.tenant)), self.page_slots
        if node is None or node.tokens != [seq.request.tenant]:
            return
        for i in range(limit):
            child = self.nodes.get(self.key(seq, i))
            if child is None or child.parent is not node or child.tokens != seq.tokens[i * size : (i + 1) * size]:
                return
            if child.variant != seq.kv_variant((i + 1) * size):
                return
            yield child
            node = child

    def tenant(self, seq: Sequence) -> Node | None:
        """The root of the tenant's tree, created if needed; None: another node has its key (a collision)."""
        return self._node(self._root_key(seq.request.tenant), [seq.request.tenant], "", None)

    def child(self, parent: Node, seq: Sequence, page: int) -> Node | None:
        """The child of ``parent`` for full page ``page`` of ``seq``, created if needed; None: a collision."""
        tokens = seq.tokens[page * self.page_slots : (page + 1) * self.page_slots]
        return self._node(self.key(seq, page), tokens, seq.kv_variant((page + 1) * self.page_slots), parent)

    def put(self, node: Node, group: int, page: int) -> None:
        """Note the page that a group has for ``node``."""
        node.pages[group] = page
        if self.log is not None:
            self.log.stored(node, group)

    def take(self, node: Node, group: int) -> None:
        """Note that a group has no page for ``node`` any more."""
        node.pages[group] = 0
        if self.log is not None:
            self.log.evicted(node, group)
        self.prune(node)

    def prune(self, node: Node | None) -> None:
        """Forget ``node`` and its ancestors as far as nothing uses them."""
        while node is not None and not node.users and not any(node.pages):
            del self.nodes[node.key]
            node = node.parent
            if node is not None:
                node.users -= 1

    def drop(self, node: Node) -> None:
        """Count one user less of ``node``: a sequence no longer has it as its last indexed node."""
        node.users -= 1
        self.prune(node)

    def _root_key(self, tenant: str) -> bytes:
        return page_keys.tenant_key(self.digest, self.root, tenant)

    def _node(self, key: bytes, tokens: list, variant: str, parent: Node | None) -> Node | None:
        node = self.nodes.get(key)
        if node is None:
            node = self.nodes[key] = Node(key, tokens, variant, parent, self.num_groups)
            if parent is not None:
                parent.users += 1
        elif node.parent is not parent or node.tokens != tokens or node.variant != variant:
            return None
        return node
