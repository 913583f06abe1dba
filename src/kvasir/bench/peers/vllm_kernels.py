"""Which kernels vLLM can take where it runs: some of FlashInfer's are compiled on demand, with CUTLASS's headers.

A copy of vLLM that was packed for another machine may lack these headers. vLLM then fails at its first step in FP8, or
at the first prompt of a model with Gated DeltaNet. So these kernels are turned off there, and results say so.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

HEADER = Path("data/cutlass/include/cute/tensor.hpp")
SAID = "FlashInfer's kernels that need CUTLASS's headers are off: the headers are missing"
OFF = ("VLLM_USE_FLASHINFER_SAMPLER", "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER")


def lacks_headers(site: str | None = None) -> bool:
    """Whether FlashInfer is in the folder ``site``, or installed here, without the headers."""
    if site is not None:
        folder = Path(site) / "flashinfer"
    else:
        found = importlib.util.find_spec("flashinfer")
        if found is None or found.origin is None:
            return False
        folder = Path(found.origin).parent
    return folder.is_dir() and not (folder / HEADER).is_file()


def turn_off(options: dict[str, Any]) -> dict[str, Any]:
    """The options with which vLLM takes other kernels, if these are not usable here. Sets environment variables, so it
    must come before vLLM is imported. What the caller has set stays."""
    if not lacks_headers():
        return options
    for name in OFF:
        os.environ.setdefault(name, "0")
    return options | {"additional_config": {"gdn_prefill_backend": "triton"} | options.get("additional_config", {})}
