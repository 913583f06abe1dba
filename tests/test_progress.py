"""Lines and bars of long work: silent while it is quick, never on stdout beside a result."""

import importlib
import io
import sys
import threading
import types

import pytest

from kvasir import progress
from kvasir.progress import Progress, loading


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_lines_where_there_is_no_terminal(capsys):
    with Progress("nano") as progress:
        for step in (1, 2, 3):
            progress.show(step, 3, f"loss {step}")
        progress.say("done")
    assert capsys.readouterr() == ("nano 1/3 loss 1\nnano 3/3 loss 3\ndone\n", "")


def test_brief_work_shows_nothing_until_it_takes_long(capsys):
    for every in (10.0, None):
        with Progress("sampling", every, brief=True) as progress:
            progress.show(0, 2)
            progress.step()
            progress.step()
    assert capsys.readouterr() == ("", "")
    with Progress("sampling", 0.0, brief=True) as progress:
        progress.show(0, 2)
        progress.step("half")
    assert capsys.readouterr() == ("", "sampling 0/2\nsampling 1/2 half\n"), "stdout belongs to the result"


@pytest.mark.parametrize("still", [False, True])
def test_a_bar_on_a_terminal(monkeypatch, capsys, still):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress("layers", brief=True, still=still) as progress:
        progress.show(2, 7, "of a pass")
        progress.title = "bytes"
        progress.show(3, 8)
    with loading("a-model"):
        pass
    shown = sys.stderr.getvalue()
    assert "bytes" in shown and "3/8" in shown and "a-model" in shown
    assert ("2/7" in shown) or not still, "a still bar is drawn at every change"
    assert capsys.readouterr().out == ""


def test_a_slow_import_is_told_of(tmp_path, monkeypatch, capsys):
    """The import ends when the line was printed, so the test needs no clock."""
    (tmp_path / "slow_library.py").write_text("import progress_gate\nprogress_gate.wait()\n")
    told = threading.Event()
    gate = types.ModuleType("progress_gate")
    gate.wait = lambda: told.wait(60)
    monkeypatch.setitem(sys.modules, "progress_gate", gate)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(progress, "IMPORT_SECONDS", 0.01)
    real = print
    monkeypatch.setattr(progress, "print", lambda *a, **k: (real(*a, **k), told.set()), raising=False)
    with progress.imports_told("slow_library", "a library"):
        importlib.import_module("slow_library")
    assert told.is_set() and "loading a library: " in capsys.readouterr().err
    del sys.modules["slow_library"]


def test_a_library_that_is_there_is_not_told_of(monkeypatch, capsys):
    monkeypatch.setattr(progress, "IMPORT_SECONDS", 0.001)
    with progress.imports_told("json", "JSON"):
        for thread in threading.enumerate():
            if thread.name == "imports":
                thread.join(60)
    assert capsys.readouterr().err == ""
