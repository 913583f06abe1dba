"""Attention's kernels are compiled before anybody meets them, and nothing runs for it."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from kvasir.attention.backend import AttentionBackend, Site
from kvasir.decoding.sampler import Sampler
from kvasir.engine import runner as runners
from kvasir.kernels._triton import Launches
from kvasir.kv.codec import Codec
from kvasir.kv.pool import KVPool
from kvasir.layers.spec import DenseSpec, GQASpec, NormSpec, RopeSpec
from kvasir.layers.weights import Placement
from kvasir.models.decoder import Decoder
from kvasir.models.loader import fill_random
from kvasir.models.spec import LayerSpec, ModelSpec
from kvasir.technique import load

pytest.importorskip("triton")
WIDE = LayerSpec(GQASpec(8, 2, 64, 0.125), DenseSpec(64), RopeSpec(1000.0, 64), NormSpec())
NEAR = replace(WIDE, mixer=replace(WIDE.mixer, window=40))


class Recorded(Launches):
    def __init__(self) -> None:
        self.kernels: list[str] = []

    def __call__(self, kernel, grid, *args, **named):
        self.kernels.append(kernel.__name__)


def runner_on(codec_name: str) -> runners.Runner:
    spec = ModelSpec(family="none", hidden_size=64, vocab_size=56, max_position=9000, layers=(WIDE, NEAR), final_norm=NormSpec())
    model = Decoder(spec, Placement(torch.device("cpu"), torch.bfloat16))
    fill_random(model, 0)
    codec, groups = load("kvasir.kv.codecs", codec_name, Codec), spec.cache_groups()
    pool = KVPool(groups, codec, [4] * len(groups), codec.page_slots, torch.device("cpu"), torch.bfloat16)
    backend = load("kvasir.attention.backends", "triton", AttentionBackend)
    backend.prepare(Site("cpu", torch.bfloat16, codec.kernel, codec.page_slots, tuple(layer.mixer.attention() for layer in spec.layers)))
    return runners.Runner(model, pool, backend, Sampler(56, 56, 40, torch.device("cpu"), ()), torch.device("cpu"), max_model_len=9000)


def test_every_kernel_is_asked_for_and_none_is_left_for_later(monkeypatch):
    asked, warned = Recorded(), []

    @contextmanager
    def compiling():
        yield asked

    monkeypatch.setattr(runners, "compiling", compiling)
    monkeypatch.setattr(runners.log, "warning", lambda *what: warned.append(what))
    runner = runner_on("plain")
    runner.compile_attention()
    assert {"_decode_attention", "_gather_pages", "_dense_attention", "_paged_attention"} <= set(asked.kernels) and not warned
    assert asked.kernels.count("_decode_attention") == 2 * 4, "1, 17, 32 and 33 single rows of 40, with a window and without"
    assert not runner.prepare_next(), "nothing is left, and there are no graphs here"


def test_kernels_that_must_run_are_left_for_when_nobody_waits(monkeypatch):
    """Those of a quantised cache."""
    monkeypatch.setattr(runners, "compiling", lambda: pytest.fail("they cannot be compiled apart"))
    attended = []
    runner = runner_on("int8")
    monkeypatch.setattr(runner, "_attend", lambda layer, spans: attended.append((layer, spans)))
    runner.compile_attention()
    assert not attended and runner.prepare_next() and len(attended) == 1
