"""Kernels and their launchers are compiled in parallel, ahead of their first launch, and without a launch."""

from __future__ import annotations

import os
import threading
from types import ModuleType, SimpleNamespace

import pytest

from kvasir.kernels import compile_ahead


def test_an_older_triton_compiles_as_ever(monkeypatch):
    monkeypatch.setattr(compile_ahead, "triton", SimpleNamespace())
    with compile_ahead.compiling():
        pass


def test_kernels_are_compiled_beside_each_other_and_there_at_the_end(monkeypatch):
    triton = pytest.importorskip("triton")
    from triton.runtime import _async_compile

    done, together = [], threading.Barrier(3, timeout=60)

    def compiles(x):
        together.wait()  # alone, it would wait for ever
        return x

    monkeypatch.setattr(compile_ahead, "triton", triton)
    monkeypatch.setattr(compile_ahead, "quicken", lambda: False)  # leave this process's Triton alone
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    with compile_ahead.compiling():
        for x in "abc":
            _async_compile.active_mode.get().submit(x, lambda x=x: compiles(x), done.append)
        assert not done
    assert sorted(done) == ["a", "b", "c"] and _async_compile.active_mode.get() is None


def test_a_launcher_is_made_beside_its_kernel(monkeypatch):
    triton = pytest.importorskip("triton")
    from triton.runtime import _async_compile

    made, kernels, done = [], {x: SimpleNamespace(src=x, metadata="m") for x in "abc"}, []

    def launcher(src, metadata):
        made.append((src, metadata, threading.current_thread() is threading.main_thread()))
        if src == "b":
            raise RuntimeError("no C compiler")

    own = SimpleNamespace(triton_key=lambda: "own")
    runtime = SimpleNamespace(
        driver=SimpleNamespace(active=SimpleNamespace(launcher_cls=launcher)), cache=own, build=SimpleNamespace()
    )
    monkeypatch.setattr(
        compile_ahead, "triton", SimpleNamespace(AsyncCompileMode=triton.AsyncCompileMode, runtime=runtime)
    )
    with compile_ahead.compiling():
        _async_compile.active_mode.get().submit("a", lambda: kernels["a"], done.append)
    assert done == [kernels["a"]] and not made, "a Triton that may load launchers in another way makes them itself"
    assert own.triton_key is compile_ahead.fingerprint
    runtime.build._load_module_from_path = lambda name, path: ModuleType(name)
    done.clear()
    with compile_ahead.compiling():
        mode = _async_compile.active_mode.get()
        for x, kernel in kernels.items():
            mode.submit(x, lambda kernel=kernel: kernel, done.append)
        assert mode.submit("a", None, None).result() is kernels["a"] and ("a", "m", False) in made, (
            "whoever waits for it finds a launcher"
        )
    loads = runtime.build._load_module_from_path
    assert (
        isinstance(loads, compile_ahead.EachItsOwn)
        and compile_ahead.quicken()
        and runtime.build._load_module_from_path is loads
    )
    assert sorted(made) == [(x, "m", False) for x in "abc"] and len(done) == 3, (
        "without one it says so where it is launched"
    )


def test_another_triton_has_another_fingerprint(monkeypatch, tmp_path):
    for part in ("_C", "compiler"):
        (tmp_path / part).mkdir()
    library, source = tmp_path / "_C" / "libtriton.so", tmp_path / "compiler" / "code_generator.py"
    library.write_bytes(b"0" * 100)
    source.write_text("x = 1\n")
    monkeypatch.setattr(
        compile_ahead, "triton", SimpleNamespace(__file__=str(tmp_path / "__init__.py"), __version__="3.6.0")
    )
    monkeypatch.setattr(compile_ahead, "LIBRARY_END", 10)
    names = lambda: compile_ahead.fingerprint.__wrapped__()  # noqa: E731
    found = [names()]
    os.utime(library, ns=(1, 1))
    (tmp_path / "compiler" / "gone.py").symlink_to(tmp_path / "nowhere.py")
    assert found == [names()] and found[0].startswith("3.6.0-"), "when it was installed says nothing"
    source.write_text("x = 2\n")
    found.append(names())
    for content in (b"1" + b"0" * 99, b"0" * 99 + b"1", b"0" * 101):
        library.write_bytes(content)
        found.append(names())
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "backends").mkdir()
    (tmp_path / "backends" / "nvidia").symlink_to(elsewhere)  # as an installation from source has it
    (elsewhere / "compiler.py").write_text("y = 1\n")
    found.append(names())
    (elsewhere / "compiler.py").write_text("y = 2\n")
    found.append(names())
    assert len(set(found)) == len(found) == 7


def test_a_launcher_that_is_loaded_again_is_still_its_own():
    shared = ModuleType("__triton_launcher")  # what Python gives whoever loads a file of this name again

    def load(name, path):
        shared.launch = path
        return shared

    loaded = compile_ahead.EachItsOwn(load)
    a, b = loaded("__triton_launcher", "a"), loaded("__triton_launcher", "b")
    assert (a.launch, b.launch) == ("a", "b")


def test_a_rehearsal_launches_nothing_of_this_thread(monkeypatch):
    met = []

    class Function:
        def run(self, *args, grid, warmup, **named):
            met.append((args, warmup))
            return "compiled"

    monkeypatch.setattr(compile_ahead, "triton", SimpleNamespace(JITFunction=Function))
    kernel, found = Function(), []
    with compile_ahead.rehearsing():
        assert kernel.run("x", grid=(1,), warmup=False) is None, "what is not launched cannot be launched again"
        other = threading.Thread(target=lambda: found.append(kernel.run("y", grid=(1,), warmup=False)))
        other.start()
        other.join()
    assert kernel.run("z", grid=(1,), warmup=False) == "compiled" and found == ["compiled"]
    assert met == [(("x",), True), (("y",), False), (("z",), False)]
    with pytest.raises(RuntimeError), compile_ahead.rehearsing():
        raise RuntimeError
    assert kernel.run("z", grid=(1,), warmup=False) == "compiled", "whatever ends it"
