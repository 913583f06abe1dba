"""The pages of the strategies name every one of them with all its options and their defaults."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

from kvasir.scaling.strategy import STRATEGIES, Strategy, load_strategy
from kvasir.technique import find, own

PAGES = Path(__file__).parents[2] / "docs" / "methods" / "scaling"


def test_every_strategy_has_its_page_with_its_options():
    specs = [
        spec for page in PAGES.glob("*.md") for spec in re.findall(r"^## `([a-z0-9_]+:[^`]*)`$", page.read_text(), re.M)
    ]
    assert sorted(spec.partition(":")[0] for spec in specs) == own(STRATEGIES)
    for spec in specs:
        name, _, options = spec.partition(":")
        config = find(STRATEGIES, name, Strategy)[1]
        assert [pair.partition("=")[0] for pair in options.split(",")] == [
            f.name for f in dataclasses.fields(config)
        ], name
        assert load_strategy(spec).config == config(), f"{name}: the page has other defaults"


def test_the_example_in_python_runs(tmp_path):
    """Run it in its own process, as a reader would."""
    (block,) = re.findall(r"```python\n(.*?)```", (PAGES.parent / "test-time-scaling.md").read_text(), re.S)
    file = tmp_path / "example.py"
    file.write_text(block)
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("37 {"), done.stdout
