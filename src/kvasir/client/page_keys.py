"""Keys of pages in a prefix index: chained hashes that the engine and the front compute alike. Needs no torch.

A key is ``blake2b(key of the page before + tokens of the page + variant)``, 16 bytes, itself keyed with a secret. The
chain of a tenant starts from the root of the index, which stands for everything that decides keys and values.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b

Digest = Callable[[bytes], bytes]


def keyed(secret: bytes, data: bytes) -> bytes:
    """Keyed hash of ``data``, 16 bytes."""
    return blake2b(data, key=secret, digest_size=16).digest()


def tenant_key(digest: Digest, root: bytes, tenant: str) -> bytes:
    """The key that all pages of a tenant chain from."""
    return digest(root + tenant.encode())


def tenant_digest(secret: bytes, tenant: str) -> bytes:
    """Digest of a tenant's name, 32 bytes, in place of the name on pages that outlast the process."""
    return blake2b(tenant.encode(), key=secret, person=b"kvasir-tenant").digest()[:32]


def page_key(digest: Digest, before: bytes, tokens: Sequence[int], variant: str) -> bytes:
    """The key of a full page of ``tokens`` behind the page with the key ``before``. ``variant``: what changed keys and
    values up to the end of the page."""
    return digest(before + array("q", tokens).tobytes() + variant.encode())
