"""The code that the compiler makes of the attention kernels for Hopper, without a GPU: loads are pipelined, nothing is
spilled.

Which loads Triton pipelines depends on how a loop is written. Only the time on a GPU would show otherwise that it
stopped.
"""

from __future__ import annotations

import functools
import inspect
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from kvasir.kernels import decode_attention, gemv, hopper_gemv, lora, report, steer
from kvasir.kernels.dense_attention import Shape
from kvasir.kernels.hopper_attention import HopperShape
from kvasir.kernels.key_chunks import merged_at_once
from kvasir.kernels.paged_attention import TogetherShape, _blocks, block_of
from kvasir.kernels.quantized_attention import Shape as RowsShape
from kvasir.kernels.quantized_decode import shape_of
from kvasir.kernels.quantized_qkv import Shape as WriteShape
from kvasir.kv.rotation import Rotation
from tests.kernels.hopper_compiler import compile_for_hopper

pytest.importorskip("triton")
LLAMA = {"H": 32, "R": 4, "D": 128, "CAPPED": False, "SINKS": False, "WANT_LSE": False}
PAGED = {**LLAMA, "P": 16, "D_PAD": 128, "BLOCK_N": 64, "WINDOWED": False}
SPANS = {"ROWS": 0, "COUNT_PAD": 16, "MIN_KEYS": 0, "SHORT_KEYS": 0}  # known on the host
TOGETHER = {name: "i64" for name in ("ancestors_ptr", "positions_ptr", "place_ptr", "length_ptr")}
BLOCK = 64 * 128 * 2 * 2  # bytes of the keys and values of one block


@functools.cache
def compiler() -> ProcessPoolExecutor:
    """One process for all kernels of this worker: most of what a process of its own would take is importing torch and
    Triton."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


@pytest.fixture(scope="module", autouse=True)
def compiler_ends():
    yield
    if compiler.cache_info().currsize:
        compiler().shutdown()
        compiler.cache_clear()


def compiled(module: str, kernel: str, options: dict, constants: dict, pointers: dict | None = None) -> dict:
    return compiler().submit(compile_for_hopper, module, kernel, options, constants, pointers or {}).result(timeout=300)


@pytest.mark.parametrize("rows, share", [(16, 4), (64, 4), (256, 2)])
def test_decode(rows, share):
    """192 KiB on their way where there are few rows, 128 where there are many, in as many programs as are counted on to
    fit on a multiprocessor."""
    shape = decode_attention.Shape.of(128, torch.bfloat16, rows, share, rows * 8 / 132)
    found = compiled(
        "decode_attention",
        "_decode_attention",
        {"num_warps": shape.warps, "num_stages": shape.stages},
        {
            **PAGED,
            "BLOCK_N": shape.block_n,
            "BLOCK_M": 16,
            "COUNT_PAD": rows,
            "MIN_KEYS": 128,
            "SHORT_KEYS": 1024,
            "R_PAD": 4,
            "MERGE": merged_at_once(4, 128, shape.warps),
        },
    )
    assert found["copies"] and not found["spilled"]
    assert (
        shape.at_once * found["shared"] >= (6 if rows == 16 else 4) * BLOCK
        and shape.at_once * (found["shared"] + 1024) <= 228 * 1024
    )


@pytest.mark.parametrize("block_m, warps", [(16, 4), (128, 8)])
def test_paged(block_m, warps):
    found = compiled(
        "paged_attention",
        "_paged_attention",
        {"num_warps": warps, "num_stages": 3},
        {**PAGED, **SPANS, "BLOCK_M": block_m, "TREE": False, "SPLIT": False, "CHUNKED": 0},
    )
    assert found["copies"] and not found["spilled"] and 2 * BLOCK <= found["shared"] <= 227 * 1024
    assert (found["wgmma"] > 0) == (block_m >= 64)


@pytest.mark.parametrize("most", [4, 64])
def test_paged_together(most):
    """Rows whose spans are known on the device alone: pipelined as the tiles of a host's plan are."""
    shape = TogetherShape.of(most, 4, 128, torch.bfloat16)
    found = compiled(
        "paged_attention",
        "_paged_attention",
        {"num_warps": shape.warps, "num_stages": shape.stages},
        {
            **PAGED,
            "BLOCK_N": shape.block_n,
            "BLOCK_M": shape.block_m,
            "TREE": True,
            "SPLIT": False,
            "CHUNKED": 0,
            "ROWS": shape.block_m // 4,
            "COUNT_PAD": 256,
            "MIN_KEYS": 256,
            "SHORT_KEYS": 1024,
        },
        TOGETHER,
    )
    assert (
        found["copies"]
        and not found["spilled"]
        and shape.at_once * (found["shared"] + 1024) <= 228 * 1024
        and found["shared"] >= 2 * BLOCK
    )


