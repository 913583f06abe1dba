"""The study of hybrids: a part is measured once, the file is whole after each, states in bf16 drift, and steps of both
ways to train are timed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from kvasir.errors import ConfigError
from kvasir_lab import delta_chunks, export, fused
from kvasir_lab import tokenizer as lab_tokenizer
from kvasir_lab.studies import hybrid_study
from kvasir_lab.training.data import Rows
from kvasir_lab.training.recipe import EASY, RECIPES, SMOKE_HYBRID
from tests.bench.test_result import check
from tests.lab.test_delta_chunks import stand_in
from tests.lab.test_hybrid import lively


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("hybrid")
    export.export(lively(), lab_tokenizer.shipped_tokenizer(), found)
    return found


def study(monkeypatch, *options, status=0):
    monkeypatch.setattr(sys, "argv", ["hybrid_study.py", *map(str, options)])
    assert hybrid_study.main() == status


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


def test_a_part_that_fails_leaves_the_others(monkeypatch, folder, tmp_path):
    out = tmp_path / "study.json"

    def evaluate(model, part, problems, device):
        if part == "needle":
            raise subprocess.CalledProcessError(2, "kvasir eval")
        return {"chain": {"exact": 1.0}}

    monkeypatch.setattr(hybrid_study, "evaluate", evaluate)
    study(monkeypatch, out, "--hybrid", folder, "--only", "needle", "--only", "tasks", status=1)
    assert [a["name"] for a in json.loads(out.read_text())["arms"]] == ["base-hybrid tasks", "base tasks"]


@pytest.mark.slow
def test_states_in_bf16_drift(folder):
    found = hybrid_study.drift(str(folder), "cpu", texts=2, length=128)
    row = found["to 127"]
    assert 1e-7 < row["kl"] < 0.1 and 0.8 < row["same"] <= 1 and row["loss"] != row["loss_bf16"]


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("there", [True, False])
def test_the_speed_of_both_ways(monkeypatch, tmp_path, capsys, there):
    out, chunked = tmp_path / "speed.json", []
    rows = (Rows(2, 64, {EASY: 1.0}), Rows(1, 64, {EASY: 1.0}))
    tiny = SMOKE_HYBRID.replace(name="tiny", rows=rows, phases=(), own=None, validate=rows, pool=9)
    monkeypatch.setitem(RECIPES, "tiny", tiny)

    def counted(*given, **options):
        chunked.append(1)
        return stand_in(*given, **options)

    def reason(shape, device, dtype):
        return None if there else "fla-core is not installed"

    monkeypatch.setattr(delta_chunks, "kernels", lambda: counted)
    monkeypatch.setattr(fused, "why_no_chunks", reason)
    monkeypatch.setattr(hybrid_study, "BATCHES", 1)
    study(monkeypatch, out, "--speed", "--recipe", "tiny", "--device", "cpu", "--steps", 1)
    found, said = json.loads(out.read_text()), capsys.readouterr().out
    check(found)
    assert [a["name"] for a in found["arms"]] == (["fla", "plain"] if there else ["plain"])
    # Forward and backward of one layer and two parts of a batch, in four steps.
    assert len(chunked) == (16 if there else 0)
    assert all(a["metrics"]["tokens_per_s"] > 0 and len(a["metrics"]["longest_ms"]) == 5 for a in found["arms"])
    assert "10 minutes are" in said and there is ("fla: fla-core is not installed" not in said)


def test_a_hybrid_or_the_speed_is_asked_for(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="give --hybrid FOLDER, or --speed"):
        study(monkeypatch, tmp_path / "out.json")
