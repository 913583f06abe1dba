"""Kernel tests proper. They need Triton's interpreter (``TRITON_INTERPRET=1``) or a GPU, so the ordinary run does not
collect them here: ``tests/kernels/test_in_interpreter.py`` runs them in a process of their own.
"""

from __future__ import annotations

import json
import os
import zlib

import numpy as np
import pytest
import torch

from kvasir.kernels import _triton

RUNNABLE = _triton.INTERPRETED or (_triton.AVAILABLE and torch.cuda.is_available())
collect_ignore_glob = [] if RUNNABLE else ["test_*.py"]

if _triton.INTERPRETED:
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_for_numpy(tensor, scope) -> None:
        """Triton 3.6's interpreter calls int() on arrays of one element, which NumPy 2.4 refuses."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_for_numpy
    patch_lang, patched = interpreter._patch_lang, {}

    def patch_lang_once(fn):
        """The interpreter gives the language its numpy form in every launch and again in every call of a jitted
        function, a fifth of a test's time. Here it keeps that form: nothing in this process compiles."""
        if id(fn.__globals__) not in patched:
            patch_lang(fn)
            patched[id(fn.__globals__)] = fn.__globals__
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_lang_once
    numpy_dtype, dtypes = interpreter._get_np_dtype, {}

    def numpy_dtype_once(dtype):
        """The interpreter lists all of them at every operation."""
        if dtype.name not in dtypes:
            dtypes[dtype.name] = numpy_dtype(dtype)
        return dtypes[dtype.name]

    interpreter._get_np_dtype = numpy_dtype_once
    core = interpreter.tl.core
    get_field = core.tuple.__getattr__

    def make_tuple(self, args, type=None) -> None:
        self.values = list(args)
        if type is not None:
            self.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)

    def get_type_or_field(self, name):
        """Make a tuple's type when it is first asked for: every tensor has a tuple, its shape, whose type is never
        used."""
        if name != "type":
            return get_field(self, name)
        self.type = core._type_for_tuple_values(self.values)
        return self.type

    core.tuple.__init__, core.tuple.__getattr__ = make_tuple, get_type_or_field
    create_dot = interpreter.InterpreterBuilder.create_dot

    def dot_of_no_place(self, a, b, d, *how):
        """A product's bits depend on its row and column alone, as on a GPU. NumPy's BLAS may compute the last rows of a
        block by another kernel; in fp64, rounded afterwards, that makes no difference."""
        if d.data.dtype.kind != "f" or 8 in (a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth):
            return create_dot(self, a, b, d, *how)
        wide = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
        return interpreter.TensorHandle(wide.astype(d.data.dtype) + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = dot_of_no_place


@pytest.fixture(scope="session")
def device() -> str:
    return "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def pytest_collection_modifyitems(config, items):
    """Keep one part of each file's cases, as ``KVASIR_TEST_PARTS`` says: {file: "part/parts"}. See
    ``test_in_interpreter.py``."""
    parts = json.loads(os.environ.get("KVASIR_TEST_PARTS", "{}"))

    def kept(item) -> bool:
        part, _, step = parts.get(item.path.name, "0/1").partition("/")
        # Chosen by a hash of the name: every n-th case would leave out one of two precisions that take turns.
        return zlib.crc32(item.name.encode()) % int(step) == int(part)

    config.hook.pytest_deselected(items=[item for item in items if not kept(item)])
    items[:] = [item for item in items if kept(item)]
