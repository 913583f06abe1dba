"""Launches that a step repeats go to the compiled kernel, with every argument in its place; and what is compiled without a launch."""

from __future__ import annotations

import inspect
import os
import threading
from types import ModuleType, SimpleNamespace

import pytest

from kvasir.kernels import _triton
from kvasir.kernels._triton import Launches


class Kernel:
    """What Triton's are to a launcher. ``compiles``: whether a launch returns the compiled kernel, as on a GPU."""

    def __init__(self, compiles: bool = True) -> None:
        def function(x, y, size, BLOCK, EVEN, ROWS=0):
            """Its signature is what counts."""

        self.params = [SimpleNamespace(name=p.name, default=p.default) for p in inspect.signature(function).parameters.values()]
        self.bound, self.direct, self._compiles = [], [], compiles

    def __getitem__(self, grid):
        def bind(*args, **named):
            self.bound.append((grid, args, named))
            return Compiled(self.direct) if self._compiles else None

        return bind


class Compiled:
    def __init__(self, direct: list) -> None:
        self._direct = direct

    def __getitem__(self, grid):
        return lambda *args: self._direct.append((grid, args))


def test_the_first_binds_and_the_others_do_not():
    launches, kernel = Launches(), Kernel()
    for x in "abc":
        launches(kernel, (4, 2, 1), x, "y", 7, EVEN=True, BLOCK=16, num_warps=4)
    assert kernel.bound == [((4, 2, 1), ("a", "y", 7), {"EVEN": True, "BLOCK": 16, "num_warps": 4})]
    assert kernel.direct == [((4, 2, 1), (x, "y", 7, 16, True, 0)) for x in "bc"], "in the order of the signature, defaults included"


def test_another_grid_or_variant_is_bound_for_itself():
    launches, kernel = Launches(), Kernel()
    for grid, block in (((4, 1, 1), 16), ((5, 1, 1), 16), ((4, 1, 1), 32), ((4, 1, 1), 16), ((4, 1, 1), 32)):
        launches(kernel, grid, "x", "y", 7, EVEN=True, BLOCK=block)
    assert len(kernel.bound) == 3 and [args[3] for _, args in kernel.direct] == [16, 32]


def test_the_interpreter_compiles_nothing():
    launches, kernel = Launches(), Kernel(compiles=False)
    for _ in range(3):
        launches(kernel, (1, 1, 1), "x", "y", 7, EVEN=True, BLOCK=16)
    assert len(kernel.bound) == 3


def test_an_older_triton_compiles_as_ever(monkeypatch):
    monkeypatch.setattr(_triton, "triton", SimpleNamespace())
    with _triton.compiling():
        pass


def test_kernels_are_compiled_beside_each_other_and_there_at_the_end(monkeypatch):
    triton = pytest.importorskip("triton")
    from triton.runtime import _async_compile

    done, together = [], threading.Barrier(3, timeout=10)

    def compiles(x):
        together.wait()  # alone, it would wait for ever
        return x

    monkeypatch.setattr(_triton, "triton", triton)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    with _triton.compiling():
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

    active = SimpleNamespace(launcher_cls=launcher)
    monkeypatch.setattr(_triton, "LAUNCHERS", True)
    monkeypatch.setattr(_triton, "triton", SimpleNamespace(AsyncCompileMode=triton.AsyncCompileMode,
                                                           runtime=SimpleNamespace(driver=SimpleNamespace(active=active))))
    with _triton.compiling():
        mode = _async_compile.active_mode.get()
        for x, kernel in kernels.items():
            mode.submit(x, lambda kernel=kernel: kernel, done.append)
        assert mode.submit("a", None, None).result() is kernels["a"] and ("a", "m", False) in made, "whoever waits for it finds a launcher"
    assert sorted(made) == [(x, "m", False) for x in "abc"] and len(done) == 3, "without one it says so where it is launched"


def test_another_triton_has_another_fingerprint(monkeypatch, tmp_path):
    for part in ("_C", "compiler"):
        (tmp_path / part).mkdir()
    library, source = tmp_path / "_C" / "libtriton.so", tmp_path / "compiler" / "code_generator.py"
    library.write_bytes(b"0" * 100)
    source.write_text("x = 1\n")
    monkeypatch.setattr(_triton, "triton", SimpleNamespace(__file__=str(tmp_path / "__init__.py"), __version__="3.6.0"))
    monkeypatch.setattr(_triton, "LIBRARY_END", 10)
    names = lambda: _triton.fingerprint.__wrapped__()  # noqa: E731
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

    loaded = _triton.each_its_own(load)
    a, b = loaded("__triton_launcher", "a"), loaded("__triton_launcher", "b")
    assert (a.launch, b.launch) == ("a", "b")


def test_a_rehearsal_launches_nothing_of_this_thread(monkeypatch):
    met = []

    class Function:
        def run(self, *args, grid, warmup, **named):
            met.append((args, warmup))
            return "compiled"

    monkeypatch.setattr(_triton, "triton", SimpleNamespace(JITFunction=Function))
    kernel, found = Function(), []
    with _triton.rehearsing():
        assert kernel.run("x", grid=(1,), warmup=False) is None, "what is not launched cannot be launched again"
        other = threading.Thread(target=lambda: found.append(kernel.run("y", grid=(1,), warmup=False)))
        other.start()
        other.join()
    assert kernel.run("z", grid=(1,), warmup=False) == "compiled" and found == ["compiled"]
    assert met == [(("x",), True), (("y",), False), (("z",), False)]
    with pytest.raises(RuntimeError), _triton.rehearsing():
        raise RuntimeError
    assert kernel.run("z", grid=(1,), warmup=False) == "compiled", "whatever ends it"
