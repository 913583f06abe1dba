"""Which attention backend ``auto`` takes: by the clock among several, without one where there is nothing to choose."""

from __future__ import annotations

import dataclasses
import logging
import time

import pytest
import torch

from kvasir.attention.backend import AttentionBackend, AttentionSpec, Site
from kvasir.engine import attention_choice
from kvasir.engine.attention_choice import DECODES, LAYERS, PROMPT, choose_backend, quickest, seconds_of
from kvasir.errors import ConfigError
from kvasir.kernels import _triton
from kvasir.kv.codecs.plain import PlainCodec
from kvasir.technique import load

SPECS = AttentionSpec(4, 2, 16, 0.25, sinks=True), AttentionSpec(2, 1, 32, 0.25, window=64)
SITE = Site("cpu", torch.float32, "plain", 16, SPECS)


class Fake(AttentionBackend):
    """Takes its seconds for a layer of decodes and of a prompt; notes what it is asked."""

    def __init__(self, name, decode=0.0, prompt=0.0, *, rank=1, graphs=True, fault=None, only_named=()):
        self.name, self.seconds, self.rank, self.graphs, self.fault, self.only_named = name, (decode, prompt), rank, graphs, fault, list(only_named)
        self.sites, self.met = [], []

    def prepare(self, site):
        super().prepare(site)
        self.sites.append(site)

    def why_only_named(self, site):
        return self.only_named

    def plan(self, batch):
        batch.scratch["planned"] = True

    def run(self, q_THD, cache, spec, batch, *, sinks_H=None, return_lse=False, out_THD=None):
        if self.fault:
            raise self.fault
        assert batch.scratch["planned"] and q_THD.shape == (sum(batch.lengths), spec.num_heads, spec.head_dim)
        assert (sinks_H is not None) == spec.sinks and torch.is_inference_mode_enabled()
        pages = batch.tables[cache.group]
        assert pages.unique().numel() == pages.numel() == cache.planes["k"].shape[0] and cache.planes["k"].shape[1:] == (
            spec.num_kv_heads, 16, spec.head_dim), "pages of its own for every sequence, in the model's shapes"
        self.met.append((spec, list(zip(batch.starts, batch.lengths))))
        time.sleep(self.seconds[batch.lengths[0] > 1])
        return q_THD


@pytest.fixture
def offered(monkeypatch):
    """Backends that stand beside torch."""
    monkeypatch.setattr(attention_choice, "ROUNDS", 1)

    def offer(*fakes):
        every = {f.name: f for f in (*fakes, load("kvasir.attention.backends", "torch", AttentionBackend))}
        monkeypatch.setattr(attention_choice.technique, "of_all", lambda package, get: [get(name) for name in every])
        monkeypatch.setattr(attention_choice.technique, "load", lambda package, name, base: every[name])
    return offer


def chosen(name="auto", site=SITE):
    return choose_backend(name, site, PlainCodec())


def test_the_slower_one_loses(offered):
    slow, quick = Fake("slow", 0.0, 3e-3, rank=9), Fake("quick")
    offered(slow, quick)
    choice = chosen()
    assert choice.backend is quick and choice.timed and "slow " in choice.why and "quick " in choice.why
    assert quick.sites[-1] == SITE and {(spec, *spans) for spec, spans in quick.met} == {(s, *x) for s in SPECS for x in (DECODES, PROMPT)}


def test_seconds_are_of_a_layer_of_each_kind():
    decode, prompt = seconds_of(Fake("even", 1e-3, 4e-3), SITE, PlainCodec())
    assert 2e-3 <= decode < 16e-3 and 8e-3 <= prompt < 64e-3, "one of each, not of sixteen layers"
    one = dataclasses.replace(SITE, specs=SPECS[:1])
    fake = Fake("one")
    seconds_of(fake, one, PlainCodec())
    assert len(fake.met) == 2 * LAYERS * (1 + attention_choice.LAPS)


def test_one_that_raises_is_left_out(offered, caplog):
    bad, slow, quick = Fake("bad", rank=9, fault=RuntimeError("Hopper only")), Fake("slow", 1e-3), Fake("quick")
    offered(bad, slow, quick)
    with caplog.at_level(logging.WARNING, logger="kvasir"):
        assert chosen().backend is quick
    assert "'bad' is left out: it failed when it was timed (RuntimeError: Hopper only)" in caplog.text
    offered(bad, Fake("worse", fault=ValueError()))
    choice = chosen()
    assert choice.backend is bad and not choice.timed and "none could be timed" in choice.why, "a device may be too full to time anything"


def test_nothing_is_timed_where_nothing_is_to_choose(offered):
    one, minutes = Fake("one"), Fake("minutes", rank=9, only_named=["it compiles for minutes"])
    offered(one, minutes)
    assert chosen().backend is one and chosen().why == "the only candidate" and not chosen().timed
    assert chosen("minutes").backend is minutes and chosen("minutes").why == "as asked for", "what is named is not timed, either"
    offered(Fake("unranked", rank=0))
    assert chosen().backend.name in ("torch", "unranked") and not chosen().timed
    assert not one.met and not minutes.met


def test_exact_mode_does_not_ask_the_clock(offered):
    first, second = Fake("first", rank=2), Fake("second", rank=1)
    offered(second, first)
    choice = chosen(site=dataclasses.replace(SITE, exact=True))
    assert choice.backend is first and not choice.timed and not first.met and "exact mode" in choice.why


def test_the_rule():
    """The least product; of those within 5 %, the highest rank; without graphs, last."""
    a, b, eager = Fake("a", rank=1), Fake("b", rank=2), Fake("eager", graphs=False)
    assert quickest([a, b], {a: (1.0, 1.0), b: (1.2, 0.9)}).backend is a
    assert quickest([a, b], {a: (1.0, 1.0), b: (1.2, 0.86)}).backend is b
    assert quickest([a, b], {a: (1.1, 0.8), b: (1.0, 1.0)}).backend is a
    assert quickest([a, eager], {a: (1.0, 1.0), eager: (0.1, 0.1)}).backend is a
    assert quickest([eager], {eager: (1.0, 1.0)}).backend is eager
    assert "a 1000000 and 2000000" in quickest([a], {a: (1.0, 2.0)}).why


def test_the_packages_backends_stand_aside_in_exact_mode_and_one_that_compiles_waits_to_be_named(monkeypatch):
    monkeypatch.setattr(_triton, "AVAILABLE", True)
    load_one = lambda name: load("kvasir.attention.backends", name, AttentionBackend)  # noqa: E731
    exact = Site("cuda", torch.bfloat16, "plain", 16, (AttentionSpec(8, 2, 128, 1.0),), exact=True)
    assert all(load_one(name).why_not(exact) for name in ("flash_attn", "flashinfer")) and not load_one("triton").why_not(exact)
    spec = {"flashinfer_jit_cache": None}
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: spec.get(name))
    assert "flashinfer-jit-cache" in load_one("flashinfer").why_only_named(exact)[0] and not load_one("triton").why_only_named(exact)
    spec["flashinfer_jit_cache"] = object()
    assert not load_one("flashinfer").why_only_named(exact)


def test_a_named_one_that_cannot_is_refused(offered, monkeypatch):
    fake = Fake("fake")
    monkeypatch.setattr(Fake, "why_not", lambda self, site: ["no wings"])
    offered(fake)
    with pytest.raises(ConfigError, match="'fake' cannot serve this model here: no wings"):
        chosen("fake")
