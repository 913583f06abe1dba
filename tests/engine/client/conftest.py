"""For tests of the asynchronous engine: the fake core can be imported there, and nothing outlives a test."""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(ROOT / "src"))))


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path, monkeypatch):
    """No descriptor, process or folder outlives its engine."""
    folder = tmp_path / "private"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert list(folder.iterdir()) == []
    with contextlib.suppress(ChildProcessError):
        pid, _ = os.waitpid(-1, os.WNOHANG)
        assert pid == 0, "an engine process was not reaped"
        pytest.fail("an engine process is left")
