"""Runs ``tests/kernels/triton`` in Triton's interpreter, which must be chosen before Triton is imported: in a new
process.

To work on a kernel: ``TRITON_INTERPRET=1 python -m pytest tests/kernels/triton``.
"""

from __future__ import annotations

import json
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


# Processes in which every commit runs the first parts: importing Triton takes longer than many files.
PROCESSES = 4


def first_parts() -> list[dict[str, str]]:
    """The parts of every commit, for each process: {file: "0/parts"}."""
    files = [p.name for p in sorted(FOLDER.glob("test_*.py")) if p.name not in SLOW]
    return [{file: f"0/{PARTS.get(file, 1)}" for file in files[i::PROCESSES]} for i in range(PROCESSES)]


def later_parts() -> list[tuple[str, str]]:
    """(file, part) of everything else."""
    later = [(file, f"{part}/{parts}") for file, parts in PARTS.items() for part in range(1, parts)]
    return [*later, *((file, "0/1") for file in sorted(SLOW))]


def run_in_interpreter(parts: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    run = subprocess.run(
        [*command, *(str(FOLDER / file) for file in parts)],
        env={**os.environ, "TRITON_INTERPRET": "1", "KVASIR_TEST_PARTS": json.dumps(parts)},
        capture_output=True,
        text=True,
        cwd=FOLDER.parents[2],
        timeout=900,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]


@pytest.mark.parametrize("process", range(PROCESSES))
def test_kernels_in_the_interpreter(process):
    run_in_interpreter(first_parts()[process])


@pytest.mark.slow
@pytest.mark.parametrize("file, part", later_parts())
def test_other_cases_in_the_interpreter(file, part):
    run_in_interpreter({file: part})


def test_every_file_has_its_first_part_in_a_process():
    found = [file for parts in first_parts() for file in parts]
    assert sorted([*found, *SLOW]) == sorted(p.name for p in FOLDER.glob("test_*.py"))
    assert set(PARTS) | SLOW <= {p.name for p in FOLDER.glob("test_*.py")}
