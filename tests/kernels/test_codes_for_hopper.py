"""The code that the compiler makes of the kernels for codes, without a GPU: what the choosers take fits a
multiprocessor's shared memory, and the experts' kernels spill no registers."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from kvasir.kernels import codes_gemv, f8_gemv, nibble_gemv
from kvasir.kernels.codes_gemv import LAYOUTS, Coded
from kvasir.kernels.moe import CODE_TILINGS
from tests.kernels.hopper_compiler import compile_for_hopper

pytest.importorskip("triton")
pytestmark = pytest.mark.slow
SHARED = 227 << 10  # bytes that a program may have on a Hopper GPU
FUSED = {"NORM": True, "BIAS": False, "PDL": True}


@pytest.fixture(scope="module")
def compiler():
    """A process of its own: this one may have imported Triton for its interpreter."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        yield lambda *given: process.submit(compile_for_hopper, *given).result(timeout=300)


@pytest.mark.parametrize("kind", [-1, 0])
@pytest.mark.parametrize(
    "rows, width, coded", [(8, 4096, False), (16, 64, False), (128, 4096, False), (64, 4096, True)]
)
def test_few_rows_of_f8(rows, width, coded, kind, compiler):
    """Numbers are made where tensor cores read them: nothing is stored into shared memory but rows, and none spills."""
    outputs = 14336 if kind >= 0 else 4096
    config = f8_gemv.choose(rows, outputs * (1 if kind < 0 else 2), width, 0, kind >= 0, coded)
    sizes = dict.fromkeys(("OUT", "y_row", "residual_row"), outputs) | dict.fromkeys(("K", "x_row", "share"), width)
    constants = {"ROWS": rows, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "STAGES": config.stages,
                 "SPLITS": config.splits, "WHOLE_K": width % config.block_k == 0, "WHOLE": width > 64, "B": 0,
                 "KIND": kind, "RESIDUAL": kind < 0, "BIAS": False, "PDL": True, "CODES": coded, "FAST": True,
                 **sizes}  # fmt: skip
    pointers = dict.fromkeys(("y_ptr", "bias_ptr", "residual_ptr"), "bf16") | {"w_ptr": "u8", "tickets_ptr": "i32"}
    pointers |= dict.fromkeys(("x_scale_ptr", "w_scale_ptr", "part_ptr"), "fp32") | {"x_ptr": "u8" if coded else "bf16"}
    found = compiler("f8_gemv", "_few_rows_f8", {"num_warps": config.warps}, constants, pointers)
    assert found["shared"] <= SHARED and not found["spilled"] and found["copies"] and (found["wgmma"] or found["mma"])


