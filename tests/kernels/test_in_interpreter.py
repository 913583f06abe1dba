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
# Files that take long in the interpreter, in parts of cases chosen by a hash: every commit runs the first part,
# `make test-all` the others.
PARTS = {
    "test_codes.py": 10,
    "test_codes_moe.py": 8,
    "test_decode_attention.py": 10,
    "test_dense_attention.py": 2,
    "test_exact_attention.py": 4,
    "test_exact_decoder.py": 6,
    "test_f8.py": 8,
    "test_fused.py": 8,
    "test_gated_delta.py": 13,
    "test_latent_backend.py": 2,
    "test_latent_decoder.py": 3,
    "test_latents.py": 12,
    "test_lora.py": 8,
    "test_lowrank.py": 8,
    "test_matmul.py": 4,
    "test_moe.py": 10,
    "test_optional_backends.py": 2,
    "test_paged_attention.py": 6,
    "test_quantized.py": 12,
    "test_sample.py": 3,
}
# Files of packages that are seldom installed: `make test-all` alone runs them.
SLOW = {"test_lab_chunks.py"}


def runs():
    """List (file, part): the whole file, or one of its parts."""
    found = []
    for file in sorted(p.name for p in FOLDER.glob("test_*.py")):
        parts = PARTS.get(file, 1)
        for part in range(parts):
            name = file if parts == 1 else f"{file}-{part}"
            found.append(
                pytest.param(file, f"{part}/{parts}", id=name, marks=[pytest.mark.slow] * (part > 0 or file in SLOW))
            )
    return found


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