WIDE = {**PAGED, "D": 512, "D_PAD": 512}


@pytest.mark.parametrize("rows, share", [(4, 8), (64, 4)])
def test_decode_of_wide_heads(rows, share):
    shape = decode_attention.Shape.of(512, torch.bfloat16, rows, share, rows * 2 / 132)
    found = compiled(
        "decode_attention",
        "_decode_attention",
        {"num_warps": shape.warps, "num_stages": shape.stages},
        {
            **WIDE,
            "R": share,
            "BLOCK_N": shape.block_n,
            "BLOCK_M": 16,
            "COUNT_PAD": max(16, rows),
            "MIN_KEYS": 128,
            "SHORT_KEYS": 1024,
            "R_PAD": share,
            "MERGE": merged_at_once(share, 512, shape.warps),
        },
    )
    assert found["copies"] and not found["spilled"] and shape.at_once * (found["shared"] + 1024) <= 228 * 1024


@pytest.mark.parametrize("length", [2, 4096])
def test_paged_of_wide_heads(length):
    block_m = block_of(length, 4, torch.bfloat16, 512)
    block_n, warps, stages = _blocks(block_m, 512, torch.bfloat16)
    found = compiled(
        "paged_attention",
        "_paged_attention",
        {"num_warps": warps, "num_stages": stages},
        {**WIDE, **SPANS, "BLOCK_M": block_m, "BLOCK_N": block_n, "TREE": False, "SPLIT": False, "CHUNKED": 0},
    )
    assert found["copies"] and not found["spilled"] and found["shared"] <= 227 * 1024


@pytest.mark.parametrize("most", [2, 64])
def test_paged_together_of_wide_heads(most):
    shape = TogetherShape.of(most, 4, 512, torch.bfloat16)
    found = compiled(
        "paged_attention",
        "_paged_attention",
        {"num_warps": shape.warps, "num_stages": shape.stages},
        {
            **WIDE,
            "BLOCK_N": shape.block_n,
            "BLOCK_M": shape.block_m,
            "TREE": True,
            "SPLIT": False,
            "CHUNKED": 0,
            "ROWS": shape.block_m // 4,
            "COUNT_PAD": 256,
            "MIN_KEYS": 256,
            "SHORT_KEYS": 1024,
        },
        TOGETHER,
    )
    assert found["copies"] and not found["spilled"] and shape.at_once * (found["shared"] + 1024) <= 228 * 1024


def test_reports():
    """The chunks that hold a row's largest logits stay in registers."""
    found = compiled(
        "report",
        "_merge_parts",
        {"num_warps": report.MERGE_WARPS},
        {"P2": 64, "C2": 256, "K": report.MOST, "B": report.CHUNK, "PDL": True},
        {"logits": "bf16", "tokens": "fp32", "most": "i32", "tops": "i32", "parts": "fp64", "out": "fp32"},
    )
    assert not found["spilled"] and found["shared"] <= 8192


def test_merging_tiles():
    merged = compiled(
        "key_chunks",
        "_merge_tiles",
        {"num_warps": 4},
        {
            **{k: v for k, v in LLAMA.items() if k != "CAPPED"},
            "D_PAD": 128,
            "R_PAD": 4,
            "ROWS": 16,
            "MERGE": merged_at_once(4, 128, 4),
        },
        TOGETHER,
    )
    assert not merged["spilled"]


