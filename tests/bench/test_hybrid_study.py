"""The study of hybrids: a part is measured once, the file is whole after each, and states in bf16 drift."""

from __future__ import annotations

import json
import sys

import pytest

from kvasir.lab import export
from kvasir.lab import tokenizer as lab_tokenizer
from tests.lab.test_hybrid import lively
from tools import hybrid_study


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("hybrid")
    export.export(lively(), lab_tokenizer.shipped_tokenizer(), found)
    return found


def study(monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["hybrid_study.py", *map(str, options)])
    hybrid_study.main()


def test_parts_are_measured_once(monkeypatch, folder, tmp_path):
    measured, out = [], tmp_path / "study.json"

    def evaluate(model, part, problems, device):
        if len(measured) == 3:
            raise KeyboardInterrupt  # a run that is cut off
        measured.append((str(model), part))
        return {"chain": {"exact": 1.0}}

    monkeypatch.setattr(hybrid_study, "evaluate", evaluate)
    given = (out, "--hybrid", folder, "--only", "needle", "--only", "tasks")
    with pytest.raises(KeyboardInterrupt):
        study(monkeypatch, *given)
    assert [a["name"] for a in json.loads(out.read_text())["arms"]] == [
        "base-hybrid needle", "base needle", "base-hybrid tasks"
    ]  # fmt: skip
    measured.clear()
    study(monkeypatch, *given, "--minutes", "0")
    assert not measured, "there is no time for another part"
    study(monkeypatch, *given)
    assert measured == [("base", "tasks")] and len(json.loads(out.read_text())["arms"]) == 4


@pytest.mark.slow
def test_states_in_bf16_drift(folder):
    found = hybrid_study.drift(str(folder), "cpu", texts=2, length=128)
    row = found["to 127"]
    assert 1e-7 < row["kl"] < 0.1 and 0.8 < row["same"] <= 1 and row["loss"] != row["loss_bf16"]
