"""The code that the compiler makes of the delta rule with a decay for each channel, as in
``test_compiled_for_hopper``, at Kimi Linear's heads."""

from __future__ import annotations

import pytest

from kvasir.kernels.gated_chunks import BLOCK, CHUNK
from tests.kernels.test_compiled_for_hopper import compiled, compiler_ends

__all__ = ["compiler_ends"]  # a fixture of every module that compiles
pytest.importorskip("triton")
HEADS = {"H": 32, "K": 32, "D": 128, "V": 128, "C": 3 * 4096}
ROW = {"X": 4 * 4096 + 32, "STRENGTH": 4 * 4096, "DECAY": 3 * 4096}
NUMBERS = {
    name: "fp32"
    for name in (
        "decay_ptr",
        "bias_ptr",
        "total_ptr",
        "strength_ptr",
        "decays_ptr",
        "strengths_ptr",
        "matrix_ptr",
        "alike_ptr",
    )
}
ROWS = {
    name: "bf16"
    for name in (
        *("rows_ptr", "conv_ptr", "tail_ptr", "ahead_ptr", "mixed_ptr", "seen_ptr", "given_ptr", "within_ptr"),
        *("query_ptr", "key_ptr"),
    )
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "module, kernel, options, constants",
    [
        ("gated_delta", "_walk", {"num_warps": 4}, HEADS | ROW | {
            "TAPS": 4, "AHEAD": 16, "BD": 128, "BV": 32, "EACH": True, "LONG": False, "CHANNELWISE": True}),
        ("gated_chunks", "_gates", {"num_warps": 4}, ROW | {
            "H": 32, "N": 128, "CHUNK": CHUNK, "BN": 128, "BY_HEAD": True}),
        ("gated_chunks", "_compare", {"num_warps": 4, "num_stages": 1}, {"H": 32, "K": 32, "D": 128, "C": 3 * 4096} | {
            "CHUNK": CHUNK, "BLOCK": BLOCK, "BD": 128, "PRECISION": "tf32"}),
        ("gated_chunks", "_solve_channels", {"num_warps": 4, "num_stages": 1}, HEADS | {
            "CHUNK": CHUNK, "BLOCK": BLOCK, "BD": 128, "BV": 128, "PRECISION": "tf32"}),
        ("gated_chunks", "_carry", {"num_warps": 4, "num_stages": 2}, HEADS | {
            "CHUNK": CHUNK, "BD": 128, "BV": 32, "PRECISION": "tf32", "CHANNELWISE": True}),
    ],
    ids=["walk", "gates", "compare", "solve", "carry"],
)  # fmt: skip
def test_channels(module, kernel, options, constants):
    """Nothing is spilled, and a program fits on a multiprocessor."""
    found = compiled(module, kernel, options, constants, NUMBERS | ROWS | {"out_ptr": "fp32"})
    print(kernel, found)
    assert not found["spilled"] and found["shared"] <= 227 * 1024