@pytest.mark.parametrize(
    "format, dim, share, rows",
    [
        ("int4", 128, 4, 16),
        ("int4", 128, 4, 1),
        ("int4", 128, 16, 16),
        ("int4", 64, 4, 16),
        ("int4", 80, 4, 16),
        ("int4", 256, 16, 16),
        ("int8", 128, 4, 16),
        ("int8", 256, 4, 16),
        ("fp8", 128, 4, 16),
        ("fp8", 128, 16, 1),
    ],
)
def test_quantized_decode(format, dim, share, rows):
    """Codes and their scales are fetched two blocks ahead, and 4-bit codes become numbers by one logical operation
    each, for every product once. Rows of 80 are no multiples of 16 bytes."""
    shape, bits = shape_of(format, dim, torch.bfloat16, rows, share), {"int4": 4, "int8": 8, "fp8": 0}[format]
    words, pad = dim // 4 if bits == 4 else dim // 2, 1 << (dim - 1).bit_length()
    words_pad = 1 << (words - 1).bit_length()
    found = compiled(
        "quantized_decode",
        "_quantized_decode",
        {"num_warps": shape.warps, "num_stages": shape.stages},
        {
            **LLAMA,
            "R": share,
            "D": dim,
            "P": 64,
            "W": words,
            "W_PAD": words_pad,
            "D_PAD": pad,
            "BLOCK_M": max(8, share),
            "BLOCK_N": shape.block_n,
            "COUNT_PAD": 64,
            "MIN_KEYS": 128,
            "SHORT_KEYS": 1024,
            "R_PAD": share,
            "MERGE": merged_at_once(share, pad, shape.warps),
            "BITS": bits,
            "TRICK": True,
            "ASM": True,
            "WINDOWED": False,
            "PDL": True,
        },
        {"k_ptr": "i16", "v_ptr": "i16", "k_meta": "i32", "v_meta": "i32"},
    )
    assert not found["spilled"] and found["words" if dim == 80 else "copies"] and found["words"]
    assert (
        found["shared"] >= 2 * 2 * shape.block_n * (2 * words_pad + 4)
        and shape.at_once * (found["shared"] + 1024) <= 228 * 1024
    )
    if bits == 4 and shape.warps == 1:
        pairs = shape.block_n * words_pad // 32  # of words, keys and values, a thread
        assert found["lop3"] == 4 * pairs and found["mma"] == 4 * pairs * 2 * 32 * max(8, share) // (16 * 16 * 8)


@pytest.mark.parametrize(
    "format, dim, block_m, tree",
    [
        ("int4", 128, 16, True),
        ("int4", 64, 16, False),
        ("int4", 256, 16, False),
        ("int4", 128, 32, False),
        ("int8", 128, 16, True),
        ("fp8", 128, 16, False),
    ],
)
def test_quantized_rows(format, dim, block_m, tree):
    """Codes are fetched two blocks ahead. 8-bit codes spill a little on one warp, and are fastest so all the same."""
    shape, bits = RowsShape.of(format, dim, torch.bfloat16, block_m), {"int4": 4, "int8": 8, "fp8": 0}[format]
    words = dim // 4 if bits == 4 else dim // 2
    found = compiled(
        "quantized_attention",
        "_quantized_attention",
        {"num_warps": shape.warps, "num_stages": shape.stages},
        {
            **LLAMA,
            **SPANS,
            "D": dim,
            "P": 64,
            "W": words,
            "W_PAD": words,
            "BLOCK_M": block_m,
            "BLOCK_N": shape.block_n,
            "BITS": bits,
            "TRICK": True,
            "ASM": True,
            "WINDOWED": False,
            "TREE": tree,
            "SPLIT": True,
        },
        {
            "k_ptr": "i16",
            "v_ptr": "i16",
            "k_meta": "i32",
            "v_meta": "i32",
            "out_ptr": "fp32",
            "ancestors_ptr": "i64",
            "positions_ptr": "i64",
        },
    )
    assert found["copies"] and (not found["spilled"] or bits != 4 and shape.warps == 1)
    assert (
        found["shared"] >= 2 * 2 * shape.block_n * (2 * words + 4)
        and shape.at_once * (found["shared"] + 1024) <= 228 * 1024
    )


