"""The code that the compiler makes of the kernels over latents for Hopper, as in ``test_compiled_for_hopper``."""

from __future__ import annotations

import pytest
import torch

from kvasir.kernels import latent_decode, latent_prompt
from tests.kernels.test_compiled_for_hopper import compiled, compiler_ends

__all__ = ["compiler_ends"]  # a fixture of every module that compiles
pytest.importorskip("triton")
LATENTS = {
    "P": 16, "R": 512, "R_PAD": 512, "Q": 64, "Q_PAD": 64, "LATENT_ROW": 576, "ROPE_ROW": 576, "META_ROW": 0,
    "FORMAT": "plain", "WIDE": 128, "SPLIT": False, "CHUNKED": 0, "WANT_LSE": False, "COUNT_PAD": 64, "MIN_KEYS": 256,
    "SHORT_KEYS": 1024,
}  # fmt: skip
ROWS = {name: "i64" for name in ("ancestors_ptr", "place_ptr", "length_ptr")}
PLANES = {name: "bf16" for name in ("latent_ptr", "rope_ptr", "meta_ptr")}


@pytest.mark.parametrize(
    "heads, most", [(16, 1), pytest.param(32, 1, marks=pytest.mark.slow), pytest.param(128, 16, marks=pytest.mark.slow)]
)
def test_latents(heads, most):
    """A page's rows are copied once, although scores and sums both read them, and as many programs fit as are counted
    on."""
    block = latent_decode.heads_of_block(heads)
    shape = latent_decode.Shape.of(latent_decode.block_of(most, heads, torch.bfloat16), 512, torch.bfloat16)
    found = compiled(
        "latent_decode",
        "_latent_attention",
        {"num_warps": shape.warps, "num_stages": shape.stages},
        {
            **LATENTS,
            "H": heads,
            "HEADS": block,
            "BLOCK_M": shape.block_m,
            "BLOCK_N": shape.block_n,
            "ROWS": shape.block_m // block,
            "TREE": most > 1,
        },
        {**ROWS, **PLANES},
    )
    copy = shape.block_n * 576 * 2 // (16 * 32 * shape.warps)  # of one stage, by one thread
    assert found["copies"] == copy * shape.stages and not found["spilled"]
    assert shape.at_once * (found["shared"] + 1024) <= 228 * 1024
    assert (found["wgmma"] > 0) == (shape.block_m >= 64)


@pytest.mark.slow
@pytest.mark.parametrize("nope, value", [(128, 128), (192, 256), (64, 128)])
def test_prompts_over_latents(nope, value):
    widths = [1 << (width - 1).bit_length() for width in (nope, value)]
    shape = latent_prompt.Shape.of(widths[0] + 64)
    found = compiled(
        "latent_prompt",
        "_latent_prompt",
        {"num_warps": shape.warps, "num_stages": shape.stages},
        {
            "D": nope,
            "D_PAD": widths[0],
            "Q": 64,
            "Q_PAD": 64,
            "V": value,
            "V_PAD": widths[1],
            "BLOCK_M": shape.block_m,
            "BLOCK_N": shape.block_n,
        },
        {
            "k_desc": (shape.block_n, widths[0]),
            "rope_desc": (shape.block_n, 64),
            "v_desc": (shape.block_n, widths[1]),
        },
    )
    assert found["tiles"] and found["wgmma"] and not found["spilled"] and found["shared"] <= 227 * 1024
