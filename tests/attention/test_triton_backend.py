"""What the Triton backend refuses, and that a capable site is accepted."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch

from kvasir.attention.backend import AttentionBackend, AttentionSpec, Site
from kvasir.kernels import _triton
from kvasir.technique import load

GOOD = Site("cuda", torch.bfloat16, "plain", 16, (AttentionSpec(32, 8, 128, 0.1), AttentionSpec(32, 8, 128, 0.1, window=64)))
BAD = {"device": "cpu", "dtype": torch.float64, "codec_kernel": "nvfp4", "page_slots": 24, "specs": (AttentionSpec(4, 4, 512, 0.1),)}


def reasons(site: Site) -> list[str]:
    return load("kvasir.attention.backends", "triton", AttentionBackend).why_not(site)


@pytest.mark.skipif(not _triton.AVAILABLE, reason="Triton is not installed")
def test_a_gpu_with_plain_pages_is_accepted():
    assert reasons(GOOD) == []


@pytest.mark.skipif(_triton.INTERPRETED, reason="the interpreter runs kernels on the CPU")
@pytest.mark.parametrize("field", BAD)
def test_each_lack_is_named(field):
    assert len(reasons(dataclasses.replace(GOOD, **{field: BAD[field]}))) == 1


@pytest.mark.skipif(_triton.INTERPRETED, reason="the interpreter runs kernels on the CPU")
def test_every_reason_is_given_at_once():
    assert len(reasons(dataclasses.replace(GOOD, **BAD))) == len(BAD)


@pytest.mark.parametrize("name, package", [("flash_attn", "flash_attn_interface"), ("flashinfer", "flashinfer")])
def test_a_missing_package_is_a_reason(name, package, monkeypatch):
    chosen, find = load("kvasir.attention.backends", name, AttentionBackend), importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda x, *rest: None if x == package else find(x, *rest))
    assert any(f"{package}" in reason and "not installed" in reason for reason in chosen.why_not(GOOD))


def test_a_missing_triton_is_a_reason(monkeypatch):
    monkeypatch.setattr(_triton, "AVAILABLE", False)
    assert reasons(GOOD) == ["Triton is not installed"]
