"""The lab's recurrent layers by fla-core's own kernels, where the package is installed, and by the products that take
one kernel's place on some GPUs. The interpreter cannot compute in bf16, so this is in fp32."""

from __future__ import annotations

import importlib

import pytest
import torch

from kvasir.kernels import _triton
from kvasir_lab import delta_products, fused
from kvasir_lab.model import Shape

SHAPE = Shape(layers=1, recurrent=(0,), key_heads=1, value_heads=2, state_dim=16)


class Index(int):
    """A loop's index: compiled kernels may convert it."""

    def to(self, dtype):
        return self


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """The package's kernels without tuning, and with loops whose indices are no plain numbers."""
    pytest.importorskip("fla")
    if not _triton.INTERPRETED:
        pytest.skip("tests/lab/test_delta_chunks.py runs them on a GPU")
    from triton.runtime.autotuner import Autotuner

    monkeypatch.setattr(Autotuner, "_bench", lambda self, *given, config, **options: [0.0, 0.0, 0.0])
    for name in ("common.chunk_delta_h", "common.chunk_o", "gated_delta_rule.wy_fast", "gated_delta_rule.chunk_fwd"):
        part = importlib.import_module(f"fla.ops.{name}")
        monkeypatch.setattr(part, "range", lambda *ends: map(Index, range(*map(int, ends))), raising=False)


def test_kernels_and_products_agree_with_the_scan(monkeypatch):
    """One test, because the package keeps what is registered."""
    monkeypatch.setattr(fused, "TOLERANCE", 1e-4)
    assert fused.why_no_chunks(SHAPE, "cpu", torch.float32) is None
    plain, calls = delta_products.chunk_products, []

    def wrong(**given):
        calls.append(given["cu_seqlens"])
        return *plain(**given)[:3], torch.zeros_like(given["g"])

    for products, said in ((wrong, "its decay gradient is off by"), (plain, None)):
        monkeypatch.setattr(delta_products, "chunk_products", products)
        delta_products.register_if_needed(always=True)
        found = fused.why_no_chunks(SHAPE, "cpu", torch.float32)
        assert (found is None) if said is None else found.startswith(said)
    assert len(calls) == 1