@pytest.mark.parametrize("format", ["int4", "fp8"])
def test_quantized_together(format):
    shape, bits = RowsShape.of(format, 128, torch.bfloat16, 16), {"int4": 4, "fp8": 0}[format]
    words = 32 if bits == 4 else 64
    found = compiled(
        "quantized_attention",
        "_quantized_attention",
        {"num_warps": shape.warps, "num_stages": shape.stages},
        {
            **LLAMA,
            "P": 64,
            "W": words,
            "W_PAD": words,
            "BLOCK_M": 16,
            "BLOCK_N": shape.block_n,
            "BITS": bits,
            "TRICK": True,
            "ASM": True,
            "WINDOWED": False,
            "TREE": True,
            "SPLIT": False,
            "ROWS": 4,
            "COUNT_PAD": 256,
            "MIN_KEYS": 256,
            "SHORT_KEYS": 1024,
        },
        {**TOGETHER, "k_ptr": "i16", "v_ptr": "i16", "k_meta": "i32", "v_meta": "i32"},
    )
    assert found["copies"] and (not found["spilled"] or bits != 4)
    assert (
        found["shared"] >= 2 * 2 * shape.block_n * (2 * words + 4)
        and shape.at_once * (found["shared"] + 1024) <= 228 * 1024
    )


@pytest.mark.parametrize("format", ["int4", "int8", "fp8"])
def test_quantized_write(format):
    """The rotation's stages add within a thread: only the grid's ends are handed from lane to lane, two of each four
    times."""
    bits = {"int4": 4, "int8": 8, "fp8": 0}[format]
    pages, meta = ("u8", "fp16") if bits else ("fp8e4nv", "fp32")
    basis = Rotation(128, 128, True).basis(torch.bfloat16, torch.device("cpu"), False) if bits == 4 else None
    shape = WriteShape.of(64, 128, basis)
    found = compiled(
        "quantized_qkv",
        "_quantized_qkv",
        {"num_warps": shape.warps},
        {
            "H": 32,
            "G": 8,
            "P": 64,
            "D": 128,
            "HEADS": shape.heads,
            "BLOCKS": shape.blocks,
            "WIDTH": shape.width,
            "STAGES": shape.stages,
            "NORM": False,
            "BITS": bits,
            "TURN": bits == 4,
            "TURN_VALUES": False,
            "PARTS": "cross" if bits == 4 else "",
            "PDL": True,
        },
        {
            "heads_ptr": "bf16",
            "weight_ptr": "bf16",
            "matrix_ptr": "bf16",
            "signs_ptr": "bf16",
            "k_pages": pages,
            "v_pages": pages,
            "k_meta": meta,
            "v_meta": meta,
            "slots_ptr": "i64",
            "positions_ptr": "i64",
            "table_ptr": "fp32",
        },
    )
    assert not found["spilled"] and found["mma"] == (8 if bits == 4 else 0)
    assert bits != 4 or found["shuffles"] <= 8


def compiled_dense(shape: Shape, dim: int) -> dict:
    return compiled(
        "dense_attention",
        "_dense_attention",
        {"num_warps": shape.warps, "num_stages": shape.stages},
        {**LLAMA, "D": dim, "R_PAD": 4, "BLOCK_M": shape.block_m, "BLOCK_N": shape.block_n, "LAZY": False, "SHARE": 0},
    )


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_dense(dim):
    shape = Shape.of(dim)
    found = compiled_dense(shape, dim)
    assert found["tiles"] and found["wgmma"] and not found["spilled"] and found["shared"] <= 227 * 1024


@pytest.mark.parametrize("dim, share", [(64, 0), (128, 0), (128, 4)])
def test_by_hand(dim, share):
    """In both loops of both consumers all exponentials of a block are taken while the product with the values is under
    way. Registers change hands, and a consumer releases every block that it has read, of keys and of values, except the
    last one of values. With a share of the powers by a polynomial, the unit for exponentials gives the others."""
    shape = HopperShape.of()
    found = compiled(
        "hopper_attention",
        "_hopper_attention",
        {"num_warps": 4},
        {
            "H": 32,
            "R": 4,
            "R_PAD": 4,
            "D": dim,
            "BLOCK_M": shape.block_m,
            "BLOCK_N": shape.block_n,
            "STAGES": shape.stages,
            "WANT_LSE": dim == 64,
            "LAZY": False,
            "SHARE": share,
        },
    )
    assert found["tiles"] and found["wgmma"] and not found["spilled"] and found["shared"] <= 227 * 1024
    taken = shape.block_n // 2 * (share - 1) // share if share else shape.block_n // 2
    assert len([n for n in found["under"] if taken <= n < taken + 4]) == 2 * 2, found["under"]
    assert {"24", "240"} <= set(found["registers"]) and found["warps"] == 12 and found["arrivals"] == 2 * (1 + 2 * 2)


