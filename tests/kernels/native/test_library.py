"""The shared library: built once, kept, built again when damaged, and done without where it cannot be."""

import multiprocessing
import os
import shutil
import subprocess
import sys

import pytest

from kvasir.kernels.native import library

pytestmark = pytest.mark.skipif(shutil.which("cc") is None and shutil.which("gcc") is None, reason="no C compiler here")


# Optimisation takes most of the time, and no test here depends on it; the kernels' own tests have the usual flags.
QUICK = ("-O0", *library.FLAGS[1:])


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(library, "FLAGS", QUICK)


@pytest.fixture
def counted(monkeypatch):
    """How often the compiler ran."""
    calls = []
    compile = library._compile
    monkeypatch.setattr(library, "_compile", lambda *args: calls.append(args) or compile(*args))
    return calls


def test_built_once_kept_and_built_again_when_damaged(tmp_path, counted):
    assert "compiled" in library.load(tmp_path).reason
    assert "cached" in library.load(tmp_path).reason and len(counted) == 1
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    for damaged in (content[: len(content) // 2], b"", content[:2000] + b"x" + content[2001:]):
        file.unlink()  # it is mapped: new content is a new file
        file.write_bytes(damaged)
        found = library.load(tmp_path)
        assert found.library is not None and "compiled" in found.reason
    assert len(counted) == 4 and len(list(tmp_path.iterdir())) == 1


def test_another_processor_or_flag_is_another_file(tmp_path, monkeypatch):
    compiler = shutil.which("cc") or shutil.which("gcc")
    names = {library._key(compiler)}
    monkeypatch.setattr(library, "_processor", lambda: "another")
    names.add(library._key(compiler))
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, "-g"))
    names.add(library._key(compiler))
    assert len(names) == 3


def _load(folder):
    library.FLAGS = QUICK  # in a process of the pool
    return library.load(folder).library is not None


def test_two_processes_may_build_at_once(tmp_path):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(_load, [tmp_path] * 2) == [True, True]
    assert [f.suffix for f in tmp_path.iterdir()] == [".so"]


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path):
    (tmp_path / "file").write_text("")
    assert library.load(tmp_path / "file" / "below").library is not None


def test_reasons_where_there_is_none(tmp_path, monkeypatch):
    source = tmp_path / "broken.c"
    source.write_text("this is no C")
    monkeypatch.setattr(library, "SOURCE", source)
    found = library.load(tmp_path)
    assert found.library is None and "failed" in found.reason
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    assert library.load(tmp_path) == library.Native(None, "no C compiler (install gcc, or set CC)")
    monkeypatch.setattr(library.sys, "platform", "plan9")
    assert "plan9" in library.load(tmp_path).reason


@pytest.mark.parametrize("value, off", [("0", True), ("1", False)])
def test_the_environment_switches_it_off(value, off):
    code = "from kvasir.kernels.native.library import native; print(native().reason)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "KVASIR_NATIVE": value}
    )
    assert ("switched off" in done.stdout) == off, done.stderr
