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


@pytest.mark.parametrize("file", sorted(p.name for p in FOLDER.glob("test_*.py")))
def test_kernels_in_the_interpreter(file):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(FOLDER / file)]
    run = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        cwd=FOLDER.parents[2],
        timeout=600,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
