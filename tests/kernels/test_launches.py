"""Launches that a step repeats go to the compiled kernel, with every argument in its place."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

from kvasir.kernels._triton import Launches


class Kernel:
    """Stands in for a Triton kernel. ``compiles``: whether a launch returns the compiled kernel, as on a GPU."""

    def __init__(self, compiles: bool = True) -> None:
        def function(x, y, size, BLOCK, EVEN, ROWS=0):
            """Its signature is what counts."""

        self.params = [
            SimpleNamespace(name=p.name, default=p.default) for p in inspect.signature(function).parameters.values()
        ]
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
    assert kernel.direct == [((4, 2, 1), (x, "y", 7, 16, True, 0)) for x in "bc"], (
        "in the order of the signature, defaults included"
    )


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
