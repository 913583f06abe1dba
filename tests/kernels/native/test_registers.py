"""Registers of four and of eight floats, on a machine that may have longer ones: the same sources for an older
processor."""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvasir.kernels.native.library import native

COMPILER = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), "")
pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or native().library is None, reason="needs native kernels on x86-64"
)
FOLDER = Path(__file__).parent
WHICH = (
    "as_exact or others or fused or activations or of_its_path or reference_encoder or (over and 80) or draws "
    "or multiplied_exactly"
)
LANES = (
    "import kvasir.kernels.native.library as l; "
    "print(l.native().library.kvasir_lanes(), l.native().library.kvasir_tiles())"
)


@pytest.mark.parametrize(
    "machine, lanes, flag",
    [pytest.param("x86-64", 4, "sse2", marks=pytest.mark.slow), ("x86-64-v3", 8, "avx2")],  # each is built anew
)
def test_kernels_of_an_older_processor(machine, lanes, flag, tmp_path):
    if flag not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip(f"this processor has no {flag}")
    if lanes == native().library.kvasir_lanes():
        pytest.skip("this processor's own registers: the other tests have them")
    wrapper = tmp_path / "cc"
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.quote(COMPILER)} "$@" -march={machine}\n')  # the last one counts
    wrapper.chmod(0o755)
    env = {**os.environ, "CC": str(wrapper), "XDG_CACHE_HOME": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", LANES], env=env, capture_output=True, text=True)
    assert found.stdout.split() == [str(lanes), "0"], found.stderr
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "-k",
            WHICH,
            *(str(FOLDER / f"test_{name}.py") for name in ("program", "codes", "decode", "quantized", "rounded")),
        ],
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
        cwd=FOLDER.parents[2],
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
