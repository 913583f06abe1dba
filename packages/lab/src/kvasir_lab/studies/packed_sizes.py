"""Store what packing saves: sizes of the weight files of plain and packed checkpoints, and whether the bits come back.

    python -m kvasir_lab.studies packed_sizes OUT.json [--models nano base]

Each model is written plain (`kvasir convert unpack`), packed, and plain again. ``equal_tensors`` counts the tensors of
the last folder with the names, types and bits of the first. The control counts the same after one bit was flipped.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from kvasir.convert.checkpoint import convert
from kvasir.convert.converter import load_converter
from kvasir.models import checkpoint
from kvasir.models.loader import read_tensors
from kvasir_lab.study import Arms, Report, study


def weight_bytes(folder: Path) -> int:
    """Bytes of the folder's files of weights, with their headers."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors*") if file.suffix != ".json")


def bits(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor as bytes, by name and type."""
    return {
        f"{name} {tensor.dtype}": tensor.contiguous().flatten().view(torch.uint8).clone()
        for name, tensor in read_tensors(folder)
    }


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> int:
    """Number of tensors that both have with the same bits."""
    return sum(name in other and torch.equal(tensor, other[name]) for name, tensor in one.items())


def measure(model: str) -> dict:
    """The sizes of a model, and how many of its tensors come back."""
    with tempfile.TemporaryDirectory() as home:
        folders = [checkpoint.resolve(model), *(Path(home) / name for name in ("plain", "packed", "again"))]
        for spec, source, target in zip(("unpack", "pack", "unpack"), folders, folders[1:]):
            convert(load_converter(spec), spec, source, target)
        plain, again = bits(folders[1]), bits(folders[3])
        sizes = {name: weight_bytes(folder) for name, folder in zip(("plain", "packed"), folders[1:])}
        metrics = {f"{name}_bytes": size for name, size in sizes.items()}
        metrics |= {"packed_share": round(sizes["packed"] / sizes["plain"], 4), "tensors": len(plain)}
        metrics["equal_tensors"] = equal(plain, again)
        next(iter(again.values()))[0] ^= 1
        metrics["equal_after_one_bit_was_flipped"] = equal(plain, again)
    return metrics


@study("packed-sizes")
def main(report: Report, *, models: tuple[str, ...] = ("nano", "base")) -> Arms:
    for model in models:
        yield model, {"dtype": "bfloat16"}, measure(model)
