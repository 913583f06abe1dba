"""The pages of the strategies name every one of them with all its options and their defaults."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from kvasir.scaling.strategy import STRATEGIES, Strategy, load_strategy
from kvasir.technique import find, names

PAGES = Path(__file__).parents[2] / "docs" / "methods" / "scaling"


def test_every_strategy_has_its_page_with_its_options():
    specs = [spec for page in PAGES.glob("*.md") for spec in re.findall(r"^## `([a-z0-9_]+:[^`]*)`$", page.read_text(), re.M)]
    assert sorted(spec.partition(":")[0] for spec in specs) == names(STRATEGIES)
    for spec in specs:
        name, _, options = spec.partition(":")
        config = find(STRATEGIES, name, Strategy)[1]
        assert [pair.partition("=")[0] for pair in options.split(",")] == [f.name for f in dataclasses.fields(config)], name
        assert load_strategy(spec).config == config(), f"{name}: the page has other defaults"
