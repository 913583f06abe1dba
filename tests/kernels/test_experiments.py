"""`python -m kvasir_lab.kernels`: the list, the command line, and the shared frame as far as it needs no GPU."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvasir_lab.kernels import frame
from kvasir_lab.kernels.__main__ import described, main

ROOT = Path(__file__).parents[2]


def test_the_list_needs_no_torch():
    code = "import sys, kvasir_lab.kernels.__main__ as m; m.main(['--list']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    listed = [line.split()[0] for line in done.stdout.splitlines()]
    assert listed == list(described()) and {"attention", "kv", "sanitize", "native"} <= set(listed)


def test_an_unknown_name_is_refused(capsys):
    assert main(["nothing"]) == 2 and main([]) == 2
    assert "There are attention, codes, decode, f8, fused" in capsys.readouterr().err


@pytest.mark.parametrize("name", described())
def test_every_experiment_has_the_two_functions(name):
    pytest.importorskip("triton")
    module = importlib.import_module(f"kvasir_lab.kernels.{name}")
    assert list(inspect.signature(module.arguments).parameters) == ["parser"]
    assert list(inspect.signature(module.run).parameters) == ["options"]
    for grid in getattr(module, "GRIDS", {}).values():
        assert len(list(grid.cases())) > 0


def test_a_report_is_kept_and_says_what_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["python", "-m", "kvasir_lab.kernels", "x", "r.json"])
    report = frame.Report("case", tmp_path / "new" / "r.json")
    report.add("one", {"rows": 1}, {"us": 2.0})
    assert report.end() == 0
    report.add("two", {}, {"failed": 3})
    assert report.end() == 1
    found = json.loads((tmp_path / "new" / "r.json").read_text())
    assert [a["name"] for a in found["arms"]] == ["one", "two"] and found["limits"]["failed_checks"] == 3
    assert found["command"] == "python -m kvasir_lab.kernels x r.json"


GRIDS = {"even": frame.Grid(lambda: range(4), lambda case, dtype, device: {"kernel": 1 / (1 - case % 2)}, {})}


def test_a_case_that_raises_is_a_result():
    dtype = frame.BF16
    assert frame.check_case(__name__, "even", dtype, 2) == (1.0, "")
    error, text = frame.check_case(__name__, "even", dtype, 3)
    assert error == float("inf") and text.startswith(f"even {dtype} 3: ZeroDivisionError")
