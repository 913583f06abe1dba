"""Quantised checkpoints for tests: a plain folder rewritten as the tools of the field write them, and the same folder
dequantised, for a reference that knows no formats.

The arithmetic is the test's own: codes come from a table of all 256 values.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

BLOCK = 16


def e4m3_table() -> torch.Tensor:
    """The values of all codes of E4M3, [256] fp64, as the standard defines them."""
    values = []
    for code in range(256):
        sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
        small = mantissa / 8 * 2.0**-6
        normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        values.append(torch.nan if code & 127 == 127 else sign * (normal if exponent else small))
    return torch.tensor(values, dtype=torch.float64)


def nearest_codes(w: torch.Tensor) -> torch.Tensor:
    """Codes [...] uint8 of the nearest values."""
    table = e4m3_table()
    codes = torch.tensor([c for c in range(256) if c & 127 != 127])
    order = table[codes].argsort()
    values, codes = table[codes][order], codes[order]
    at = torch.searchsorted(values, w.double().contiguous()).clamp(1, len(values) - 1)
    lower = (w.double() - values[at - 1]).abs() <= (values[at] - w.double()).abs()
    return codes[torch.where(lower, at - 1, at)].to(torch.uint8)


def by_tensor(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, the scale as it is stored, and the dequantised matrix in fp64."""
    scale = w.abs().max().float() / 448
    codes = nearest_codes(w / scale)
    return codes, scale, e4m3_table()[codes.long()] * scale.double()


def by_channel(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scale = w.abs().amax(1, keepdim=True).float() / 448
    scale = scale.bfloat16().float()  # as llm-compressor stores them
    codes = nearest_codes(w / scale)
    return codes, scale.bfloat16(), e4m3_table()[codes.long()] * scale.double()


def by_block(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, columns = (-(-n // BLOCK) for n in w.shape)
    scale = torch.zeros(rows, columns)
    codes, plain = torch.zeros(w.shape, dtype=torch.uint8), torch.zeros(w.shape, dtype=torch.float64)
    for r in range(rows):
        for c in range(columns):
            at = slice(r * BLOCK, (r + 1) * BLOCK), slice(c * BLOCK, (c + 1) * BLOCK)
            codes[at], scale[r, c], plain[at] = by_tensor(w[at])
    return codes, scale, plain


def compressed(strategy: str, **more: object) -> dict:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False, **more}
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", r"re:.*\.mlp\.gate$"],
        "quantization_status": "compressed",
    }


# Name -> quantization_config, the function that quantises, and what is added to the name of a matrix's scales.
FORMATS: dict[str, tuple[dict, Callable, str]] = {
    "fp8-block": (
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
        },
        by_block,
        "weight_scale_inv",
    ),
    "fp8-tensor": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        by_tensor,
        "weight_scale",
    ),
    "compressed-tensor": (compressed("tensor"), by_tensor, "weight_scale"),
    "compressed-channel": (compressed("channel"), by_channel, "weight_scale"),
    "compressed-block": (compressed("block", block_structure=[BLOCK, BLOCK]), by_block, "weight_scale"),
}


def is_quantised(name: str) -> bool:
    """Whether a tensor is a matrix of a layer, and not of a router."""
    return name.startswith("model.layers.") and "_proj" in name and name.endswith(".weight")


def write(source: Path, target: Path, name: str) -> Path:
    """Quantise ``source`` into ``target`` / "made". The same model, dequantised to fp32, is in ``target`` / "plain"."""
    config, quantise, suffix = FORMATS[name]
    made, plain = {}, {}
    for tensor, w in load_file(source / "model.safetensors").items():
        made[tensor] = plain[tensor] = w
        if is_quantised(tensor) and w.dim() == 2:
            codes, scale, values = quantise(w)
            made[tensor] = codes.view(torch.float8_e4m3fn)
            made[tensor.removesuffix("weight") + suffix] = scale
            plain[tensor] = values.float()
            if config.get("activation_scheme") == "static":
                made[tensor.removesuffix("weight") + "input_scale"] = torch.tensor(0.5)
    own = json.loads((source / "config.json").read_text())
    for folder, tensors, extra in (("made", made, {"quantization_config": config}), ("plain", plain, {})):
        (target / folder).mkdir(parents=True)
        dense = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(dense, target / folder / "model.safetensors", {"format": "pt"})
        (target / folder / "config.json").write_text(json.dumps(own | extra))
    return target
