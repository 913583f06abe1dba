"""Backends of products with coded weights: the seam with a stand-in package on a CPU, and the real one on a GPU."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from kvasir import technique
from kvasir.engine.product_choice import OWN, choose_products, copy_of, shapes_of
from kvasir.errors import ConfigError
from kvasir.kernels import weight_codes
from kvasir.layers.linear import Linear
from kvasir.layers.product_backend import BACKENDS, ProductBackend
from kvasir.layers.weight_format import Weight, load_format
from kvasir.layers.weights import Placement
from tests.layers.check_products import error_of

FORMATS = (
    "u4:group=128", "u4:group=128,zeros=true", "u4:group=32", "i8", "i8:group=128", "f8", "f8:scale=block", "mxfp4",
    "nvfp4", "fp6",
)  # fmt: skip
MOST = 0.006  # error of a product, root mean square: results and scales in bf16 give 0.003
CPU = Placement(torch.device("cpu"), torch.bfloat16)


def weight_of(spec: str, widths: dict[str, int], inputs: int, place: Placement) -> Weight:
    """A weight of one format, quantised from random numbers."""
    torch.manual_seed(0)
    where = Placement(place.device, place.dtype, formats=lambda slots: load_format(spec))
    weight = Linear(inputs, widths, bias=False, place=where).weight
    first = 0
    for width in widths.values():
        weight.put(first, torch.randn(width, inputs, device=place.device, dtype=torch.float32) * inputs**-0.5)
        first += width
    return weight


# ------------------------------------------------------------------------------------------------- on a GPU, for real


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("humming") is None, reason="humming is not installed")
@pytest.mark.parametrize("spec", FORMATS)
@torch.inference_mode()
def test_products_are_those_of_dequantised_weights(spec):
    place = Placement(torch.device("cuda"), torch.bfloat16)
    backend = technique.load(BACKENDS, "humming", ProductBackend)
    assert backend.why_not(place) == []
    weight = weight_of(spec, {"gate": 768, "up": 768}, 1024, place)
    matrix, before = weight.dequantise(), weight.num_bytes
    assert backend.why_not_weight(weight) == ""
    other = matrix.roll(1, 0)  # the negative control: the neighbour's outputs
    backend.take(weight)
    assert weight.num_bytes <= before + (16 << 10)
    for rows in (1, 8, 64, 512):
        x = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
        y = weight(x)
        assert error_of(y, x, matrix) < MOST < error_of(y, x, other)
        residual = torch.randn(rows, 768, device="cuda", dtype=torch.bfloat16)
        want = torch.nn.functional.silu(y[:, :768].float()) * y[:, 768:].float() + residual.float()
        got = weight(x, activation="silu", residual_TO=residual.clone())
        torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(weight.dequantise(), matrix, rtol=1e-2, atol=1e-4)
