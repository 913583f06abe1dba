"""The code that the compiler makes of the kernel over low-rank caches, as in ``test_compiled_for_hopper``."""

from __future__ import annotations

import pytest
import torch

from kvasir.kernels import lowrank_decode
from tests.kernels.test_compiled_for_hopper import compiled, compiler_ends

__all__ = ["compiler_ends"]  # a fixture of every module that compiles
pytest.importorskip("triton")
POINTERS = {"up_ptr": "bf16", "angles_ptr": "fp32", "position_ptr": "i32"}
POINTERS |= {name: "i64" for name in ("ancestors_ptr", "positions_ptr", "place_ptr", "length_ptr")}


@pytest.mark.slow
@pytest.mark.parametrize("rank, most", [(256, 1), (512, 1), (256, 16), (512, 16)])
def test_rows(rank, most):
    """Latents are copied ahead, keys are made by the tensor core, and a program fits on a multiprocessor."""
    shape = lowrank_decode.Shape.of(lowrank_decode.block_of(most, 4), rank, torch.bfloat16)
    sizes = {"H": 32, "R": 4, "P": 64, "D": 128, "HALF_PAD": 64, "Q": 128, "K": rank, "V": rank, "V_PAD": rank}
    flags = {name: False for name in ("WINDOWED", "CAPPED", "SINKS", "WANT_LSE")}
    found = compiled(
        "lowrank_decode",
        "_lowrank_rows",
        {"num_warps": shape.warps, "num_stages": shape.stages},
        {
            **sizes,
            **flags,
            "K_BLOCK": min(shape.k_block, rank),
            "BLOCK_M": shape.block_m,
            "BLOCK_N": shape.block_n,
            "TREE": most > 1,
            "ROWS": shape.block_m // 4,
            "COUNT_PAD": 16,
            "MIN_KEYS": 256,
            "SHORT_KEYS": 1024,
        },
        POINTERS,
    )
    assert found["copies"] and found["wgmma"] and shape.at_once * (found["shared"] + 1024) <= 228 * 1024
