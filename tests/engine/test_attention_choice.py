"""Which attention backend ``auto`` takes: the quickest of several, and nothing is timed without a choice."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch

from kvasir.attention.backend import AttentionBackend, AttentionSpec, Site
from kvasir.engine.start import attention_choice
from kvasir.engine.start.attention_choice import DECODES, PROMPT, choose_backend, quickest, seconds_of
from kvasir.kv.codecs.plain import PlainCodec
from kvasir.technique import load

SPECS = AttentionSpec(4, 2, 16, 0.25, sinks=True), AttentionSpec(2, 1, 32, 0.25, window=64)
SITE = Site("cpu", torch.float32, "plain", 16, SPECS)


class Fake(AttentionBackend):
    def __init__(self, name, decode=0, prompt=0, *, rank=1, fault=None, only_named="", graphs=True):
        self.name, self.seconds, self.rank, self.fault, self.graphs = name, (decode, prompt), rank, fault, graphs
        self.why_only_named, self.met = lambda: only_named, []

    def run(self, q_THD, cache, spec, batch, *, sinks_H=None, **_):
        if self.fault:
            raise self.fault
        assert (sinks_H is not None) == spec.sinks and q_THD.shape == (
            sum(batch.lengths),
            spec.num_heads,
            spec.head_dim,
        )
        assert batch.tables[0].unique().numel() == batch.tables[0].numel() == len(cache.planes["k"]), "pages of its own"
        self.met.append((spec, *zip(batch.starts, batch.lengths)))
        time.sleep(self.seconds[batch.lengths[0] > 1])


@pytest.fixture
def offered(monkeypatch):
    torchs = load(attention_choice.BACKENDS, "torch", AttentionBackend)
    return lambda *fakes: monkeypatch.setattr(attention_choice.technique, "of_all", lambda *_: [torchs, *fakes])


def chosen(name="auto", exact=False):
    return choose_backend(name, dataclasses.replace(SITE, exact=exact), PlainCodec())


def test_the_slower_one_loses(offered):
    slow, quick = Fake("slow", 0, 3e-3, rank=9), Fake("quick")
    offered(slow, quick)
    choice = chosen()
    assert choice.backend is quick and choice.timed and "slow " in choice.why and "quick " in choice.why
    assert set(slow.met) == set(quick.met) == {(spec, *spans) for spec in SPECS for spans in (DECODES, PROMPT)}


def test_other_work_on_the_device_has_to_last_to_mislead(monkeypatch):
    """Candidates take turns, and each one's quickest lap of any round counts: the one that is delayed in most rounds,
    and has the worst mean, wins."""
    slow, quick, asked = Fake("slow"), Fake("quick"), []
    laps = {slow: [(2, 9), (9, 2), (2, 2)], quick: [(1, 99), (99, 99), (99, 1)]}

    def seconds_of(backend, site, codec):
        asked.append(backend)
        return laps[backend][asked.count(backend) - 1]

    monkeypatch.setattr(attention_choice, "seconds_of", seconds_of)
    times = attention_choice.time_all([slow, quick], SITE, PlainCodec())
    assert asked == [slow, quick] * 3 and times == {slow: (2, 2), quick: (1, 1)}
    ran, ticks = [], iter([3.0, 7.0, 1.0, 8.0, 9.0, 2.0])
    monkeypatch.setattr(attention_choice, "_lap", lambda step, device: next(ticks))
    assert attention_choice._least(lambda: ran.append(1), "cpu") == 1.0 and ran == [1], "one that compiles is not timed"


def test_seconds_are_of_a_layer_of_each_kind():
    decode, prompt = seconds_of(Fake("even", 1e-3, 4e-3), SITE, PlainCodec())
    assert 2e-3 <= decode < 16e-3 and 8e-3 <= prompt < 64e-3


def test_one_that_raises_is_left_out(offered, caplog):
    bad, quick = Fake("bad", rank=9, fault=RuntimeError("Hopper only")), Fake("quick")
    offered(bad, Fake("slow", 1e-3, 1e-3), quick)
    assert chosen().backend is quick
    assert "'bad' is left out: it failed when it was timed (RuntimeError: Hopper only)" in caplog.text
    offered(bad, Fake("worse", fault=ValueError()))
    assert chosen().backend is bad and not chosen().timed, "a device may be too full to time anything"


def test_nothing_is_timed_without_a_choice(offered, monkeypatch):
    one, other = Fake("one"), Fake("other", rank=2)
    monkeypatch.setattr(attention_choice, "time_all", None)
    offered(one, Fake("minutes", rank=9, only_named="it compiles"))
    assert chosen().backend is one and not chosen().timed
    offered(one, other)
    assert chosen("torch").backend.name == "torch", "it was named"
    assert chosen(exact=True).backend is other
    offered()
    assert chosen().backend.name == "torch"
    offered(Fake("minutes", rank=9, only_named="it compiles"))
    assert chosen().backend.name == "torch", "the other was not named"


def test_the_rule():
    a, b, eager = Fake("a"), Fake("b", rank=2), Fake("eager", graphs=False)
    assert quickest([a, b], {a: (1, 1), b: (1.2, 0.9)}).backend is a
    assert quickest([a, b], {a: (1, 1), b: (1.2, 0.86)}).backend is b
    assert quickest([a, eager], {a: (1, 1), eager: (0.1, 0.1)}).backend is a
