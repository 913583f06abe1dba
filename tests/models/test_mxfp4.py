"""gpt-oss as it is published: experts in MXFP4, as tensors of blocks and of scales, everything else in 16 bits."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvasir.models import fill
from kvasir.models.checkpoint import read_config
from kvasir.models.loader import load_model
from tests import checkpoints
from tests.models.test_parity import Paged, expected

EXPERTS = 5
CONFIG = {  # as openai/gpt-oss-20b has it
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def blocks(outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks [X, N, G, 16], scales [X, N, G], and the numbers [X, N, K], by the format's description."""
    codes = torch.randint(0, 16, (EXPERTS, outputs, inputs // 32, 32))
    scales = torch.randint(120, 126, (EXPERTS, outputs, inputs // 32))
    packed = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    numbers = FP4[codes] * torch.exp2(scales - 127.0)[..., None]
    return packed, scales.to(torch.uint8), numbers.flatten(2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """``made``: the published layout; ``plain``: the same numbers in fp32, inputs before outputs."""
    root = tmp_path_factory.mktemp("mxfp4")
    plain = checkpoints.write(root / "plain", "gpt_oss", hidden_size=64, intermediate_size=96, num_hidden_layers=2)
    torch.manual_seed(0)
    made, wide = {}, load_file(plain / "model.safetensors")
    for name, tensor in wide.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            made[name + "_blocks"], made[name + "_scales"], numbers = blocks(tensor.shape[2], tensor.shape[1])
            wide[name] = numbers.transpose(1, 2).contiguous()
        else:
            made[name] = tensor
    save_file(wide, plain / "model.safetensors", {"format": "pt"})
    (root / "made").mkdir()
    save_file(made, root / "made" / "model.safetensors", {"format": "pt"})
    about = json.loads((plain / "config.json").read_text()) | {"quantization_config": CONFIG}
    (root / "made" / "config.json").write_text(json.dumps(about))
    return root


def load(folder):
    return load_model(folder, read_config(folder), device="cpu", dtype=torch.float32)


def changed(folder, tmp_path, change):
    """A copy of the quantised checkpoint with each tensor as ``change`` gives it."""
    tensors = load_file(folder / "made" / "model.safetensors")
    tensors = {name: change(name, tensor).contiguous() for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "made" / "config.json").read_text())
    return tmp_path


def test_logits_are_those_of_transformers_with_the_same_numbers(folder, monkeypatch):
    monkeypatch.setattr(fill, "PART_BYTES", 1 << 10)  # parts begin inside tensors
    for got, reference in zip(Paged(folder / "made").run(lambda i: 5), expected(folder / "plain")):
        torch.testing.assert_close(got, reference, atol=1e-4, rtol=1e-4)


def test_transformers_reads_the_same_tensors_alike(folder):
    """Its own reader of blocks, which gives the weights in bf16: those numbers are exact in it."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    made = load_file(folder / "made" / "model.safetensors")
    for i, block in enumerate(load(folder / "made").blocks):
        name = f"model.layers.{i}.mlp.experts."
        gate_up, down = (
            mxfp4.convert_moe_packed_tensors(made[name + part + "_blocks"], made[name + part + "_scales"])
            for part in ("gate_up_proj", "down_proj")
        )
        gate_up = torch.cat([gate_up[..., 0::2], gate_up[..., 1::2]], -1)  # interleaved in the file
        assert torch.equal(block.ffn.gate_up.dequantise(), gate_up.transpose(1, 2).float())
        assert torch.equal(block.ffn.down.dequantise(), down.transpose(1, 2).float())


def test_the_experts_stay_in_four_bits(folder):
    for block in load(folder / "made").blocks:
        for weight in (block.ffn.gate_up, block.ffn.down):
            assert weight.format.name == "mxfp4"
            assert weight.num_bytes * 8 == 4.25 * EXPERTS * weight.num_outputs * weight.num_inputs
        assert block.mixer.qkv.weight.format.name == block.ffn.router.weight.format.name == "plain"


CONTROLS = {
    "nibbles swapped": lambda n, t: t << 4 | t >> 4 if n.endswith("_blocks") else t,
    "a neighbour's scale": lambda n, t: t.roll(1, -1) if n.endswith("_scales") else t,
    "an inverse scale": lambda n, t: 254 - t if n.endswith("_scales") else t,
    "gate and up exchanged": lambda n, t: t.unflatten(1, (-1, 2)).flip(2).flatten(1, 2) if "gate_up" in n else t,
    "another expert's blocks": lambda n, t: t.roll(1, 0) if n.endswith("_blocks") else t,
}


@pytest.mark.parametrize("what", CONTROLS)
def test_the_comparison_can_fail(what, folder, tmp_path):
    got, want = (load(f).blocks[1].ffn for f in (changed(folder, tmp_path, CONTROLS[what]), folder / "plain"))
    errors = [
        (getattr(got, part).dequantise() - getattr(want, part).tensor).abs().max() for part in ("gate_up", "down")
    ]
    assert max(errors) > 0.05
    right = load(folder / "made").blocks[1].ffn
    assert torch.equal(right.gate_up.dequantise(), want.gate_up.tensor)
