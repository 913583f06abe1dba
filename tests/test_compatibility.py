"""The page of what works with what is what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import compatibility
from tests.speculation.trained import random_head

PAGE = Path(__file__).parent.parent / "docs" / "compatibility.md"


def test_the_page_knows_every_drafter_and_codec_and_nothing_differs():
    text = PAGE.read_text()
    missing = [name for name in (*compatibility.drafters(), *compatibility.codecs()) if f"| `{name}` |" not in text]
    assert not missing, f"run tools/compatibility.py: the page lacks {', '.join(missing)}"
    assert all(feature in text for feature in compatibility.FEATURES)
    assert "differs" not in text


def test_refusals_are_in_the_engines_words():
    assert compatibility.refusals() in PAGE.read_text(), "run tools/compatibility.py"


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    root = tmp_path_factory.mktemp("heads")
    return compatibility.Trial({name: random_head(name, root / name) for name in compatibility.HEADS})


def test_a_row(trial):
    assert set(trial.row("token_recycling", "int4_bdr").values()) == {"same"}


def test_the_trial_can_fail(trial, monkeypatch):
    monkeypatch.setattr("kvasir.kv.pool.KVPool.move_slots", lambda self, group, sources, targets: None)
    assert "**differs**" in trial.row("token_recycling", "int4_bdr").values()


@pytest.mark.slow
def test_the_whole_page(trial):
    assert compatibility.page(trial) == PAGE.read_text()
