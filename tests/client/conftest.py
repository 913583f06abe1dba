"""Fixtures of the client's tests: child processes import the fake core, and tests leave nothing behind."""

from __future__ import annotations

import contextlib
import gc
import os

import psutil
import pytest

from kvasir.client.crash_dump import PREFIX
from tools.checkout import python_path


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Let child processes import this checkout and its tests."""
    monkeypatch.setenv("PYTHONPATH", python_path())


def engine_processes() -> dict[int, str]:
    """Engine processes that this process started, with their status. Other children, and other engines on a busy
    machine, do not count."""
    found = {}
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            status = child.status()  # a zombie has no command line any more
            if status == psutil.STATUS_ZOMBIE or "kvasir.client.engine_process" in child.cmdline():
                found[child.pid] = status
    return found


@pytest.fixture
def nothing_left_behind(tmp_path, monkeypatch):
    """Fail a test after which a descriptor, an engine process or a private folder is left."""
    folder = tmp_path / "private"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    gc.collect()
    descriptors, processes = len(os.listdir("/proc/self/fd")), engine_processes()
    yield
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert [file for file in folder.iterdir() if not file.name.startswith(PREFIX)] == []
    left = {pid: status for pid, status in engine_processes().items() if pid not in processes}
    assert not left, f"engine processes are left, or not reaped: {left}"
