"""Quantised checkpoints for tests, packed code by code as each format's description says, and the same weights plain.

Legend: N outputs, K inputs, G groups.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests import checkpoints

GROUP = 32
FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the output whose code stands at each place of a word


def words(codes: torch.Tensor, order: list[int], bits: int = 4) -> torch.Tensor:
    """int32 [..., C / n] of codes [..., C]: at place i of a word, code ``order[i]`` of its n."""
    per = len(order)
    groups = codes.to(torch.int64).unflatten(-1, (-1, per))
    total = sum(groups[..., code] << bits * place for place, code in enumerate(order))
    return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)


def awq(name: str, n: int, k: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Stored tensors of a matrix, and the matrix."""
    codes, zeros = torch.randint(0, 16, (n, k)), torch.randint(0, 16, (n, k // GROUP))
    scales = (torch.rand(n, k // GROUP) * 0.02 + 0.01).half()
    tensors = {
        "qweight": words(codes.t(), AWQ_ORDER),
        "qzeros": words(zeros.t(), AWQ_ORDER),
        "scales": scales.t().contiguous(),
    }
    return _named(name, tensors), (codes - _wide(zeros, k)) * _wide(scales.float(), k)


def gptq(name: str, n: int, k: int, bits: int = 4, sym: bool = True, plus: int = 1):
    half = 1 << bits - 1
    codes = torch.randint(0, 2 * half, (n, k))
    zeros = torch.full((n, k // GROUP), half) if sym else torch.randint(plus, 16 + plus, (n, k // GROUP))
    scales = ((torch.rand(n, k // GROUP) * 0.02 + 0.01) * 8 / half).half()
    order = list(range(32 // bits))
    tensors = {
        "qweight": words(codes, order, bits).t().contiguous(),
        "qzeros": words((zeros - plus).t(), order, bits),
        "scales": scales.t().contiguous(),
        "g_idx": torch.arange(k, dtype=torch.int32) // GROUP,
    }
    return _named(name, tensors), (codes - _wide(zeros, k)) * _wide(scales.float(), k)


def modelopt(name: str, n: int, k: int, inverse: bool = False):
    """``inverse``: names and tensor scale of compressed-tensors."""
    codes = torch.randint(0, 16, (n, k))
    scales = (torch.rand(n, k // 16) * 4 + 0.1).to(torch.float8_e4m3fn)
    factor = torch.tensor(0.005 + 0.01 * torch.rand(()).item())
    table = torch.tensor(FP4)
    matrix = table[codes] * _wide(scales.float() * factor, k)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    if inverse:
        stored = 1 / factor
        matrix = table[codes] * _wide(scales.float() * (1 / stored), k)
        tensors = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": stored.reshape(1)}
    else:
        tensors = {"weight": packed, "weight_scale": scales, "weight_scale_2": factor, "input_scale": torch.ones(())}
    return _named(name, tensors), matrix


def compressed(name: str, n: int, k: int, bits: int = 4, zeros: bool = False, packed: bool = True):
    """compressed-tensors: codes packed along inputs, zero points along outputs."""
    half = 1 << bits - 1
    codes, scales = torch.randint(0, 2 * half, (n, k)), ((torch.rand(n, k // GROUP) + 0.5) * 0.16 / half).bfloat16()
    points = torch.randint(0, 16, (n, k // GROUP)) if zeros else torch.full((n, k // GROUP), half)
    order = list(range(32 // bits))
    if packed:
        tensors = {"weight_packed": words(codes, order, bits), "weight_shape": torch.tensor([n, k])}
    else:
        tensors = {"weight": (codes - half).to(torch.int8)}
    tensors["weight_scale"] = scales
    if zeros:
        tensors["weight_zero_point"] = words(points.t(), order).t()
    return _named(name, tensors), (codes - _wide(points, k)) * _wide(scales.float(), k)


def _named(name: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{name}.{end}": tensor.contiguous() for end, tensor in tensors.items()}


def _wide(x: torch.Tensor, k: int) -> torch.Tensor:
    return x.repeat_interleave(k // x.shape[1], 1)


SHAPE = dict(hidden_size=64, intermediate_size=96, head_dim=16, tie_word_embeddings=False)


def write(
    folder: Path, pack, config: dict[str, Any], seed: int = 0, variant: str = "llama", **options: Any
) -> tuple[Path, Path]:
    """A quantised checkpoint of a small model, and a plain one in fp32 with the same weights."""
    torch.manual_seed(seed)
    plain = checkpoints.write(folder / "plain", variant, **SHAPE)
    tensors, packed, wide = load_file(plain / "model.safetensors"), {}, {}
    for name, tensor in tensors.items():
        if "_proj." not in name or tensor.dim() != 2:
            packed[name] = wide[name] = tensor
            continue
        stored, wide[name] = pack(name.removesuffix(".weight"), *tensor.shape, **options)
        packed |= stored
        wide[name] = wide[name].float().contiguous()
    save_file(wide, plain / "model.safetensors", metadata={"format": "pt"})
    target = folder / "packed"
    target.mkdir()
    about = json.loads((plain / "config.json").read_text()) | {"quantization_config": config}
    (target / "config.json").write_text(json.dumps(about))
    save_file(packed, target / "model.safetensors", metadata={"format": "pt"})
    return target, plain
