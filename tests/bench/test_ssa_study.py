"""The emulation of ScaleSearchAttention: each part lowers the error, and what is kept apart is exact."""

from __future__ import annotations

import torch

from kvasir_lab.studies import ssa_study
from kvasir_lab.studies.ssa_study import ARMS, Parts, attend, drawn, rounded


def error(q, k, v, parts):
    return float((attend(q, k, v, parts) - attend(q, k, v, None)).square().sum())


def test_search_lowers_the_error_of_every_block():
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    plain, searched = ((rounded(x, search) - x).square().unflatten(-1, (-1, 16)).sum(-1) for search in (False, True))
    assert bool((searched <= plain).all()) and 0.70 < float(searched.sum() / plain.sum()) < 0.76


def test_parts(monkeypatch):
    inputs = drawn(2, 256, 64, 16.0)
    whole = error(*inputs, ARMS["scale search attention"])
    assert whole < error(*inputs, ARMS["the same without search"])
    assert error(*inputs, ARMS["search, rotation, split"]) < error(*inputs, ARMS["search, rotation"]) / 2
    assert error(*inputs, Parts(recent=256)) < 1e-6  # all keys in full precision
    monkeypatch.setattr(ssa_study, "rounded", lambda x, search: x)
    for parts in ARMS.values():
        assert error(*inputs, parts) < 1e-6
