"""Formats that a converter writes: the file, loaded again, holds the codes that ``--weights`` makes."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvasir.convert.checkpoint import convert
from kvasir.convert.converter import load_converter
from kvasir.layers.codes import HIGH
from kvasir.layers.weight_format import MATRIX
from kvasir.models.loader import load_model
from tests import checkpoints
from tests.models.packed_checkpoints import SHAPE

CPU = dict(device="cpu", dtype=torch.float32)
# Format, and its resident bytes of those of fp32
FORMATS = {"fp6": 0.22, "i8": 0.28}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = checkpoints.write(tmp_path_factory.mktemp("formats") / "plain", "llama", **SHAPE)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def write(spec, source, target):
    convert(load_converter(spec), spec, source, target)


def load(folder, **options):
    return load_model(folder, json.loads((folder / "config.json").read_text()), **CPU, **options)


def matrices(model):
    return [w for b in model.blocks for w in (b.mixer.qkv.weight, b.mixer.o.weight, b.ffn.gate_up.weight)]


@pytest.mark.parametrize("name", FORMATS)
def test_converted_and_loaded_again(name, plain, tmp_path):
    write(f"quantise:format={name},scale=search", plain, tmp_path / "new")
    mine, wide = load(tmp_path / "new"), load(plain)
    mine_bytes, wide_bytes = (sum(w.num_bytes for w in matrices(model)) for model in (mine, wide))
    assert mine_bytes < FORMATS[name] * wide_bytes, "the planes hold codes"
    for got, want in zip(matrices(mine), matrices(load(plain, weights=f"{name}:scale=search"))):
        assert got.format.name == name
        for plane, values in want.planes.items():
            assert torch.equal(got.planes[plane].view(torch.uint8), values.view(torch.uint8)), plane


def test_a_plane_of_the_neighbour_is_noticed(plain, tmp_path):
    write("quantise:format=fp6", plain, tmp_path / "new")
    before = [w.dequantise() for w in matrices(load(tmp_path / "new"))]
    file = tmp_path / "new" / "model.safetensors"
    tensors = load_file(file)
    assert any(n.endswith(HIGH) for n in tensors) and MATRIX == "weight"
    save_file(
        {n: t.flip(0).contiguous() if n.endswith(HIGH) else t for n, t in tensors.items()}, file, {"format": "pt"}
    )
    for got, want in zip(matrices(load(tmp_path / "new")), before):
        assert (got.dequantise() - want).norm() > 0.3 * want.norm()
