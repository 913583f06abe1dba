"""Which recurrence backend a start takes: refusals say why, and ``auto`` takes the quickest of several."""

from __future__ import annotations

import importlib.util
import time
from types import SimpleNamespace

import pytest
import torch

from kvasir.engine.start import recurrence_choice
from kvasir.errors import ConfigError
from kvasir.kv.codecs.plain import PlainCodec
from kvasir.layers.mixers import gated_delta, kda
from kvasir.layers.recurrence_backend import RecurrenceBackend, RecurrenceSite
from kvasir.layers.recurrent_spec import KDASpec
from kvasir.layers.spec import GatedDeltaSpec, NormSpec
from kvasir.layers.weights import Placement
from kvasir.technique import load

HERE = {"device": "cpu", "dtype": torch.float32, "exact": False}
NORM = NormSpec()


def model_of(*specs):
    """Layers of these kinds, and one that attends."""
    kinds = {GatedDeltaSpec: gated_delta, KDASpec: kda}
    place = Placement(torch.device("cpu"), torch.float32)
    mixers = [kinds[type(spec)].Mixer(spec, 16, place) for spec in specs]
    return SimpleNamespace(blocks=[SimpleNamespace(mixer=mixer) for mixer in (*mixers, object())])


@pytest.fixture
def model():
    delta = GatedDeltaSpec(1, 2, 16, 16, NORM)
    return model_of(delta, KDASpec(2, 16, NORM), delta)


def chosen(name, model, here):
    return recurrence_choice.choose_recurrence(name, model, here, PlainCodec())


class Fake(RecurrenceBackend):
    def __init__(self, name, seconds=0.0, rank=1, fault=None):
        self.name, self.seconds, self.rank, self.fault, self.calls = name, seconds, rank, fault, 0

    def scan(self, *given):
        self.calls += 1
        if self.fault:
            raise self.fault
        time.sleep(self.seconds)


@pytest.fixture
def offered(monkeypatch):
    """Backends that ``auto`` finds, with layers that do nothing but scan."""
    monkeypatch.setattr(gated_delta.Mixer, "run", lambda self, *given: self.scan())
    monkeypatch.setattr(kda.Mixer, "run", lambda self, *given: self.scan())
    return lambda *fakes: monkeypatch.setattr(recurrence_choice.technique, "of_all", lambda *_: list(fakes))


def test_without_a_choice_nothing_is_timed(model, monkeypatch):
    monkeypatch.setattr(recurrence_choice, "time_all", None)
    assert chosen("auto", model, HERE) == chosen("triton", model, HERE) == ("triton", False)
    assert chosen("auto", model_of(), HERE) == ("", False)


def test_the_quickest_serves_every_layer(model, offered):
    slow, quick = Fake("slow", 3e-3, rank=9), Fake("quick")
    offered(slow, quick)
    assert chosen("auto", model, HERE) == ("quick", True)
    assert all(block.mixer.scan == quick.scan for block in model.blocks[:3]) and slow.calls == quick.calls > 6
    assert chosen("auto", model, HERE | {"exact": True}) == ("slow", False), "by rank, in exact mode"


def test_one_that_fails_is_left_out(model, offered, caplog):
    offered(Fake("bad", rank=9, fault=RuntimeError("Hopper only")), Fake("good"))
    assert chosen("auto", model, HERE)[0] == "good"
    assert "'bad' is left out: it failed when it was timed (RuntimeError: Hopper only)" in caplog.text


def test_what_cannot_serve_is_refused_with_all_reasons(model, monkeypatch):
    with pytest.raises(ConfigError, match="no layer of this model runs the delta rule. Leave out"):
        chosen("triton", model_of(), HERE)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as refused:
        chosen("fla", model, HERE | {"exact": True})
    for reason in ("pip install fla-core", "GPU alone", "row by row", "torch.float32", "Use --recurrence-backend auto"):
        assert reason in str(refused.value)
    fla = load("kvasir.layers.recurrences", "fla", RecurrenceBackend)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert not fla.why_not(RecurrenceSite("cuda", torch.bfloat16, ((32, 128, 128),)))
    assert "heads must be" in fla.why_not(RecurrenceSite("cuda", torch.bfloat16, ((32, 128, 96),)))[0]
