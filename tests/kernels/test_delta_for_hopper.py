"""The code that the compiler makes of the delta rule's kernels, as in ``test_compiled_for_hopper``: at the heads of
Qwen 3.5 9B, and at those of Kimi Linear with a decay for each channel. Also of what ends a layer of such models: the
gated norm, and the gate of the expert that every row uses."""

from __future__ import annotations

import pytest

from kvasir.kernels import gated_norm, shared_expert
from kvasir.kernels._triton import next_power_of_2
from kvasir.kernels.gated_chunks import BLOCK, CHUNK, EXPONENT, PART, STAGES
from kvasir.kernels.norm import MAX_WIDTH
from tests.kernels.test_compiled_for_hopper import compiled, compiler_ends

__all__ = ["compiler_ends"]  # a fixture of every module that compiles
pytest.importorskip("triton")
HEADS = {
    False: {"H": 32, "K": 16, "D": 128, "V": 128, "C": 8192, "X": 8256, "STRENGTH": 8192, "DECAY": 8224, "N": 1},
    True: {"H": 32, "K": 32, "D": 128, "V": 128, "C": 12288, "X": 16416, "STRENGTH": 16384, "DECAY": 12288, "N": 128},
}
SIZES = {"TAPS": 4, "AHEAD": 16, "CHUNK": CHUNK, "BLOCK": BLOCK, "BD": 128, "PRECISION": "tf32", "EACH": True,
         "PDL": True, "EXPONENT": EXPONENT, "PART": PART}  # fmt: skip
KERNELS = {
    "_walk": (
        {"num_warps": 4},
        "H K D V X C STRENGTH DECAY TAPS AHEAD BD EACH PDL",
        {"BV": 32, "LONG": False, "MANY": True},
    ),
    "_convolve": ({"num_warps": 8}, "K D V X C TAPS CHUNK", {"BW": 128, "APART": True}),
    "_gates": ({"num_warps": 4}, "H N X STRENGTH DECAY CHUNK", {"BY_HEAD": True}),
    "_compare": ({"num_warps": 4, "num_stages": 1}, "H K D C CHUNK BLOCK BD PRECISION EXPONENT PART", {}),
    "_solve": ({"num_warps": 4, "num_stages": 1}, "H K D V C CHUNK BLOCK BD PRECISION", {"BV": 128}),
    "_carry": ({"num_warps": 4, "num_stages": STAGES}, "H K D V C CHUNK BD PRECISION", {"BV": 32}),
}
NUMBERS = "decay_ptr bias_ptr total_ptr strength_ptr decays_ptr strengths_ptr matrix_ptr system_ptr out_ptr".split()
ROWS = (
    "rows_ptr conv_ptr taps_ptr tail_ptr ahead_ptr mixed_ptr seen_ptr given_ptr within_ptr query_ptr key_ptr".split()
)  # fmt: skip
TYPES = dict.fromkeys(NUMBERS, "fp32") | dict.fromkeys(ROWS, "bf16")


@pytest.mark.slow
@pytest.mark.parametrize("channelwise", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_is_spilled(kernel, channelwise):
    """A program fits on a multiprocessor, and all that it computes with stays in registers."""
    options, names, own = KERNELS[kernel]
    sizes = HEADS[channelwise] | SIZES
    constants = {name: sizes[name] for name in names.split()} | own
    if kernel == "_gates":
        constants["BN"] = sizes["N"]
    elif kernel != "_convolve":
        constants["CHANNELWISE"] = channelwise
    module = "gated_rows" if kernel == "_walk" else "gated_chunks"
    found = compiled(module, kernel, options, constants, TYPES)
    assert not found["spilled"] and found["shared"] <= 227 * 1024
    if kernel == "_walk":
        assert found["per_thread"] <= 128, "four programs of 128 threads have the 65,536 registers of a multiprocessor"


@pytest.mark.slow
@pytest.mark.parametrize("heads, width", [(32, 128), (48, 128), (4, 512)])
@pytest.mark.parametrize("silu", [False, True])
def test_the_gated_norm_fits(heads, width, silu):
    """As its launcher does it: whole heads of up to ``BLOCK`` numbers."""
    constants = {"H": heads, "V": width, "HEADS": min(heads, gated_norm.BLOCK // width), "BV": width}
    found = compiled(
        "gated_norm",
        "_gated_norm",
        {"num_warps": 4},
        constants | {"SILU": silu, "PDL": True},
        {"x_ptr": "fp32", "gate_ptr": "bf16", "weight_ptr": "bf16", "y_ptr": "bf16"},
    )
    assert not found["spilled"] and found["shared"] <= 8 * 1024


@pytest.mark.slow
@pytest.mark.parametrize("width", [2048, 7168, MAX_WIDTH])
@pytest.mark.parametrize("norm", [False, True])
def test_the_gate_of_a_shared_expert_fits(width, norm):
    pointers = dict.fromkeys(("x_ptr", "scale_ptr", "gate_ptr", "shared_ptr", "residual_ptr", "y_ptr"), "bf16")
    constants = {"E": width, "WIDE": next_power_of_2(width), "BLOCK": shared_expert.BLOCK, "RESIDUAL": True}
    found = compiled(
        "shared_expert", "_add_shared", {"num_warps": 8}, constants | {"NORM": norm, "PDL": True}, pointers
    )
    assert not found["spilled"] and found["shared"] <= 8 * 1024
