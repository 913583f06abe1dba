"""Backends of products with coded weights: the seam with a stand-in package on a CPU, and the real one on a GPU."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import re
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from kvasir import LLM, SamplingParams, technique
from kvasir.engine.start import product_choice
from kvasir.engine.start.product_choice import choose_products
from kvasir.errors import ConfigError
from kvasir.kernels import weight_codes
from kvasir.layers.linear import Linear
from kvasir.layers.product_backend import BACKENDS, OWN, ProductBackend
from kvasir.layers.weight_format import Weight, load_format
from kvasir.layers.weights import Placement
from tests.layers.check_products import error_of

FORMATS = (
    "u4:group=128", "u4:group=128,zeros=true", "u4:group=32", "i8", "i8:group=128", "f8", "f8:scale=block", "mxfp4",
    "nvfp4", "fp6",
)  # fmt: skip
PARTS = ("schema", "transform", "forward", "tune")
MOST = 0.006  # error of a product, root mean square: results and scales in bf16 give 0.003
CPU = Placement(torch.device("cpu"), torch.bfloat16)


class StandIn:
    """The package on a CPU: it keeps what it was given, unpacked by its own rules, and multiplies by it."""

    def __init__(self) -> None:
        self.forwards: list[tuple[int, bool]] = []  # rows of each product, and whether it was told one kernel

    def modules(self) -> dict[str, ModuleType]:
        found = {name: ModuleType(name) for name in ("humming", *(f"humming.{part}" for part in PARTS))}
        found["humming.schema"].HummingWeightSchema = SimpleNamespace
        found["humming.transform"].prepare_and_transform_humming_tensors = self.transform
        found["humming.forward"].humming_forward = self.forward
        found["humming.tune"].get_heuristics_config = lambda config, shape_m, device: {"rows": shape_m}
        return found

    @staticmethod
    def transform(tensors, shape_n, shape_k, schema, torch_dtype, device):
        options = vars(schema)
        bits = int(re.search(r"\d+", schema.b_dtype)[0])
        codes = bits_of(tensors["weight"], bits, shape_k)
        if schema.b_dtype.startswith("uint"):
            zero = torch.tensor(1 << bits - 1)
            if options.get("has_zero_point"):
                zero = bits_of(tensors["zero_point"].t().contiguous(), bits, shape_n).t()
                zero = zero.repeat_interleave(shape_k // zero.shape[1], 1)
            numbers = (codes - zero).float()
        else:
            numbers = {
                "float8e4m3": lambda: codes.to(torch.uint8).view(torch.float8_e4m3fn).float(),
                "float4e2m1": lambda: weight_codes.numbers_e2m1(codes),
                "float6e3m2": lambda: weight_codes.numbers_e3m2(codes),
            }[schema.b_dtype]()
        scales = tensors["weight_scale"]
        scales = scales.float().repeat_interleave(shape_k // scales.shape[1], 1)
        w_NK = numbers * scales.repeat_interleave(shape_n // scales.shape[0], 0)
        if "weight_scale_2" in tensors:
            w_NK *= tensors["weight_scale_2"].float()[:, None]
        config = SimpleNamespace(to_str=lambda: f"{schema.b_dtype} {shape_n} {shape_k}")
        return config, {"weight": w_NK.to(torch_dtype), "weight_scale": torch.ones(1)}

    def forward(self, config, *, inputs, weight, weight_scale, locks, tuning_config=None):
        self.forwards.append((inputs.shape[0], tuning_config is not None))
        return inputs @ weight.t()


def bits_of(words_NW: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Codes [N, count] of int32 words [N, W], the first in the lowest bits."""
    stream = (words_NW.long()[..., None] >> torch.arange(32) & 1).flatten(1)
    return (stream.view(len(words_NW), count, bits) << torch.arange(bits)).sum(-1)


@pytest.fixture
def package(monkeypatch):
    """The stand-in, installed; its backend says that the CPU is a GPU."""
    made = StandIn()
    for name, module in made.modules().items():
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    return made


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


@pytest.mark.parametrize("spec", FORMATS)
def test_what_the_package_is_given_are_the_weights(spec, package):
    """Codes, scales and zero points by the package's own rules; a neighbour's outputs are told apart."""
    weight = weight_of(spec, {"gate": 128, "up": 128}, 256, CPU)
    matrix, own = weight.dequantise(), weight.format
    x = torch.randn(3, 256, dtype=torch.bfloat16)
    want = weight(x, activation="silu")
    backend = load("humming")
    assert backend.why_not_weight(weight) == ""
    backend.take(weight)
    assert error_of(weight(x), x, matrix) < MOST < error_of(weight(x), x, matrix.roll(1, 0))
    assert error_of(weight(x, activation="silu"), torch.eye(3), want.t()) < 2 * MOST
    torch.testing.assert_close(weight.dequantise(), matrix, rtol=1e-2, atol=1e-4)
    assert weight.format.fingerprint() != own.fingerprint() and set(package.forwards) == {(3, False), (256, False)}
    with pytest.raises(RuntimeError, match="--product-backend triton"):
        weight.slots()