@pytest.mark.parametrize("layout, zeros", [("u4", True), ("u4", False), ("mxfp4", False), ("nvfp4", False)])
@pytest.mark.parametrize("rows, kind", [(1, -1), (8, 0), (16, -1), (32, 0)])
def test_few_rows_of_four_bits(rows, kind, layout, zeros, compiler):
    group, width, outputs = WIDE[layout], 4096, 4096
    planes = (torch.empty(shape, device="meta") for shape in ((2 * outputs, width // 2), (0,)))
    w = Coded(layout, *planes, torch.empty(0) if zeros else None, group)
    if rows > 8 and not zeros:
        pytest.skip("codes_gemv multiplies them")
    config = nibble_gemv.choose(rows, 2 * outputs if kind >= 0 else outputs, w, kind >= 0)
    sizes = dict.fromkeys(("OUT", "y_row", "residual_row"), outputs) | {"K": width, "x_row": width, "G": width // group}
    constants = {"ROWS": max(8, rows), "BLOCK_N": config.block_n, "WORDS": config.block_k // 4, "GROUP": group,
                 "GROUPS": config.block_k // group, "LAYOUT": LAYOUTS[layout], "ZEROS": zeros, "STAGES": config.stages,
                 "SPLITS": config.splits, "WHOLE": True, "KIND": kind, "RESIDUAL": kind < 0, "BIAS": False, "PDL": True,
                 "FAST": True, "share": width // 4 // config.splits, **sizes}  # fmt: skip
    pointers = pointers_of(layout, "bf16") | {"tickets_ptr": "i32"} | ({"more_ptr": "u8"} if zeros else {})
    found = compiler("nibble_gemv", "_few_rows_nibbles", {"num_warps": config.warps}, constants, pointers)
    assert found["shared"] <= SHARED and not found["spilled"] and found["copies"] and (found["wgmma"] or found["mma"])


WIDE = {"i8": 0, "u4": 128, "mxfp4": 32, "nvfp4": 16, "fp6": 0}  # layouts, and inputs of a scale


def pointers_of(layout: str, dtype: str) -> dict[str, str]:
    """Element types of the planes, and of what is computed with them."""
    scale = "u8" if layout in ("mxfp4", "nvfp4") else "fp32"
    types = {"w_ptr": "i8" if layout == "i8" else "u8", "high_ptr": "u8", "w_scale_ptr": scale, "more_ptr": "fp32"}
    types |= dict.fromkeys(("part_ptr", "squares_ptr"), "fp32")
    return types | dict.fromkeys(("x_ptr", "y_ptr", "norm_ptr", "bias_ptr", "residual_ptr"), dtype)


@pytest.mark.parametrize("layout, dtype", [(layout, "bf16") for layout in WIDE] + [("mxfp4", "fp32")])
@pytest.mark.parametrize("rows, kind", [(1, -1), (16, 0), (64, -1), (64, 0)])
def test_few_rows_of_codes(rows, kind, layout, dtype, compiler):
    """The kernel that ``choose`` picks fits shared memory and registers, and copies blocks ahead. In fp32, which only
    tests use, it may spill."""
    group, width, outputs = WIDE[layout], 4096, 4096
    pair = 1 if layout == "i8" else 2
    planes = (torch.empty(shape, device="meta") for shape in ((2 * outputs, width // pair), (0,)))
    w = Coded(layout, *planes, None, group)
    config = codes_gemv.choose(rows, 2 * outputs if kind >= 0 else outputs, w, kind >= 0)
    if config.block_n < 16:
        pytest.skip("the kernel without tensor cores")
    sizes = {"OUT": outputs, "y_row": outputs, "residual_row": outputs, "K": width, "x_row": width,
             "share": width // pair, "B": width // pair, "G": w.num_groups}  # fmt: skip
    constants = w.constants(config.block_k) | sizes | {
        "ROWS": max(16, rows), "BLOCK_N": config.block_n, "STAGES": config.stages, "SPLIT": False, "WHOLE": True,
        "KIND": kind, "RESIDUAL": kind < 0, "ASM": True, "NORM": False, "BIAS": False, "PDL": True}  # fmt: skip
    pointers = pointers_of(layout, dtype)
    found = compiler("codes_gemv", "_few_rows_codes", {"num_warps": config.warps}, constants, pointers)
    assert found["shared"] <= SHARED
    if dtype == "bf16":
        assert not found["spilled"] and found["copies"] and (found["wgmma"] or found["mma"])


@pytest.mark.parametrize("tiling", [tiling for _, tiling in CODE_TILINGS], ids=str)
def test_experts_of_gpt_oss(tiling, compiler):
    """Both products in MXFP4, at every tiling of 16 bits."""
    pointers = {"w_ptr": "u8", "w_scale_ptr": "u8", "more_ptr": "fp32", "x_ptr": "bf16", "bias_ptr": "bf16"}
    for tile, kind in ((tiling.gate_up, 3), (tiling.down, -1)):
        constants = {"N": 2880, "D": 2880, "B": 1440, "G": 90, "TOP_K": 4, "KIND": kind, "BIAS": True, "GROUP": 32,
                     "PAIR": 2, "LAYOUT": 2, "ZEROS": False, "ASM": True, "PDL": True, "BLOCK_M": tile.m,
                     "BLOCK_N": tile.n, "BYTES": tile.d // 2, "GROUPS": tile.d // 32, "x_row": 2880}  # fmt: skip
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        found = compiler("codes_moe", "_grouped_codes", options, constants, pointers)
        assert found["shared"] <= SHARED and not found["spilled"]
        assert found["wgmma"] or found["mma"]


@pytest.mark.parametrize("gated", [True, False])
def test_experts_of_prompts(gated, compiler):
    """Weights come by tile copies, gathered rows by copies of 16 bytes; joined, gate and up are one product."""
    outputs, inputs = (768, 2048) if gated else (2048, 768)
    weights = (2, 128, 64) if gated else (256, 64)
    found = compiler(
        "moe_prompt",
        "_grouped_prompt",
        {"num_warps": 8, "num_stages": 3},
        {"N": outputs, "D": inputs, "TOP_K": 8, "GATED": gated, "KIND": 0, "BLOCK_M": 128}
        | {"BLOCK_N": 128 if gated else 256, "BLOCK_D": 64, "JOINED": gated, "FLATTEN": True, "PDL": True},
        {"a_ptr": "bf16", "out_ptr": "bf16", "w_desc": weights, "a_desc": weights if gated else (128, 64)},
    )
    assert found["tiles"] and not found["spilled"] and found["shared"] <= 227 * 1024
    assert found["wgmma"] == 64 // 16 and bool(found["copies"]) == gated
