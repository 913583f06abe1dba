"""What the compiler makes of the attention kernels for Hopper, without a GPU: loads that are pipelined, nothing spilled.

Which loads Triton pipelines hangs on how a loop is written, and nothing but the time on a GPU would show that it stopped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
COMPILE = """
import json, os, subprocess, sys, tempfile
import triton, triton.language
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import kvasir.kernels._triton as runtime
runtime.triton, runtime.tl = triton, triton.language  # which it leaves out where there is no GPU
import importlib

module, kernel, options, constants = json.loads(sys.argv[1])
function = getattr(importlib.import_module("kvasir.kernels." + module), kernel)
types, attributes = {}, {}
for i, name in enumerate(function.arg_names):
    if name in constants:
        types[name] = "constexpr"
    elif name.endswith("_desc"):
        types[name] = f"tensordesc<bf16[{constants['BLOCK_N']}, {constants['D']}]>"
    elif name.endswith("_ptr"):
        kind = "fp32" if "lse" in name or "part" in name else "bf16" if name in ("q_ptr", "k_ptr", "v_ptr", "out_ptr", "sinks_ptr") else "i32"
        types[name], attributes[(i,)] = "*" + kind, [["tt.divisibility", 16]]
    else:
        types[name] = "fp32" if name in ("scale", "softcap") else "i32"
        if name in ("q_row", "q_head", "page_stride", "head_stride", "out_row"):
            attributes[(i,)] = [["tt.divisibility", 16]]
places = {(function.arg_names.index(name),): value for name, value in constants.items()}
done = triton.compile(ASTSource(function, types, places, attributes), target=GPUTarget("cuda", 90, 32), options=options)
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "kernel.cubin")
    open(path, "wb").write(done.asm["cubin"])
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    usage = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
ptx = done.asm["ptx"]
print(json.dumps({"shared": done.metadata.shared, "spilled": "STACK:0" not in usage, "copies": ptx.count("cp.async.cg"),
                  "tiles": ptx.count("cp.async.bulk.tensor"), "wgmma": ptx.count("wgmma.mma_async")}))
"""
LLAMA = {"H": 32, "R": 4, "D": 128, "CAPPED": False, "SINKS": False, "WANT_LSE": False}
PAGED = {**LLAMA, "P": 16, "D_PAD": 128, "BLOCK_N": 64, "WINDOWED": False}
BLOCK = 64 * 128 * 2 * 2  # bytes of the keys and values of one block


def compiled(module: str, kernel: str, options: dict, constants: dict) -> dict:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", COMPILE, json.dumps([module, kernel, options, constants])], capture_output=True, text=True,
                         timeout=300, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_decode():
    """Two blocks on their way, and room for three programs on a multiprocessor."""
    found = compiled("decode_attention", "_decode_attention", {"num_warps": 4, "num_stages": 3},
                     {**PAGED, "BLOCK_M": 16, "COUNT_PAD": 64, "MIN_KEYS": 128, "SHORT_KEYS": 1024, "R_PAD": 4, "MERGE": 16})
    assert found["copies"] and not found["spilled"] and 2 * BLOCK <= found["shared"] <= 227 * 1024 // 3


@pytest.mark.parametrize("block_m, warps", [(16, 4), (128, 8)])
def test_paged(block_m, warps):
    found = compiled("paged_attention", "_paged_attention", {"num_warps": warps, "num_stages": 3},
                     {**PAGED, "BLOCK_M": block_m, "TREE": False, "SPLIT": False, "CHUNKED": 0})
    assert found["copies"] and not found["spilled"] and 2 * BLOCK <= found["shared"] <= 227 * 1024
    assert (found["wgmma"] > 0) == (block_m >= 64)


def test_dense():
    found = compiled("dense_attention", "_dense_attention", {"num_warps": 8, "num_stages": 2},
                     {**LLAMA, "R_PAD": 4, "BLOCK_M": 128, "BLOCK_N": 128})
    assert found["tiles"] and found["wgmma"] and not found["spilled"] and found["shared"] <= 227 * 1024