def test_weights_that_are_not_taken():
    def why(spec, n=128, k=256, options=""):
        backend = load("humming" + options)
        return backend.why_not_weight(weight_of(spec, {"w": n}, k, CPU))

    assert "no layout 'plain'" in why("plain", 128) and "multiples of 64" in why("u4:group=32", 96)
    assert "multiples" in why("i8", 128, 192) and "blocks of 128" in why("f8:scale=block,block=64")
    assert "not among shapes" in why("i8", options=":shapes=64x64+32x32") and not why("i8", options=":shapes=128x256")
    experts = Weight({"w": 128}, 256, replace(CPU, formats=lambda slots: load_format("i8")), count=2)
    assert "experts" in load("humming").why_not_weight(experts)


def test_a_backend_that_cannot_serve_is_refused():
    model = decoder_of("i8")
    with pytest.raises(ConfigError, match="humming is not installed.*NVIDIA GPUs.*Use --product-backend triton"):
        choose_products("humming", model, 64)
    with pytest.raises(ConfigError, match="exact mode"):
        choose_products("humming", SimpleNamespace(place=replace(CPU, exact=True), weights=model.weights), 64)
    for spec in ("auto", OWN):
        choice = choose_products(spec, model, 64)
        choice.settle()
        assert not choice.chosen and not choice.timed and not choice.fingerprint()


def test_the_clock_chooses_by_shape(package, monkeypatch):
    """The matrix that the package multiplies more quickly goes to it, the other stays; the choice can be named."""
    model = able(decoder_of("i8"), monkeypatch)

    def clock(weights: list[Weight], rows: int) -> float:
        taken, wide = weights[0].format.name == "humming", weights[0].num_outputs > 128
        weights[0](torch.ones(rows, weights[0].num_inputs, dtype=torch.bfloat16))
        return 0.5 if taken and wide else 2.0 if taken else 1.0

    choice = choose_products("auto", model, 64, clock)
    choice.settle()
    assert {rows for rows, one in package.forwards if one} == {1, 8, 64}  # trials, of one kernel each
    assert {rows for rows, one in package.forwards if not one} == {1 << i for i in range(7)}  # warmed
    assert choice.timed == "humming:shapes=256x256" and choice.fingerprint()
    assert [w.format.name for w in model.weights()] == ["humming", "i8", "humming"]

    again = choose_products(choice.timed, able(decoder_of("i8"), monkeypatch), 64)
    again.settle()
    assert again.fingerprint() == choice.fingerprint() and not again.timed


def test_an_engine_hands_its_weights_over(package, monkeypatch):
    """Whole steps give the tokens of our own products, and prefix keys of their own."""
    cls, _ = technique.find(BACKENDS, "humming", ProductBackend)
    monkeypatch.setattr(cls, "why_not", lambda self, place: [])
    prompts, params, found = ["Once upon a time"], SamplingParams(max_tokens=8, temperature=0), {}
    for name in (OWN, "humming"):
        with LLM("nano", device="cpu", weights="i8", product_backend=name, max_model_len=256) as llm:
            tokens = llm.generate(prompts, params)[0].outputs[0].token_ids
            found[name] = tokens, llm.engine.pages.index.root
    assert found[OWN][0] == found["humming"][0] and package.forwards
    assert found[OWN][1] != found["humming"][1]


def test_a_backend_that_is_no_quicker_or_fails_is_left(package, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "kvasir")
    model = able(decoder_of("i8"), monkeypatch)
    choice = choose_products("auto", model, 64, lambda weights, rows: 1.0)
    choice.settle()
    assert choice.timed == OWN and not choice.chosen and "by the clock" in caplog.text

    def fails(*args, **options):
        raise RuntimeError("nvrtc")

    sys.modules["humming.transform"].prepare_and_transform_humming_tensors = fails
    choice = choose_products("auto", model, 64, lambda weights, rows: 1.0)
    choice.settle()
    assert choice.timed == OWN and "left out" in caplog.text and "nvrtc" in caplog.text
    with pytest.raises(ConfigError, match="failed for i8 256x256 .RuntimeError: nvrtc.*--product-backend triton"):
        choose_products("humming", model, 64).settle()


def load(spec: str) -> ProductBackend:
    return technique.load(BACKENDS, spec, ProductBackend)


def decoder_of(spec: str) -> SimpleNamespace:
    """Three weights of two shapes, and the head of a model."""
    found = [weight_of(spec, {"w": n}, 256, CPU) for n in (256, 128, 256)]
    return SimpleNamespace(place=CPU, weights=lambda: iter(found))


def able(model: SimpleNamespace, monkeypatch) -> SimpleNamespace:
    """Let the backend serve here, and ``auto`` look for one."""
    cls, _ = technique.find(BACKENDS, "humming", ProductBackend)
    monkeypatch.setattr(cls, "why_not", lambda self, place: [])
    monkeypatch.setattr(product_choice, "timeable", lambda place: True)
    return model


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
    backend.take(weight, trial=spec != FORMATS[0])  # all kernels of one format: some 30 are compiled
    assert weight.num_bytes <= before + (16 << 10)  # one copy
    for rows in (1, 8, 64, 512):
        x = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
        y = weight(x)
        assert error_of(y, x, matrix) < MOST < error_of(y, x, other)
        residual = torch.randn(rows, 768, device="cuda", dtype=torch.bfloat16)
        want = torch.nn.functional.silu(y[:, :768].float()) * y[:, 768:].float() + residual.float()
        got = weight(x, activation="silu", residual_TO=residual.clone())
        assert (got.float() - want).norm() < MOST * want.norm()
    torch.testing.assert_close(weight.dequantise(), matrix, rtol=1e-2, atol=1e-4)
