"""What holds for every technique of every seam, found by its file: one that is added tomorrow is tested tomorrow."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from kvasir.attention.backend import AttentionBackend
from kvasir.convert.converter import Converter
from kvasir.engine.build import BACKENDS, CODECS, POLICIES
from kvasir.engine.policy import SchedulerPolicy
from kvasir.errors import ConfigError
from kvasir.kv.codec import Codec
from kvasir.scaling.strategy import STRATEGIES, Strategy
from kvasir.speculation.drafter import DRAFTERS, Drafter
from kvasir.technique import find, load, names

DOCS = Path(__file__).parents[2] / "docs"
SEAMS = {CODECS: Codec, BACKENDS: AttentionBackend, POLICIES: SchedulerPolicy, DRAFTERS: Drafter, STRATEGIES: Strategy,
         "kvasir.convert.converters": Converter}
FOUND = [(package, name) for package in SEAMS for name in names(package)]
ON_KV = (CODECS, BACKENDS, DRAFTERS)  # seams at which a technique could change what is cached


def parts(package: str, name: str):
    cls, config = find(package, name, SEAMS[package])
    return cls, config, sys.modules[cls.__module__]


@pytest.mark.parametrize("package, name", FOUND)
def test_it_says_what_it_is(package, name):
    cls, _, module = parts(package, name)
    first = (module.__doc__ or "").strip().split("\n\n")[0]
    assert len(first) > 20 and cls.name == name
    if package in ON_KV:
        assert isinstance(cls.affects_kv, bool), "undeclared, it turns the prefix cache off"
    if package in (CODECS, DRAFTERS):
        assert any(word in module.__doc__.lower() for word in ("exact", "lossy", "lossless", "changes no", "baseline")), \
            "the docstring says whether it is exact or lossy"


@pytest.mark.parametrize("package, name", FOUND)
def test_its_options_are_frozen_have_defaults_and_a_typo_is_answered(package, name):
    _, config, _ = parts(package, name)
    if config is None:
        with pytest.raises(ConfigError, match="takes no options"):
            load(package, f"{name}:speed=11", SEAMS[package])
        return
    assert config.__dataclass_params__.frozen and config() == config()
    option = dataclasses.fields(config)[0].name
    with pytest.raises(ConfigError, match=f"no option '{option}x'.*"):
        load(package, f"{name}:{option}x=1", SEAMS[package])
    numbers = [f.name for f in dataclasses.fields(config) if str(f.type) in ("int", "float", "bool")]
    for number in numbers:
        with pytest.raises(ConfigError, match="expected"):
            load(package, f"{name}:{number}=many", SEAMS[package])


@pytest.mark.parametrize("package", SEAMS)
def test_a_name_that_is_nearly_right_is_answered(package):
    name = names(package)[0]
    with pytest.raises(ConfigError, match=f"there are .*Did you mean '{name}'"):
        load(package, name + "x", SEAMS[package])


TEXTS = "\n".join(page.read_text() for page in DOCS.rglob("*.md"))


@pytest.mark.parametrize("package, name", FOUND)
def test_the_docs_know_it(package, name):
    assert f"`{name}" in TEXTS or f" {name}" in TEXTS
