"""`python -m kvasir_lab.kernels sanitize` without a GPU: a stand-in for the sanitizer over interpreted tests."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kvasir_lab.kernels import sanitize as tool
from kvasir_lab.kernels.__main__ import main
from tests.bench.test_result import check

KERNELS = Path(tool.ROOT) / "src" / "kvasir" / "kernels"
STAND_IN = """#!/bin/sh
shift 6
"$@"; status=$?
case "$*" in
  *keys_differ*) [ -n "$FOUND" ] && {
    printf "========= Invalid __global__ read of size 4 bytes\\n========= ERROR SUMMARY: 2 errors\\n"; exit 99; } ;;
esac
echo "========= ERROR SUMMARY: 0 errors"
exit $status
"""


@pytest.fixture
def sanitize(tmp_path, monkeypatch):
    """Run the tool over made-up tests in a folder of their own: its exit status, the metrics of each file, its
    report."""
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_a.py").write_text(
        "import pytest\n\n@pytest.mark.parametrize('i', range(5))\ndef test_one(i):\n    assert i != 9\n"
    )
    (folder / "test_b.py").write_text(
        "def test_keys_differ():\n    pass\n\ndef test_wrong():\n    assert False, 'indeed'\n"
    )
    stand_in = tmp_path / "compute-sanitizer"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "FOLDER", Path("tests"))
    monkeypatch.setattr(tool, "SIZE", 3)

    def run(*argv):
        out = tmp_path / "out"
        monkeypatch.setattr(sys, "argv", [])
        status = main(["sanitize", str(out), *argv, "--jobs", "2"])
        found = json.loads((out / "sanitize-memcheck.json").read_text())
        check(found)
        return status, {a["name"]: a["metrics"] for a in found["arms"]}, (out / "sanitize-memcheck.txt").read_text()

    return run


def test_clean(sanitize, capfd):
    status, files, report = sanitize("test_a.py")
    del files["test_a.py"]["seconds"]
    assert status == 0 and not report.strip()
    assert files == {
        "test_a.py": {"tests": 5, "passed": 5, "skipped": 0, "failed": 0, "errors": 0, "not_reached": 0, "unclear": 0}
    }


def test_what_is_found_is_counted_and_said(sanitize, capfd, monkeypatch):
    monkeypatch.setenv("FOUND", "1")
    status, files, report = sanitize()
    assert (
        status == 1
        and files["test_a.py"]["errors"] == 0
        and files["test_b.py"]["errors"] == 2
        and files["test_b.py"]["failed"] == 1
    )
    assert (
        "# test_b.py part 0: exit 99" in report
        and "Invalid __global__ read" in report
        and "AssertionError: indeed" in report
    )
    assert "test_a.py" not in report


def test_a_test_that_fails_is_no_success(sanitize, capfd):
    status, files, _ = sanitize("test_b.py")
    assert (
        status == 1
        and files["test_b.py"]["errors"] == 0
        and (files["test_b.py"]["passed"], files["test_b.py"]["failed"]) == (1, 1)
    )


def test_what_time_did_not_reach_is_named(sanitize, capfd):
    status, files, report = sanitize("--seconds", "0")
    assert status == 1 and files["test_a.py"]["not_reached"] == 5 and files["test_b.py"]["not_reached"] == 2
    assert "tests/test_b.py::test_wrong" in report and files["test_b.py"]["passed"] == 0


def test_first_parts_go_first():
    parts = tool.divided({"a": list("12345"), "b": list("67")}, 2)
    assert [(p.file, p.ids) for p in parts] == [("a", ["1", "2"]), ("b", ["6", "7"]), ("a", ["3", "4"]), ("a", ["5"])]


def test_summaries_are_added_up():
    log = (
        "1 failed, 22 passed, 3 skipped in 9.21s\n========= ERROR SUMMARY: 3 errors\n"
        "========= RACECHECK SUMMARY: 4 hazards displayed (4 errors)\n"
    )
    assert tool.read(log) == {"errors": 7, "passed": 22, "skipped": 3, "failed": 1} and tool.read("killed") == {}


def test_every_own_kernel_has_tests_that_are_run():
    """Every kernel's name occurs in the folder or in the checks that it calls. Kernels that others import are run with
    those."""
    folder = KERNELS.parents[2] / "tests" / "kernels"
    text = "\n".join(f.read_text() for f in [*folder.glob("check*.py"), *(folder / "triton").glob("test_*.py")])
    own = {f.stem: f.read_text() for f in KERNELS.glob("*.py") if "\n@jit" in f.read_text()}
    used = "\n".join(own.values())
    assert len(own) > 15 and not [name for name in own if name not in text and f"kernels.{name} import" not in used]