def test_routing_waits_for_no_other_warp():
    """A row's experts are picked within a warp, by one reduction of an int64 each and one for the weights."""
    found = compiled(
        "moe_routing",
        "_route",
        {"num_warps": 1},
        {"X": 128, "X_PAD": 128, "TOP_K": 8, "K_PAD": 8, "RENORMALIZE": True, "PDL": True},
        {"logits_ptr": "bf16", "weights_ptr": "fp32", "ids_ptr": "i32"},
    )
    assert not found["spilled"] and not found["barriers"] and found["shuffles"] <= 8 * 5 * 2 + 5


@pytest.mark.parametrize("num_rows, width, gated", hopper_gemv.MEASURED)
def test_products_of_few_rows_by_hand(num_rows, width, gated):
    """All of W that a program has room for is asked for before it waits for the kernel before it; a barrier of all
    warps is for a block, not for 64 inputs, and nothing waits for a product but the last, where every block has a
    slot."""
    ring = hopper_gemv.MEASURED[num_rows, width, gated]
    blocks, parts = width // (ring.block_k * ring.splits), 1 + gated
    found = compiled(
        "hopper_gemv",
        "_stream_rows",
        {"num_warps": 4},
        {
            "OUT": num_rows // parts,
            "N": num_rows,
            "BLOCK_N": ring.block_n,
            "BLOCKS": blocks,
            "W_RING": min(ring.w_blocks, blocks),
            "X_RING": min(ring.x_blocks, blocks),
            "SPLIT": ring.splits > 1,
            "GATED": gated,
            "RESIDUAL": False,
            "PDL": True,
        },
        {
            "y_ptr": "bf16",
            "part_ptr": "fp32",
            "w_desc": (ring.block_n, ring.block_k),
            "x_desc": (hopper_gemv.MAX_ROWS, ring.block_k),
        },
    )
    assert not found["spilled"] and found["shared"] <= 227 * 1024
    assert found["early"] == parts * min(ring.w_blocks, blocks) and found["tiles"] == (parts + 1) * blocks
    assert found["wgmma"] == parts * blocks * ring.block_k // 16 and found["barriers"] <= 10 * blocks


def test_the_ends_of_a_decode_step():
    """The launch form of a GPU, which the interpreter leaves out: the early start of the last kernel, tokens of
    drafts."""
    words = {
        name: "i32"
        for name in (
            "token_ptr",
            "top_k_ptr",
            "stream_ptr",
            "tables_ptr",
            "context_out",
            "tables_out",
            "top_k_out",
            "stream_out",
            "forgotten_ptr",
            "places_out",
        )
    }
    wide = {name: "i64" for name in ("rows_ptr", "starts_ptr", "given_ptr", "ids_out", "slots_out")}
    single = {
        name: "fp32"
        for name in ("temperature_ptr", "top_p_ptr", "min_p_ptr", "temperature_out", "top_p_out", "min_p_out")
    }
    opened, forgetful = (
        compiled(
            "decode_rows",
            "_open_rows",
            {"num_warps": 4},
            {"K": 2, "P": 16, "BLOCK": 1024, "GIVEN": True, "FORGETS": forgets},
            {**words, **wide, **single},
        )
        for forgets in (False, True)
    )
    closed = compiled(
        "decode_rows",
        "_close_rows",
        {"num_warps": 4},
        {"BLOCK": 256, "PDL": True},
        {"draws_ptr": "fp32", "out_ptr": "fp32", "token_ptr": "i32", "rows_ptr": "i64"},
    )
    assert not opened["spilled"] and not forgetful["spilled"] and not closed["spilled"]


