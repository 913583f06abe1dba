"""Readers of packed checkpoints (4 and 8 bits): every weight is the number that the format's description says, the
planes hold codes, and what is not served is refused by name. Controls that mix up codes, scales or zero points fail."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvasir.errors import ConfigError
from kvasir.kernels.native.library import native
from kvasir.layers.weight_format import MATRIX, Weight
from kvasir.models import fill
from kvasir.models.loader import load_model
from tests.models import packed_checkpoints as packed
from tests.models.test_native_decoder import NativePaged
from tests.models.test_parity import Paged

CPU = dict(device="cpu", dtype=torch.float32)
AWQ = {"quant_method": "awq", "bits": 4, "group_size": packed.GROUP, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": packed.GROUP, "sym": True, "desc_act": False}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}


def compressed(kind, bits, group=packed.GROUP, **weights):
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": group} | weights
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups, "ignore": ["lm_head"]}


PACKED = compressed("pack-quantized", 4)
NVFP4 = compressed("nvfp4-pack-quantized", 4, 16, type="float", strategy="tensor_group")
METHODS = {
    "awq": (packed.awq, AWQ, {}),
    "gptq": (packed.gptq, GPTQ, {}),
    "gptq zeros": (packed.gptq, {**GPTQ, "sym": False}, {"sym": False}),
    "gptq v2": (packed.gptq, {**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"}, {"sym": False, "plus": 0}),
    "gptq 8 bits": (packed.gptq, {**GPTQ, "bits": 8}, {"bits": 8}),
    "modelopt": (packed.modelopt, MODELOPT, {}),
    "compressed": (packed.compressed, PACKED, {}),
    "compressed zeros": (packed.compressed, compressed("pack-quantized", 4, symmetric=False), {"zeros": True}),
    "compressed 8 bits": (packed.compressed, compressed("pack-quantized", 8), {"bits": 8}),
    "compressed int": (packed.compressed, compressed("int-quantized", 8), {"bits": 8, "packed": False}),
    "compressed nvfp4": (packed.modelopt, NVFP4, {"inverse": True}),
}


def load(folder):
    return load_model(folder, json.loads((folder / "config.json").read_text()), **CPU)


def weights_of(model) -> list[Weight]:
    return [w for b in model.blocks for w in (b.mixer.qkv, b.mixer.o, b.ffn.gate_up, b.ffn.down) for w in (w.weight,)]


@pytest.fixture(params=list(METHODS))
def made(request, tmp_path):
    pack, config, options = METHODS[request.param]
    return packed.write(tmp_path, pack, config, **options)


def test_every_weight_is_what_the_format_says(made, monkeypatch):
    monkeypatch.setattr(fill, "PART_BYTES", 1 << 10)  # parts begin inside tensors
    mine, plain = map(load, made)
    for got, want in zip(weights_of(mine), weights_of(plain)):
        torch.testing.assert_close(got.dequantise(), want.tensor, rtol=1e-6, atol=0)
        planes = sum(p.numel() * p.itemsize for p in got.planes.values())
        assert got.num_bytes == planes < 0.5 * want.num_bytes, "the planes hold codes"
        assert got.planes[MATRIX].itemsize == 1


def test_logits_are_those_of_the_same_weights_in_fp32(made):
    """The plain path, and the C kernels where they take the format."""
    mine, plain = map(Paged, made)
    want = plain.run(lambda i: 50)
    runs = [mine]
    if native().library is not None and weights_of(mine.model)[0].format.native:
        runs.append(NativePaged(made[0]))
    for run in runs:
        for got, logits in zip(run.run(lambda i: 3 + 5 * i), want):
            torch.testing.assert_close(got, logits, atol=2e-4, rtol=2e-4)


def edit(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in list(tensors):
        tensors[name] = change(name, tensors[name]).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})


CONTROLS = {
    "nibbles swapped": lambda n, t: t << 4 | t >> 4 & 0x0F0F0F0F if n.endswith("qweight") else t,
    "a neighbour's scale": lambda n, t: t.roll(1, 0) if n.endswith(".scales") else t,
    "zero point off by one": lambda n, t: t ^ 0x11111111 if n.endswith("qzeros") else t,
}


@pytest.mark.parametrize("what", CONTROLS)
def test_the_comparison_can_fail(what, tmp_path):
    folder, plain = packed.write(tmp_path, packed.awq, AWQ)
    edit(folder, CONTROLS[what])
    got, want = weights_of(load(folder))[0].dequantise(), weights_of(load(plain))[0].tensor
    with pytest.raises(AssertionError):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


def test_a_tensor_scale_and_its_inverse_are_told_apart(tmp_path):
    folder, plain = packed.write(tmp_path, packed.modelopt, MODELOPT)
    edit(folder, lambda n, t: 1 / t if n.endswith("weight_scale_2") else t)
    got, want = weights_of(load(folder))[0].dequantise(), weights_of(load(plain))[0].tensor
    with pytest.raises(AssertionError):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


def test_both_conventions_of_a_tensor_scale_mean_the_same(tmp_path):
    """A factor in Model Optimizer's files, a divisor in compressed-tensors': one read as the other fails."""
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    folder, _ = packed.write(tmp_path / "a", packed.modelopt, MODELOPT)
    other, _ = packed.write(tmp_path / "b", packed.modelopt, NVFP4, inverse=True)
    one, two = (weights_of(load(f))[0].dequantise() for f in (folder, other))
    torch.testing.assert_close(one, two, rtol=1e-6, atol=0)
    edit(other, lambda n, t: 1 / t if n.endswith("weight_global_scale") else t)
    assert not torch.allclose(weights_of(load(other))[0].dequantise(), one)


def test_scattered_groups_and_wrong_zero_points_are_refused(tmp_path):
    folder, _ = packed.write(tmp_path, packed.gptq, {**GPTQ, "desc_act": True})
    load(folder)  # sorted: served
    edit(folder, lambda n, t: t.flip(0) if n.endswith("g_idx") else t)
    with pytest.raises(ConfigError, match="g_idx' is not sorted.*desc_act false"):
        load(folder)
    edit(folder, lambda n, t: t.flip(0) if n.endswith("g_idx") else t + 1 if n.endswith("qzeros") else t)
    with pytest.raises(ConfigError, match="zero points other than 8.*sym"):
        load(folder)


@pytest.mark.parametrize(
    "config, message",
    [
        ({**AWQ, "bits": 8}, "bits 8"),
        ({**AWQ, "version": "gemv"}, "version 'gemv'"),
        ({**GPTQ, "bits": 3}, "bits 3"),
        ({**GPTQ, "bits": 8, "sym": False}, "8 bits with zero points"),
        ({**GPTQ, "dynamic": {"a": {}}}, "dynamic"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({**MODELOPT, "quant_algo": "W4A8_AWQ"}, "W4A8_AWQ"),
        (compressed("pack-quantized", 4, actorder="group"), "actorder 'group'"),
        (compressed("marlin-24", 4), "format 'marlin-24'"),
        (compressed("pack-quantized", 3), "3 bits"),
        (compressed("nvfp4-pack-quantized", 4, 32), "groups of 32"),
        ({**GPTQ, "group_size": 48}, "group is 48"),
        ({**GPTQ, "group_size": 128}, "groups of 128 inputs"),
    ],
)
def test_what_is_not_served_is_refused_by_name(config, message, tmp_path):
    folder, _ = packed.write(tmp_path, packed.gptq, config)
    with pytest.raises(ConfigError, match=message):
        load(folder)
