"""Search path, signals, threads and garbage collections for all tests.

They run in a checkout that may not be installed: processes that they start find both packages and their commands.

What the shell ignores (``nohup``, ``&``) would be ignored by every server under test. Workers that share the cores
compute with one thread each, and so do the processes that they start: threads that wait for each other spin, and the
same tests took four times the CPU time on two busy cores.

Entry points are read again only when a folder of the search path has changed: every engine asks for them, and reading
those of 110 packages takes a third of a small engine's start.

The modules of all tests are 770,000 objects, and walking them takes 0.4 s. They are frozen, so that a collection walks
what tests have made.
"""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import os
import signal
import sys

import pytest

from tools import checkout

os.environ["PYTHONPATH"] = checkout.python_path()
sys.path[:0] = [folder for folder in checkout.PATHS if folder not in sys.path]
checkout.write()

if "PYTEST_XDIST_WORKER" in os.environ:  # before anything imports torch or NumPy
    os.environ.setdefault("OMP_NUM_THREADS", "1")

for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, default)

read_entry_points = importlib.metadata.entry_points


def changed(folder: str) -> int:
    """When a package was last added to the folder, in ns; 0 where there is no such folder."""
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return 0


@functools.cache
def entry_points_of(path: tuple[tuple[str, int], ...], wanted: frozenset) -> importlib.metadata.EntryPoints:
    return read_entry_points(**dict(wanted))


def entry_points(**wanted) -> importlib.metadata.EntryPoints:
    return entry_points_of(tuple((folder, changed(folder)) for folder in sys.path), frozenset(wanted.items()))


importlib.metadata.entry_points = entry_points


def freeze() -> None:
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """Freeze again behind a module whose tests ended that: their own objects are gone by then."""
    done = yield
    if nextitem is not None and nextitem.path != item.path and not gc.get_freeze_count():
        freeze()
    return done
