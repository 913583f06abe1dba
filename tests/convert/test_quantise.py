"""``convert quantise`` in every format that it writes: what is loaded again is what quantising made, and no more bytes.

What is written is read by the readers of other tools' checkpoints, which tests/models hold to those tools' layouts.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvasir.convert.checkpoint import convert
from kvasir.convert.converter import load_converter
from kvasir.errors import ConfigError
from kvasir.layers.weight_format import Weight, load_format
from kvasir.layers.weights import Placement
from kvasir.models.checkpoint import read_config
from kvasir.models.loader import load_model
from tests import checkpoints

SHAPE = dict(hidden_size=128, intermediate_size=128, num_hidden_layers=1, head_dim=64, vocab_size=64)
# Values of ``convert quantise:format=`` -> the format of the weights that are loaded, and their largest error.
ROUND_TRIPS = {
    "f8": ("f8", 0.03),
    "f8:scale=block": ("f8:scale=block", 0.03),
    "i8": ("i8", 0.009),
    "i8:group=32,scale=search": ("i8:group=32,scale=search", 0.006),
    "u4": ("u4", 0.12),
    "u4,scale=search": ("u4:scale=search", 0.11),
    "u4:group=32:zeros=true": ("u4:group=32,zeros=true", 0.1),
    "nvfp4": ("nvfp4", 0.1),
    "nvfp4,scale=search": ("nvfp4:scale=search", 0.09),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return checkpoints.write(tmp_path_factory.mktemp("source"), "llama", **SHAPE)


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    """Folders by what was asked for, each written once."""
    found = {}

    def get(given: str):
        if given not in found:
            spec = f"quantise:format={given}"
            found[given] = tmp_path_factory.mktemp("made") / "model"
            assert not convert(load_converter(spec), spec, source, found[given])["exact"]
        return found[given]

    return get


def matrices(folder) -> dict[str, Weight]:
    (block,) = load_model(folder, read_config(folder), device="cpu", dtype=torch.float32).blocks
    layers = block.mixer.qkv, block.mixer.o, block.ffn.gate_up, block.ffn.down
    return {"+".join(layer.widths): layer.weight for layer in layers}


def quantised(spec: str, w_NK: torch.Tensor) -> torch.Tensor:
    """The numbers that the format makes of a whole stored matrix."""
    form = load_format(spec)
    place = Placement(torch.device("cpu"), torch.float32, formats=lambda slots: form)
    weight = Weight({"w": len(w_NK)}, w_NK.shape[1], place)
    weight.planes = form.quantise(w_NK)
    return weight.dequantise()


@pytest.mark.parametrize("given", ROUND_TRIPS)
def test_what_is_loaded_is_what_quantising_made(given, source, converted):
    (spec, loss), plain = ROUND_TRIPS[given], matrices(source)
    searched = spec.endswith("scale=search")
    for name, got in matrices(converted(given)).items():
        assert got.format.name == load_format(spec).name
        parts = plain[name].tensor.split(list(got.widths.values()))
        want = torch.cat([quantised(spec, part) for part in parts])
        # A divisor of nvfp4 is the reciprocal of a factor, twice rounded; all else is stored as it is.
        torch.testing.assert_close(got.dequantise(), want, rtol=3e-7 if spec.startswith("nvfp4") else 0, atol=0)
        error = float((got.dequantise() - plain[name].tensor).norm() / plain[name].tensor.norm())
        assert error < loss, (name, error)
        if searched:
            usual = quantised(spec.replace("scale=search", "scale=max"), plain[name].tensor)
            most = float((usual - plain[name].tensor).norm() / plain[name].tensor.norm())
            assert error <= most * (1.001 if given.startswith("i8") else 0.98)  # 8 bits have little to gain
        assert got.num_bytes < 0.6 * 2 * plain[name].tensor.numel()


def edited(folder, target, change, config=None):
    """A copy of a checkpoint with each tensor, by name, as ``change`` gives it."""
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors |= {key: value.contiguous() for key, value in change(name, tensor).items()}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    about = json.loads((folder / "config.json").read_text())
    about["quantization_config"] = config or about["quantization_config"]
    (target / "config.json").write_text(json.dumps(about))
    return target


@pytest.mark.parametrize("inverted", [True, False])
def test_both_conventions_of_the_tensor_scale(inverted, converted, tmp_path):
    """compressed-tensors, which is written, stores a divisor, and Model Optimizer a factor. A divisor that is taken for
    a factor is noticed."""
    ends = {"weight_packed": "weight", "weight_scale": "weight_scale", "weight_global_scale": "weight_scale_2"}

    def renamed(name, tensor):
        module, _, end = name.rpartition(".")
        if end == "weight_global_scale":
            tensor = 1 / tensor if inverted else tensor
            tensor = tensor.reshape(())
        return {f"{module}.{ends.get(end, end)}": tensor}

    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    ours, theirs = matrices(converted("nvfp4")), matrices(edited(converted("nvfp4"), tmp_path, renamed, config))
    for name, weight in ours.items():
        same = torch.allclose(theirs[name].dequantise(), weight.dequantise(), rtol=3e-7, atol=0)
        assert same == inverted


CONTROLS = {
    "nibbles swapped": ("u4", "weight_packed", lambda t: t << 4 & ~0x0F0F0F0F | t >> 4 & 0x0F0F0F0F),
    "a neighbour's scale": ("i8:group=32,scale=search", "weight_scale", lambda t: t.roll(1, -1)),
    "a zero point off by one": ("u4:group=32:zeros=true", "weight_zero_point", lambda t: t ^ 0x11111111),
    "an inverse tensor scale": ("nvfp4", "weight_global_scale", lambda t: 1 / t),
    "an inverse scale": ("f8:scale=block", "weight_scale_inv", lambda t: 1 / t),
}


@pytest.mark.parametrize("what", CONTROLS)
def test_the_comparison_can_fail(what, converted, tmp_path):
    given, end, change = CONTROLS[what]
    folder = edited(converted(given), tmp_path, lambda n, t: {n: change(t) if n.endswith("." + end) else t})
    right, wrong = matrices(converted(given)), matrices(folder)
    assert not any(torch.allclose(wrong[n].dequantise(), w.dequantise(), rtol=1e-3) for n, w in right.items())


@pytest.mark.parametrize(
    "spec, message",
    [
        ("quantise:format=mxfp4", "mxfp4 are read and not written.*e.g. f8"),
        ("quantise:format=plain", "changes nothing"),
        ("quantise:format=u4:group=48", "group is 48; there are"),
        ("quantise:format=u9", "no formats named 'u9'"),
        ("quantise:format=u4,scale=best", "scale"),
    ],
)
def test_what_is_not_written_is_refused_before_anything_is(spec, message, source, tmp_path):
    with pytest.raises(ConfigError, match=message):
        convert(load_converter(spec), spec, source, tmp_path / "made")
    assert not (tmp_path / "made").exists()
