"""The prefix index: the full pages of committed tokens that are in the pools, found by their whole prefix.

A page's key is a chained hash, ``key[i] = blake2b(key[i - 1] + tokens of page i + variant)``, of 128 bits. It is keyed
with bytes drawn when the process starts (one of several replicas gets those of its cluster), so that nobody can
construct a collision. The chain starts from everything
that changes KV (the engine's ``prefix_root``) and the tenant. A page with a row whose keys and values a variant of the
model changed has that variant's content key in its own key, and so in those of all pages behind it; the pages before it
are shared with everybody. The hash only leads to an entry: a walk also compares the tokens and checks that the entry is
a child of the one before, so even a collision never gives a wrong page.

An entry is a ``Node``: one run of ``page_slots`` tokens after one exact prefix, with the page that each cache group has
for it (0: none; a window group keeps few), and the slots of lower tiers that hold copies of it (``tiers.py``). Nodes
form a tree. A node lives as long as it has a page, a slot, a child, or a sequence that will add a child.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from kvasir.client import page_keys
from kvasir.engine.pages.page_log import PageLog
from kvasir.kv.tier import Found
from kvasir.types import Sequence


class Node:
    """One indexed page of tokens. A tenant's root is a node, too: its ``tokens`` holds the tenant's name, and it has no
    pages.

    ``variant``: content key of the variant that changed its keys and values ("": none did).
    ``users``: number of children, plus the sequences whose last indexed page this is. ``pages``: one page id a cache
    group. ``children``: by group, the number of children that have a page. ``number``: pages from the start of the
    prefix to the end of this one. ``slots``: by tier (1: the one below the device) and group, where a lower tier holds
    the page.
    """

    __slots__ = ("key", "tokens", "variant", "parent", "users", "pages", "children", "number", "slots")

    def __init__(self, key: bytes, tokens: list, variant: str, parent: Node | None, num_groups: int) -> None:
        self.key = key
        self.tokens = tokens
        self.variant = variant
        self.parent = parent
        self.users = 0
        self.pages = [0] * num_groups
        self.children = [0] * num_groups
        self.number: int = 0 if parent is None else parent.number + 1
        self.slots: dict[tuple[int, int], int] = {}

    def has(self, group: int) -> bool:
        """Whether the device or a lower tier holds the page of a group."""
        return bool(self.pages[group]) or any(g == group for _, g in self.slots)


class PrefixIndex:
    """Nodes by key. The index knows page ids but owns no page; ``pages.PageManager`` keeps it up to date. ``log``:
    follows its pages (None: nobody asks)."""

    def __init__(self, root: bytes, page_slots: int, num_groups: int) -> None:
        self.root = root
        self.page_slots = page_slots
        self.num_groups = num_groups
        self.nodes: dict[bytes, Node] = {}
        self.epoch = 0  # grows when nodes that sequences have found may have lost an ancestor's page
        self.log: PageLog | None = None
        self._secret = os.urandom(32)

    def digest(self, data: bytes) -> bytes:
        """Keyed hash of ``data``: 16 bytes."""
        return page_keys.keyed(self._secret, data)

    def share(self, secret: bytes, weights: str) -> None:
        """Take the key of a cluster, and the weights' content into the root."""
        self._secret = secret
        self.root = self.digest(self.root + weights.encode())

    def restore(self, found: Iterable[Found]) -> dict[bytes, Node]:
        """Nodes by key of pages that a tier holds from an earlier process with the same key, whose prefixes are whole.

        Roots stand among them, and know their tenant by its digest until it is looked up."""
        pages, nodes = {page.key: page for page in found}, dict[bytes, Node]()
        for page in pages.values():
            chain: list[Found] = []  # from the page up to one whose node is known, or to the first of its prefix
            at: Found | None = page
            while at is not None and at.key not in nodes and len(chain) < len(pages):
                chain.append(at)
                at = None if at.tenant else pages.get(at.before)
            top = chain[-1] if chain else None
            if top is None or (top.before not in nodes and not top.tenant):
                continue
            if top.before not in nodes:
                root = self._node(top.before, [top.tenant], "", None)
                if root is None:
                    continue
                nodes[top.before] = root
            for one in reversed(chain):
                key = page_keys.page_key(self.digest, one.before, one.tokens, one.variant)
                node = self._node(key, one.tokens, one.variant, nodes[one.before]) if key == one.key else None
                if node is None:
                    break
                nodes[key] = node
        return nodes

    def forget(self) -> None:
        """Hide all that is indexed so far from later lookups."""
        self.root = self.digest(self.root)
        self.epoch += 1
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
        node = self._root(seq)
        for i in range(limit):
            if node is None or (node := self._next(node, seq, i)) is None:
                return
            yield node

    def deepest(self, seq: Sequence, limit: int, groups: list[int]) -> Node | None:
        """The last of the nodes in a row, of at most ``limit`` pages of ``seq``, that have a page of every group in
        ``groups``, whose pages are evicted children first; None: there is none.

        What was found is kept in ``seq.found``. The next call goes on from there, so that a prompt that waits is not
        walked again from its start in every step.
        """
        epoch, node = seq.found
        if epoch != self.epoch or node is None or node.number > limit or node.key != self.key(seq, node.number - 1):
            node = self._root(seq)
        while node is not None and node.number and not self._has(node, groups):
            node = node.parent
        if node is None or self.nodes.get(node.key) is not node:
            node = self._root(seq)
        while node is not None and node.number < limit:
            child = self._next(node, seq, node.number)
            if child is None or not self._has(child, groups):
                break
            node = child
        if node is not None and not node.number:
            node = None
        seq.found = (self.epoch, node)
        return node

    def _has(self, node: Node, groups: list[int]) -> bool:
        return all(node.pages[group] for group in groups)

    def _root(self, seq: Sequence) -> Node | None:
        """The root of the tenant's tree, if there is one."""
        tenant = seq.request.tenant
        node = self.nodes.get(self._root_key(tenant))
        restored = node is not None and node.parent is None and isinstance(node.tokens[0], bytes)
        if restored and node.tokens == [page_keys.tenant_digest(self._secret, tenant)]:
            node.tokens = [tenant]  # it is known now
        return None if node is None or node.tokens != [tenant] else node

    def _next(self, node: Node, seq: Sequence, page: int) -> Node | None:
        """The child of ``node`` for full page ``page`` of ``seq``, if it is indexed."""
        child, size = self.nodes.get(self.key(seq, page)), self.page_slots
        if child is None or child.parent is not node or child.tokens != seq.tokens[page * size : (page + 1) * size]:
            return None
        return child if child.variant == seq.kv_variant((page + 1) * size) else None

    def tenant(self, seq: Sequence) -> Node | None:
        """The root of the tenant's tree, created if needed; None: another node has its key (a collision)."""
        self._root(seq)
        return self._node(self._root_key(seq.request.tenant), [seq.request.tenant], "", None)

    def child(self, parent: Node, seq: Sequence, page: int) -> Node | None:
        """The child of ``parent`` for full page ``page`` of ``seq``, created if needed; None: a collision."""
        tokens = seq.tokens[page * self.page_slots : (page + 1) * self.page_slots]
        return self._node(self.key(seq, page), tokens, seq.kv_variant((page + 1) * self.page_slots), parent)

    def put(self, node: Node, group: int, page: int) -> None:
        """Note the page that a group has for ``node``."""
        if self.log is not None and not node.has(group):
            self.log.stored(node, group)
        node.pages[group] = page
        node.parent.children[group] += 1

    def take(self, node: Node, group: int) -> None:
        """Note that a group has no page for ``node`` on the device any more."""
        node.pages[group] = 0
        node.parent.children[group] -= 1
        self._lost(node, group)

    def shelve(self, node: Node, tier: int, group: int, slot: int) -> None:
        """Note the slot of a lower tier that holds the page of a group."""
        if self.log is not None and not node.has(group):
            self.log.stored(node, group)
        node.slots[tier, group] = slot

    def unshelve(self, node: Node, tier: int, group: int) -> None:
        """Note that a lower tier does not hold the page of a group any more."""
        del node.slots[tier, group]
        self._lost(node, group)

    def _lost(self, node: Node, group: int) -> None:
        if self.log is not None and not node.has(group):
            self.log.evicted(node, group)
        self.prune(node)

    def prune(self, node: Node | None) -> None:
        """Forget ``node`` and its ancestors as far as nothing uses them."""
        while node is not None and not node.users and not node.slots and not any(node.pages):
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
