"""The plain ops against their definitions in float64: norm, rotary embedding, gated activations."""

import math

import pytest
import torch

from kvasir.kernels.activation import ACTIVATIONS, gated
from kvasir.kernels.norm import rms_norm
from kvasir.kernels.rope import rotate
from kvasir.layers.norm import RMSNorm
from kvasir.layers.rope import RopeTable, frequencies
from kvasir.layers.spec import NormSpec, RopeSpec
from kvasir.layers.weights import Placement, Slot


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype,bound", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
def test_rms_norm(dtype, bound):
    x, w = torch.randn(5, 33).to(dtype), torch.randn(33).to(dtype)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w.double()
    got = rms_norm(x, w, 1e-5)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), exact, atol=bound, rtol=bound)


def test_rms_norm_of_zeros_and_of_large_values():
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6), torch.zeros(2, 8))
    assert (
        rms_norm(torch.full((2, 8), 6e4, dtype=torch.float16), torch.ones(8, dtype=torch.float16), 1e-6)
        .isfinite()
        .all()
    )


def test_shifted_norm_keeps_small_weights_in_low_precision():
    """1 + w in bf16 would round w = 0.001 away."""
    norm = RMSNorm(16, NormSpec(1e-6, offset=1.0), Placement(torch.device("cpu"), torch.bfloat16))
    norm.slots()["weight"].fill(torch.full((16,), 0.001, dtype=torch.bfloat16))
    assert (norm.weight > 1.0005).all()


@pytest.mark.parametrize(
    "name,fn",
    [
        ("silu", lambda v: v / (1 + math.exp(-v))),
        ("gelu", lambda v: v * 0.5 * (1 + math.erf(v / math.sqrt(2)))),
        ("gelu_tanh", lambda v: 0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))),
    ],
)
@pytest.mark.parametrize("exact", [False, True])
def test_gated(name, fn, exact):
    x = torch.randn(4, 14)
    want = torch.tensor([[fn(g) * u for g, u in zip(row[:7].tolist(), row[7:].tolist())] for row in x])
    before = x.clone()
    torch.testing.assert_close(gated(x, ACTIVATIONS[name], exact), want, atol=1e-6, rtol=1e-5)
    assert torch.equal(x, before), "the input is left alone"
    assert gated(x[:0], ACTIVATIONS[name], exact).shape == (0, 7)


@pytest.mark.parametrize("exact", [False, True])
def test_clamped_swiglu(exact):
    """Gates are clamped from above, ups from both sides, and one is added to the ups."""
    x = torch.tensor([[-20.0, 20.0, 3.0, 8.0, 1.0, 20.0, -20.0, 0.5, -1.0, 7.5]])
    want = []
    for gate, up in zip(x[0, :5].tolist(), x[0, 5:].tolist()):
        gate, up = min(gate, 7.0), max(-7.0, min(up, 7.0))
        want.append((up + 1) * gate / (1 + math.exp(-1.702 * gate)))
    torch.testing.assert_close(gated(x, ACTIVATIONS["clamped_swiglu"], exact), torch.tensor([want]))


@pytest.mark.parametrize("dtype,bound", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_rotation_is_a_complex_product(dtype, bound):
    spec = RopeSpec(100.0, 8)
    positions = torch.tensor([0, 1, 63, 5])
    x = torch.randn(4, 3, 8).to(dtype)
    angle = positions.double()[:, None] * 100.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    turned = (
        torch.complex(x[..., :4].double(), x[..., 4:].double()) * torch.polar(torch.ones_like(angle), angle)[:, None]
    )
    got = rotate(x, *RopeTable(spec, 64, torch.device("cpu")).rows(positions))
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), torch.cat((turned.real, turned.imag), -1), atol=bound, rtol=bound)
    assert torch.equal(got[0], x[0]), "position 0 is not turned"


def test_scaled_frequencies_keep_fast_and_stretch_slow_dimensions():
    plain = frequencies(RopeSpec(10000.0, 64))
    assert torch.equal(frequencies(RopeSpec(10000.0, 64, "linear", factor=4.0)), plain / 4)
    for spec in (RopeSpec(10000.0, 64, "llama3", 8.0, 8192, 1.0, 4.0), RopeSpec(10000.0, 64, "yarn", 8.0, 4096)):
        ratio = plain / frequencies(spec)
        assert ratio[0] == pytest.approx(1.0) and ratio[-1] == pytest.approx(8.0)
        assert (ratio.diff() >= -1e-5).all(), "from kept to stretched, in order"


def test_yarn_scales_cos_and_sin():
    table = RopeTable(RopeSpec(100.0, 4, "yarn", 2.0, 16, attention_factor=1.5), 4, torch.device("cpu"))
    cos, sin = table.rows(torch.tensor([0]))
    assert torch.equal(cos, torch.full((1, 1, 1, 2), 1.5)) and torch.equal(sin, torch.zeros(1, 1, 2, 2))


def test_positions_beyond_the_table_are_an_error():
    with pytest.raises(IndexError):
        RopeTable(RopeSpec(100.0, 4), 4, torch.device("cpu")).rows(torch.tensor([4]))


def test_a_repeated_slot_fills_every_head():
    slot = Slot(torch.empty(3, 4), offset=1.0, repeat=True)
    slot.fill(torch.arange(4.0))
    assert slot.shape == (4,) and torch.equal(slot.target, torch.arange(1.0, 5.0).expand(3, 4))
