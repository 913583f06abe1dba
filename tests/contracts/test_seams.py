"""The contract of all techniques: they describe themselves, declare their properties, and refuse unknown options."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from kvasir import technique
from kvasir.api.calls.reasoning import ReasoningParser
from kvasir.api.calls.tools import ToolParser
from kvasir.attention.backend import AttentionBackend
from kvasir.cluster.router import Router
from kvasir.convert.converter import Converter
from kvasir.decoding.processor import Processor
from kvasir.engine.pages.eviction import Eviction
from kvasir.engine.schedule.policy import SchedulerPolicy
from kvasir.errors import ConfigError
from kvasir.hooks.hook import Op
from kvasir.kv.codec import Codec
from kvasir.kv.policy import KVPolicy
from kvasir.kv.tier import Tier
from kvasir.layers.product_backend import ProductBackend
from kvasir.layers.recurrence_backend import RecurrenceBackend
from kvasir.layers.weight_format import WeightFormat
from kvasir.scaling.strategy import Strategy
from kvasir.speculation.drafter import Drafter
from kvasir.technique import Technique
from kvasir_lab.drafters.kind import Kind
from kvasir_lab.task import Task

ROOT = Path(__file__).parents[2]
SEAMS = {
    "kvasir.kv.codecs": Codec,
    "kvasir.kv.policies": KVPolicy,
    "kvasir.kv.tiers": Tier,
    "kvasir.layers.formats": WeightFormat,
    "kvasir.attention.backends": AttentionBackend,
    "kvasir.layers.product_backends": ProductBackend,
    "kvasir.layers.recurrences": RecurrenceBackend,
    "kvasir.engine.pages.evictions": Eviction,
    "kvasir.engine.schedule.schedulers": SchedulerPolicy,
    "kvasir.cluster.routers": Router,
    "kvasir.speculation.drafters": Drafter,
    "kvasir.decoding.processors": Processor,
    "kvasir.hooks.ops": Op,
    "kvasir.scaling.strategies": Strategy,
    "kvasir.convert.converters": Converter,
    "kvasir_lab.tasks": Task,
    "kvasir_lab.trained_drafters": Kind,
    "kvasir_lab.trained_models": Kind,
    "kvasir.api.calls.tool_parsers": ToolParser,
    "kvasir.api.calls.reasoning_parsers": ReasoningParser,
}
PROMISES = {
    # The others compute nothing in a step.
    "exact": {
        Codec,
        KVPolicy,
        WeightFormat,
        AttentionBackend,
        RecurrenceBackend,
        Eviction,
        SchedulerPolicy,
        Drafter,
        Converter,
    },
    "affects_kv": {
        Codec,
        KVPolicy,
        WeightFormat,
        AttentionBackend,
        RecurrenceBackend,
        Eviction,
        SchedulerPolicy,
        Drafter,
    },
}  # a converter's result is another checkpoint
SAYS = {Codec, KVPolicy, WeightFormat, Drafter, Converter}  # their docstrings say whether they are exact or lossy
FOUND = [(package, name) for package in SEAMS for name in technique.names(package)]
DOCS = "\n".join(file.read_text() for file in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))])

every = pytest.mark.parametrize("package, name", FOUND, ids=lambda word: word.rsplit(".", 1)[-1])


def of(package: str, name: str) -> tuple[type[Technique], type | None, str]:
    cls, config = technique.find(package, name, SEAMS[package])
    return cls, config, sys.modules[cls.__module__].__doc__ or ""


def package_of(folder: str) -> str:
    """The package of a folder as the page names it: those of kvasir without its name."""
    return ("" if folder.startswith("kvasir_lab/") else "kvasir.") + folder.replace("/", ".")


def test_every_seam_of_the_house_is_here():
    """Every folder of techniques is covered by this contract."""
    page = (ROOT / "docs" / "adding-a-technique.md").read_text()
    folders = set(re.findall(r"`([\w/]+)/<name>\.py`", page))
    assert set(map(package_of, folders)) == set(SEAMS)
    for package in SEAMS:
        assert technique.names(package), package


@every
def test_it_says_what_it_is_in_one_line(package, name):
    first = of(package, name)[2].split("\n")[0].strip()
    assert 20 < len(first) < 150, f"the first line describes it in lists: {first!r}"


@every
def test_it_declares_what_it_promises(package, name):
    cls, _, doc = of(package, name)
    for trait, seams in PROMISES.items():
        if SEAMS[package] in seams:
            assert any(trait in vars(c) for c in cls.__mro__ if c is not Technique), (
                f"{name} and its seam leave {trait} to chance"
            )
            assert getattr(cls, trait) is not None
    if SEAMS[package] in SAYS:
        assert re.search(r"\b(exact|lossless)\b" if cls.exact else r"\blossy\b", doc, re.I), (
            f"{name} is {'exact' if cls.exact else 'lossy'}: say so"
        )


@every
def test_its_options_are_frozen_and_have_defaults(package, name):
    _, config, _ = of(package, name)
    if config is None:
        return
    assert dataclasses.is_dataclass(config) and config.__dataclass_params__.frozen
    for f in dataclasses.fields(config):
        assert f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING, (
            f"{name}:{f.name} has no default"
        )
    for option, kind in get_type_hints(config).items():
        assert kind in (bool, int, float, str) or get_origin(kind) is Literal, (
            f"{name}:{option} is a {kind}, which no word on a command line is"
        )
    assert config() == config()


@every
def test_what_it_does_not_know_is_refused(package, name):
    seam, (_, config, _) = SEAMS[package], of(package, name)
    with pytest.raises(ConfigError, match=f"Did you mean '{name}'"):
        technique.load(package, name + "x", seam)
    if config is None:
        with pytest.raises(ConfigError, match="takes no options"):
            technique.load(package, f"{name}:depth=1", seam)
        return
    for option, kind in get_type_hints(config).items():
        typo = option + "x" if len(option) > 1 else option + option
        with pytest.raises(
            ConfigError,
            match=f"has no option '{typo}'.*Did you mean '{option}'" if len(option) > 1 else f"has no option '{typo}'",
        ):
            technique.load(package, f"{name}:{typo}=1", seam)
        words = [f"{get_args(kind)[0]}x"] if get_args(kind) else []
        wrong = {bool: ["maybe"], int: ["x", "1.5"], float: ["x", "nan", "inf"]}.get(kind, words)
        for text in wrong:
            with pytest.raises(
                ConfigError, match=f"{option}='{text}': expected" + (".*Did you mean" if get_args(kind) else "")
            ):
                technique.load(package, f"{name}:{option}={text}", seam)


@pytest.mark.parametrize(
    "package, spec",
    [
        ("kvasir.speculation.drafters", "ngram:min_match=0"),
        ("kvasir.speculation.drafters", "ngram:min_match=3,max_match=2"),
        ("kvasir.speculation.drafters", "medusa:width=0"),
        ("kvasir.speculation.drafters", "replay:accept=1.5"),
        ("kvasir.scaling.strategies", "adaptive_consistency:threshold=2"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(package, spec):
    with pytest.raises(ConfigError, match=spec.split("=")[0]):
        technique.load(package, spec, SEAMS[package])


@every
def test_its_neighbours_hear_why_it_cannot_run_with_them(package, name):
    """``conflicts`` answers in sentences, for any other techniques."""
    cls, config, _ = of(package, name)
    try:
        one = technique.load(package, name, SEAMS[package])
    except ConfigError as refused:  # it needs an option, such as a model's folder: that is said with the option
        assert f"{name}:" in str(refused)
        return
    for reason in one.conflicts(
        [
            technique.load(p, "plain" if p.endswith("codecs") else "fcfs", SEAMS[p])
            for p in ("kvasir.kv.codecs", "kvasir.engine.schedule.schedulers")
        ]
    ):
        assert reason[0].isupper() and reason.endswith(".")


@every
def test_the_docs_name_it(package, name):
    assert name not in technique.own(package) or re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", DOCS), (
        f"no page of docs/ names `{name}`"
    )
