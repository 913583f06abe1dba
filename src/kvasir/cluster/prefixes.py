"""The front's estimate of which prefixes each replica has cached: those that it was sent or has answered, newest first.

Prompts are cut into blocks, and a block's key is a chained hash over everything before it, as in the engine's own index
(``engine/prefix.py``). A replica is taken to keep as many tokens as its KV pool holds, the least recently used blocks
going first. The replicas tell nothing, so the estimate can be wrong both ways; a wrong one costs time and no token.
"""

from __future__ import annotations

import os
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from hashlib import blake2b

from kvasir.types import Request

# Tokens of a block: the largest page of the engine, so that a known block is whole pages.
BLOCK = 64


class PrefixMap:
    """Keys of blocks by the number of the replica. The hash has a key of its own, so nobody can construct a
    collision."""

    def __init__(self) -> None:
        self._secret = os.urandom(32)
        self._known: defaultdict[int, OrderedDict[bytes, None]] = defaultdict(OrderedDict)

    def keys(self, request: Request, output: Sequence[int] = ()) -> list[bytes]:
        """The keys of the full blocks of the prompt with ``output`` behind it."""
        used = (request.variant, request.hook)
        variant = " ".join(v.kv_key(len(request.prompt_ids)) for v in used if v is not None)
        key = self._digest(repr((request.tenant, variant)).encode())
        tokens = array("q", [*request.prompt_ids, *output]).tobytes()
        size, found = BLOCK * 8, []
        for start in range(0, len(tokens) - size + 1, size):
            key = self._digest(key + tokens[start : start + size])
            found.append(key)
        return found

    def cached(self, replica: int, keys: list[bytes]) -> int:
        """Tokens of the longest known prefix."""
        known = self._known[replica]
        count = next((i for i, key in enumerate(keys) if key not in known), len(keys))
        return count * BLOCK

    def add(self, replica: int, keys: list[bytes], capacity: int) -> None:
        """Note that a replica computes these blocks. ``capacity``: tokens that its KV pool holds."""
        known = self._known[replica]
        for key in reversed(keys):  # the start of a prefix is used with every longer one, so it goes last
            known[key] = None
            known.move_to_end(key)
        while len(known) > max(1, capacity // BLOCK):
            known.popitem(last=False)

    def forget(self, replica: int) -> None:
        """Note that a replica's cache is empty."""
        self._known.pop(replica, None)

    def _digest(self, data: bytes) -> bytes:
        return blake2b(data, key=self._secret, digest_size=16).digest()
