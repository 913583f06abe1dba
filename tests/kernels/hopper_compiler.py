"""A kernel compiled for Hopper where there is no GPU, and what its code holds."""

from __future__ import annotations

import functools
import importlib
import os
import re
import subprocess
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any


@functools.cache
def _prepared() -> ModuleType:
    """Triton, after which our kernels can be imported. In a process of its own: kvasir leaves them out where there is
    no GPU."""
    os.environ.pop("TRITON_INTERPRET", None)
    import triton
    import triton.language
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper

    import kvasir.kernels._triton as runtime

    runtime.triton, runtime.tl = triton, triton.language
    runtime.gluon, runtime.gl, runtime.hopper = gluon, gl, hopper
    return triton


def compile_for_hopper(
    module: str, kernel: str, options: dict[str, Any], constants: dict[str, Any], pointers: dict[str, Any]
) -> dict[str, Any]:
    """``pointers``: element types of those whose names do not say them, shapes of descriptors."""
    triton = _prepared()
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    function = getattr(importlib.import_module("kvasir.kernels." + module), kernel)
    types, attributes = {}, {}
    for i, name in enumerate(function.arg_names):
        if name in constants:
            types[name] = "constexpr"
        elif name.endswith("_desc"):
            layout = f",{gl.NVMMASharedLayout(128, 16, 2)!r}" if function.is_gluon() else ""
            block = pointers.get(name) or (constants["BLOCK_N"], constants["D"])
            types[name] = f"tensordesc<bf16[{', '.join(map(str, block))}]{layout}>"
        elif name in pointers:
            types[name], attributes[(i,)] = "*" + pointers[name], [["tt.divisibility", 16]]
        elif name.endswith("_ptr"):
            kind = (
                "fp32"
                if "lse" in name or "part" in name
                else "bf16"
                if name in ("q_ptr", "k_ptr", "v_ptr", "out_ptr", "sinks_ptr")
                else "i32"
            )
            types[name], attributes[(i,)] = "*" + kind, [["tt.divisibility", 16]]
        else:
            types[name] = "fp32" if name in ("scale", "softcap", "eps", "factor") else "i32"
            if name in (
                "q_row",
                "q_head",
                "page_stride",
                "page_m",
                "page_t",
                "page_a",
                "row_x",
                "head_stride",
                "latent_stride",
                "rope_stride",
                "meta_page",
                "meta_head",
                "out_row",
                "a_row",
                "row_stride",
                "group_stride",
                "meta_group",
            ):
                attributes[(i,)] = [["tt.divisibility", 16]]
    places = {(function.arg_names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource if function.is_gluon() else ASTSource
    done = triton.compile(
        source(function, types, places, attributes), target=GPUTarget("cuda", 90, 32), options=options
    )
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(done.asm["cubin"])
        usage, code = (
            subprocess.run([tools / tool, option, path], capture_output=True, text=True, check=True).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    # For all products, or for all but the last: 0, 1.
    waits = "".join(name[-1] for name in re.findall("HGMMA|DEPBAR.LE gsb0, 0x[01]|MUFU.EX2", code))
    ptx = done.asm["ptx"]
    return {
        "shared": done.metadata.shared,
        "spilled": "STACK:0" not in usage,
        "per_thread": int(re.findall(r"REG:(\d+)", usage)[0]),
        "copies": ptx.count("cp.async.cg"),
        "words": ptx.count("cp.async.ca"),
        "tiles": ptx.count("cp.async.bulk.tensor"),
        "wgmma": ptx.count("wgmma.mma_async"),
        "shuffles": ptx.count("shfl.sync"),
        "under": [len(run) for run in re.findall("(?<=1)2+", waits)],
        "warps": done.metadata.num_warps,
        "registers": re.findall("setmaxnreg.*?([0-9]+);", ptx),
        "arrivals": ptx.count("mbarrier.arrive.shared"),
        "early": ptx.split("griddepcontrol.wait")[0].count("cp.async.bulk.tensor"),
        "barriers": ptx.count("bar.sync"),
        "mma": ptx.count("mma.sync"),
        "lop3": ptx.count("lop3.b32"),
    }