LORA = {name: "bf16" for name in ("x_ptr", "a_ptr", "b_ptr", "y_ptr", "w_ptr", "out_ptr", "scale_ptr", "bias_ptr")}
LORA |= {"residual_ptr": "bf16", "s_ptr": "fp32", "part_ptr": "fp32", "squares_ptr": "fp32"}
QKV = {"N": 6144, "W0": 4096, "W1": 1024, "W2": 1024, "C": 48, "R": 16, "S": 8, "SLOTS": 16, "PDL": True, "KIND": -1}
GATE_UP = {"N": 28672, "W0": 14336, "W1": 14336, "W2": 0, "C": 32, "KIND": 0, "OUT": 14336}
FEW = {"TILE_M": lora.SMALL_M, "RUNS": 4}
# numbers of a launch that Triton knows to be multiples of 16
WHOLE = {"K": 4096, "OUT": 6144, "x_row": 4096, "y_row": 6144, "residual_row": 6144, "share": 4096}
VARIED = {**WHOLE, "VARIED": True, "WHOLE_K": True, "WHOLE": True, "NORM": True, "BIAS": False, "RESIDUAL": False}
ONE = {**VARIED, "BLOCK_N": 8, "BLOCK_K": 256, "RUNS": 8, "RUNS_2": 8}
ROWS = {**VARIED, "SPLIT": False, "RUNS": 4, "RUNS_2": 4, "RANK": 16}


@pytest.mark.parametrize(
    "kernel, warps, constants",
    [
        ("_sort_few", 8, {"ROWS": 64}),
        ("_shrink_rows", 4, {"K": 4096, "RUN": lora.RUN, "BLOCK_R": 16, "BLOCK_K": lora.RUN, "NORM": True}),
        ("_expand_rows", 4, {"RUNS": 8, "RUNS_2": 8, "BLOCK_R": 16, "BLOCK_N": lora.BLOCK_N}),
        ("_shrink_tiles", 4, {"K": 4096, "RUN": 1024, "BLOCK_C": 16, "TILE_K": lora.TILE_K, "NORM": True, **FEW}),
        ("_shrink_tiles", 4, {"K": 4096, "RUN": 4096, "BLOCK_C": 64, "TILE_K": lora.TILE_K, "TILE_M": lora.SHRINK_M}),
        ("_expand_tiles", 4, {"BLOCK_R": 16, "TILE_N": lora.TILE_N, "PRECISION": "tf32", **FEW}),
        ("_expand_tiles", 8, {"RUNS": 1, "BLOCK_R": 16, "TILE_N": lora.TILE_N, "TILE_M": lora.TILE_M, **GATE_UP}),
        ("_one_row", 4, ONE),
        ("_one_row", 4, {**ONE, "BLOCK_N": 4, **GATE_UP}),
        ("_few_rows", 4, {**ROWS, "ROWS": 16, "BLOCK_N": 64, "BLOCK_K": 256, "STAGES": 3}),
        ("_few_rows", 4, {**ROWS, "ROWS": 64, "BLOCK_N": 128, "BLOCK_K": 64, "STAGES": 4, **GATE_UP}),
        ("_join", 4, {**VARIED, "SPLITS": 4, "BLOCK": 256, "RUNS": 14, "RUNS_2": 16, "BLOCK_R": 16, "W1": 0}),
    ],
)
def test_adapters(kernel, warps, constants):
    module = lora if hasattr(lora, kernel) else gemv
    names = inspect.signature(getattr(module, kernel)).parameters
    given = {"PRECISION": "tf32", "NORM": False, **QKV, **constants}
    shared = {name: value for name, value in given.items() if name in names}
    pointers = {name: kind for name, kind in LORA.items() if name in names}
    found = compiled(module.__name__.split(".")[-1], kernel, {"num_warps": warps, "num_stages": 3}, shared, pointers)
    assert not found["spilled"]


def test_hooks():
    """The heads of an 8B model, and its whole state with three classes."""
    words = {"words_ptr": "i32", "modes_ptr": "i32", "heads_ptr": "i32"}
    pointers = {"x_ptr": "bf16", "out_ptr": "bf16", **words}
    shared = {"SLOT_SHIFT": steer.SLOT_SHIFT, "ADDS": False, "PDL": True}
    for shape in (
        {"H": 32, "D": 128, "C": 2, "BLOCK": 128, "SHIFTS": False},
        {"H": 1, "D": 4096, "C": 3, "BLOCK": 4096, "SHIFTS": True},
    ):
        warps = max(1, min(8, shape["BLOCK"] // 256))
        found = compiled("steer", "_steer", {"num_warps": warps, "num_stages": 3}, {**shape, **shared}, pointers)
        assert not found["spilled"], shape
