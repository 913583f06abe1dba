"""Runs ``tests/kernels/triton`` in Triton's interpreter, which must be chosen before Triton is imported: in a new
process.

To work on a kernel: ``TRITON_INTERPRET=1 python -m pytest tests/kernels/triton``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
FOLDER = Path(__file__).parent / "triton"
# Files that take minutes in the interpreter, and their parts: every commit runs the first of them, `make test-all` the
# others.
LONG = {"test_decode_attention.py": 2, "test_moe.py": 2, "test_quantized.py": 2, "test_latents.py": 6}


def runs():
    """Yield (file, part): the whole file, or one of its parts, every n-th case."""
    for file in sorted(p.name for p in FOLDER.glob("test_*.py")):
        parts = LONG.get(file, 1)
        for part in range(parts):
            marks = pytest.mark.slow if part else ()
            yield pytest.param(file, f"{part}/{parts}", id=file if parts == 1 else f"{file}-{part}", marks=marks)


@pytest.mark.parametrize("file, part", runs())
def test_kernels_in_the_interpreter(file, part):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(FOLDER / file)]
    run = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1", "KVASIR_TEST_PART": part},
        capture_output=True,
        text=True,
        cwd=FOLDER.parents[2],
        timeout=600,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
