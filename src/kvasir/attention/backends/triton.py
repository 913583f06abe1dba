"""Triton: own kernels for everything, on GPUs (and, for tests, in Triton's interpreter)."""

from __future__ import annotations

from kvasir.attention.paged import PagedBackend


class TritonBackend(PagedBackend):
    rank = 10
