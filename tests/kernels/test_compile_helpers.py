"""Processes that compile: they do jobs side by side, whatever becomes of one, and none outlives the start."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvasir.kernels import compile_ahead, compile_helpers
from kvasir.kernels.compile_helpers import Helpers, job_of

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="processes are counted as Linux shows them"
)


def work(job: bytes) -> None:
    what, _, file = job.decode().partition(" ")
    if what == "fail":
        raise ValueError("no such kernel")
    if what == "die":
        os._exit(1)
    if what == "hang":
        time.sleep(600)
    Path(file).write_text(str(os.getpid()))
    if what == "meet":  # done by itself, this would wait for ever
        assert comes(lambda: len(list(Path(file).parent.iterdir())) == 3)


def rest() -> None:
    """Nothing to prepare."""


def group(pgid: int) -> list[int]:
    """Processes of a group that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, of = stat.read_text().rpartition(")")[2].split()[:3]
            found += [int(stat.parent.name)] if int(of) == pgid and state != "Z" else []
    return found


def comes(true, seconds: float = 20.0) -> bool:
    until = time.monotonic() + seconds
    while not true() and time.monotonic() < until:
        time.sleep(0.01)
    return true()


def gone(pgid: int) -> bool:
    return comes(lambda: not group(pgid))


def test_they_work_side_by_side_and_end_with_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(compile_helpers, "FAREWELL_SECONDS", 60.0)
    helpers = Helpers(3, rest, work)
    assert len(group(helpers._pid)) <= 1, "nothing was asked for yet"
    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(helpers.do, [f"meet {tmp_path / x}".encode() for x in "abc"]))
    pids = {int((tmp_path / x).read_text()) for x in "abc"}
    assert len(pids) == 3 and os.getpid() not in pids and set(group(helpers._pid)) == pids | {helpers._pid}
    started = time.monotonic()
    helpers.close()
    assert gone(helpers._pid) and time.monotonic() - started < compile_helpers.FAREWELL_SECONDS, "by themselves"
    with pytest.raises(ChildProcessError):
        os.waitpid(helpers._pid, os.WNOHANG)


def test_what_nobody_needed_ends_too():
    helpers = Helpers(2, rest, work)
    helpers.close()
    assert gone(helpers._pid)


def test_one_that_fails_or_dies_costs_its_job_only(tmp_path):
    helpers = Helpers(2, rest, work)
    try:
        assert not helpers.do(b"fail") and helpers.do(f"write {tmp_path / 'a'}".encode())
        assert not helpers.do(b"die")
        done = [helpers.do(f"write {tmp_path / 'b'}".encode()) for _ in range(4)]
        assert True in done, "the other one is still there"
        assert comes(lambda: not helpers.do(b"die") and len(group(helpers._pid)) <= 1)
        with ThreadPoolExecutor(4) as threads:
            assert not any(threads.map(helpers.do, [b"write x"] * 4)), "nobody waits for those that are gone"
    finally:
        helpers.close()
    assert gone(helpers._pid)


def test_one_that_hangs_is_left_and_killed(monkeypatch):
    monkeypatch.setattr(compile_helpers, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(compile_helpers, "FAREWELL_SECONDS", 0.2)
    helpers = Helpers(1, rest, work)
    assert not helpers.do(b"hang")
    helpers.close()
    assert gone(helpers._pid)


@contextlib.contextmanager
def hanging():
    """A helper that will never be done with its job, until it is killed."""
    helpers = Helpers(1, rest, work)
    with ThreadPoolExecutor(1) as threads:
        try:
            done = threads.submit(helpers.do, b"hang")
            assert comes(lambda: len(group(helpers._pid)) == 2) and not done.done()
            yield helpers
        finally:
            with contextlib.suppress(OSError):
                os.killpg(helpers._pid, signal.SIGKILL)


def test_no_child_holds_a_file_of_the_start():
    """The other side of a socket sees at once that a start is gone, whatever its children are at."""
    ours, theirs = socket.socketpair()
    with ours, hanging() as helpers:
        theirs.close()
        ours.settimeout(10)
        assert ours.recv(1) == b"", "closed by whoever else had it"
    helpers.close()


@pytest.mark.parametrize("asked", [False, True])
def test_a_start_whose_children_nobody_waits_for(asked, tmp_path):
    """Ignored ends of children survive exec: a parent may have left them so."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        helpers = Helpers(2, rest, work)
        assert not asked or helpers.do(f"write {tmp_path / 'a'}".encode())
        helpers.close()
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert gone(helpers._pid)


def test_a_start_that_is_refused_waits_for_nothing():
    helpers, started = Helpers(2, lambda: time.sleep(600)), time.monotonic()
    helpers.close()
    assert gone(helpers._pid) and time.monotonic() - started < 60


def test_a_worker_outlives_no_first_helper():
    with hanging() as helpers:
        os.kill(helpers._pid, signal.SIGKILL)
        helpers.close()
        assert gone(helpers._pid)


@pytest.mark.parametrize("asked", ["", "write", "hang"])
def test_none_outlives_a_start_that_is_killed(asked, tmp_path):
    """Nor one that compiles, and looks at no pipe."""
    job = (
        f"threading.Thread(target=helpers.do, args=(b'{asked} {tmp_path / 'a'}',), daemon=True).start()"
        if asked
        else ""
    )
    code = (
        "import threading, time\nfrom tests.kernels.test_compile_helpers import Helpers, rest, work\n"
        "helpers = Helpers(2, rest, work)\n"
        f"{job}\nprint(helpers._pid, flush=True)\ntime.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    pgid = int(process.stdout.readline())
    assert comes(lambda: len(group(pgid)) == (3 if asked else 1)), "one of them may still be about to be forked"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert gone(pgid)


def test_where_they_are_of_no_use_there_are_none(monkeypatch):
    monkeypatch.setattr(compile_ahead, "Helpers", lambda *_: pytest.fail("forked"))
    able = SimpleNamespace(AsyncCompileMode=None)
    for triton, interpreted, cores in (
        (None, False, 16),
        (able, True, 16),
        (able, False, 3),
        (SimpleNamespace(), False, 16),
    ):
        monkeypatch.setattr(compile_ahead, "triton", triton)
        monkeypatch.setattr(compile_ahead, "INTERPRETED", interpreted)
        monkeypatch.setattr("os.sched_getaffinity", lambda process, cores=cores: range(cores))
        with compile_ahead.helping():
            assert compile_ahead._helpers.get() is None


def test_a_limit_of_processes_ends_no_start(monkeypatch, caplog):
    def limited():
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(compile_ahead, "triton", SimpleNamespace(AsyncCompileMode=None))
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(8))
    monkeypatch.setattr("os.fork", limited)
    with compile_ahead.helping():
        assert compile_ahead._helpers.get() is None
    assert "by this process alone" in caplog.text


def test_another_tritons_kernel_is_compiled_here():
    src = "kernel"
    with pytest.raises(KeyError):
        job_of(lambda: src)
    asked = SimpleNamespace(do=lambda job: pytest.fail("sent"))
    with compile_ahead._Compilers(1, asked) as pool:
        assert pool.submit(lambda: src).result() == "kernel"
