"""Humming for products with coded weights, where the package is installed. Lossy: it keeps scales of groups in bf16.

Facts about the package (humming-kernels 0.1.19, Apache-2.0): a matrix is described by a ``HummingWeightSchema``, given
as codes in int32 words [N, K * bits / 32] with the first input in the lowest bits, and repacked on the GPU for the
tensor cores. Codes of integers are offset-binary. Zero points are packed along outputs. Scales have the type of the
inputs, or are E8M0 or E4M3 where the format says so; those of blocks of 128 x 128 are fp32. One matrix product serves
all numbers of rows: its kernels are compiled for the shape, one for each range of rows, by NVRTC or nvcc.

A weight that was taken has only the repacked codes. Norm, bias, gate and residual are kernels of their own.

Legend: T rows, N outputs, K inputs, O outputs after a gated activation, G groups.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvasir.errors import install
from kvasir.kernels.codes_gemv import Coded
from kvasir.kernels.lora import Shrunk
from kvasir.kernels.weight_codes import pack_nibbles, unpack_six
from kvasir.layers.codes import CodeFormat
from kvasir.layers.norm import RMSNorm
from kvasir.layers.product_backend import ProductBackend, shape_of
from kvasir.layers.products import finish
from kvasir.layers.weight_format import MATRIX, Plane, Weight, WeightFormat
from kvasir.layers.weights import Placement, Slot

# The oldest architecture that multiplies bf16 on tensor cores.
AMPERE = 80
# Multiples that its repacking takes.
OUTPUTS, INPUTS = 64, 128
BLOCK = 128  # outputs and inputs of the blocks of scales that it knows
LOCKS = 2048  # int32 words by which blocks of a split product wait for each other, zeros between products
SCALE, LOCK_PLANE = "weight_scale", "locks"
FP8 = torch.float8_e4m3fn
OFFSET = 128  # between signed and offset-binary codes of 8 bits


@dataclass(frozen=True)
class Config:
    """``shapes``: outputs x inputs of the matrices it takes, as 6144x4096+4096x4096; empty: all that it can."""

    shapes: str = ""


class Humming(ProductBackend):
    """Takes u4, i8, f8, mxfp4, nvfp4 and fp6."""

    def why_not(self, place: Placement) -> list[str]:
        reasons = []
        if importlib.util.find_spec("humming") is None:
            reasons.append(f"humming is not installed ({install('humming')})")
        if place.exact:
            reasons.append("its bits depend on the number of rows, so exact mode cannot use it")
        if not place.fused:
            reasons.append("--no-fused-kernels measures torch's own kernels")
        if place.dtype not in (torch.bfloat16, torch.float16):
            reasons.append(f"computes in bfloat16 or float16, not {str(place.dtype).removeprefix('torch.')}")
        if place.activations == "fp8":
            reasons.append("takes inputs in 16 bits, and prompts are rounded to FP8 here (--activation-dtype bf16)")
        if place.device.type != "cuda":
            reasons.append("runs on NVIDIA GPUs only")
        else:
            reasons += self._missing(place.device)
        return reasons

    def why_not_weight(self, weight: Weight) -> str:
        form, (n, k) = weight.format, (weight.num_outputs, weight.num_inputs)
        if self.config.shapes and f"{n}x{k}" not in self.config.shapes.split("+"):
            return f"{n}x{k} is not among shapes={self.config.shapes}"
        if weight.count is not None:
            return "experts stay with our own products"
        if form.name not in LAYOUTS:
            return f"no layout '{form.name}': it takes {', '.join(sorted(LAYOUTS))}"
        if n % OUTPUTS or k % INPUTS:
            return f"takes multiples of {OUTPUTS} outputs and {INPUTS} inputs, not {n} x {k}"
        if getattr(form, "block", 0) and form.name == "f8" and (form.block != BLOCK or n % BLOCK):
            return f"takes whole blocks of {BLOCK} x {BLOCK}"
        return ""

    def take(self, weight: Weight, trial: bool = False) -> None:
        transform = importlib.import_module("humming.transform")
        schema, tensors = described(weight)
        config, made = transform.prepare_and_transform_humming_tensors(
            tensors, weight.num_outputs, weight.num_inputs, schema,
            torch_dtype=weight.place.dtype, device=weight.place.device,
        )  # fmt: skip
        made[LOCK_PLANE] = torch.zeros(LOCKS, dtype=torch.int32, device=weight.place.device)
        weight.format, weight.planes, weight.made = Repacked(weight.format, config, trial), made, None

    def kernels(self, weight: Weight) -> object:
        return weight.format.kind if isinstance(weight.format, Repacked) else shape_of(weight)

    @staticmethod
    def _missing(device: torch.device) -> list[str]:
        """Needs of the package that this machine does not meet."""
        major, minor = torch.cuda.get_device_capability(device)
        reasons = [] if 10 * major + minor >= AMPERE else [f"needs compute capability 8.0, not {major}.{minor}"]
        if torch.version.hip is not None:
            reasons.append("runs on NVIDIA GPUs only")
        toolkit = Path(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda")
        has_wheels = importlib.util.find_spec("nvidia") is not None and any(
            importlib.util.find_spec(f"nvidia.{name}") is not None for name in ("cu13", "cuda_runtime")
        )
        if shutil.which("nvcc") is None and not (toolkit / "include" / "cuda_runtime.h").exists() and not has_wheels:
            reasons.append("finds no CUDA toolkit to compile with (NVRTC or nvcc, with headers): set CUDA_HOME")
        return reasons


class Repacked(WeightFormat):
    """A matrix in humming's layout. ``kind`` tells its kernels from those of others. ``trial``: a product compiles the
    kernel of its number of rows alone, not those of all numbers."""

    exact = False
    name = "humming"

    def __init__(self, stored: WeightFormat, config: Any, trial: bool) -> None:
        super().__init__()
        self._trial = trial
        self.stored, self._config = stored, config
        self.kind = config.to_str()
        self._forward = importlib.import_module("humming.forward").humming_forward

    def fingerprint(self) -> tuple:
        return (self.name, *self.stored.fingerprint())

    def planes(self, widths: tuple[int, ...], num_inputs: int, dtype: torch.dtype) -> tuple[Plane, ...]:
        raise NotImplementedError("repacked from the planes of another format")

    def quantise(self, w_NK: torch.Tensor) -> dict[str, torch.Tensor]:
        raise NotImplementedError("repacked from the planes of another format")

    def slots(self, weight: Weight) -> dict[str, Slot]:
        raise RuntimeError(
            "weights were repacked for humming and cannot be filled again. Start with --product-backend triton where "
            "weights are written while serving."
        )

    def product(
        self,
        weight: Weight,
        x_TK: torch.Tensor,
        *,
        norm: RMSNorm | None = None,
        bias_N: torch.Tensor | None = None,
        activation: str | None = None,
        residual_TO: torch.Tensor | None = None,
        normed_TK: torch.Tensor | None = None,
        shrunk: Shrunk | None = None,
    ) -> torch.Tensor:
        if norm is not None:
            x_TK = norm(x_TK) if normed_TK is None else normed_TK
        y_TN = self._multiply(weight, x_TK)
        if bias_N is not None:
            y_TN.add_(bias_N)
        return finish(y_TN, activation, residual_TO, weight.place)

    def dequantise(self, weight: Weight) -> torch.Tensor:
        # A product with the identity: every sum has one number that is not zero.
        eye_KK = torch.eye(weight.num_inputs, dtype=weight.place.dtype, device=weight.place.device)
        return self._multiply(weight, eye_KK).t().contiguous()

    def _multiply(self, weight: Weight, x_TK: torch.Tensor) -> torch.Tensor:
        """x W^T [T, N]."""
        if not x_TK.shape[0]:
            return x_TK.new_empty(0, weight.num_outputs)
        tuning = None
        if self._trial:
            tune = importlib.import_module("humming.tune")
            tuning = tune.get_heuristics_config(self._config, shape_m=x_TK.shape[0], device=x_TK.device)
        return self._forward(self._config, inputs=x_TK.contiguous(), tuning_config=tuning, **weight.planes)


def described(weight: Weight) -> tuple[Any, dict[str, torch.Tensor]]:
    """A weight as the package takes it: its schema, and its tensors by the package's names."""
    options, tensors = LAYOUTS[weight.format.name](weight)
    schema = importlib.import_module("humming.schema").HummingWeightSchema(**options)
    return schema, {name: tensor.contiguous() for name, tensor in tensors.items()}


def coded_of(weight: Weight) -> Coded:
    """The planes of a format of codes."""
    assert isinstance(weight.format, CodeFormat)
    return weight.format.coded(weight)


def words(codes: torch.Tensor) -> torch.Tensor:
    """Codes [N, bytes] as int32 words."""
    return codes.contiguous().view(torch.int32)


def from_u4(weight: Weight) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    w = coded_of(weight)
    tensors = {"weight": words(w.codes), SCALE: w.scales.to(weight.place.dtype)}
    if w.more is not None:
        tensors["zero_point"] = words(pack_nibbles(w.more.t())).t()
    return {
        "b_dtype": "uint4", "weight_scale_group_size": w.group, "has_zero_point": w.more is not None
    }, tensors  # fmt: skip


def from_i8(weight: Weight) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    w = coded_of(weight)
    codes = w.codes.view(torch.uint8) ^ OFFSET
    return (
        {"b_dtype": "uint8", "weight_scale_group_size": w.group},
        {"weight": words(codes), SCALE: w.scales.to(weight.place.dtype)},
    )


def from_f8(weight: Weight) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    codes, scales = words(weight.planes[MATRIX].view(torch.uint8)), weight.planes["scale"]
    if scales.dim() == 2:
        blocks = {"weight_scale_group_size": BLOCK, "weight_scale_group_size_n": BLOCK}
        return {"b_dtype": "float8e4m3", **blocks}, {"weight": codes, SCALE: scales}
    return {"b_dtype": "float8e4m3"}, {"weight": codes, SCALE: scales[:, None].to(weight.place.dtype)}


def from_mxfp4(weight: Weight) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    w = coded_of(weight)
    options = {"b_dtype": "float4e2m1", "bs_dtype": "float8e8m0", "weight_scale_group_size": w.group}
    return options, {"weight": words(w.codes), SCALE: w.scales.view(torch.float8_e8m0fnu)}


def from_nvfp4(weight: Weight) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The factor of a tensor stays in fp32; fused matrices with several have one for each output, in bf16."""
    w = coded_of(weight)
    assert w.more is not None
    options = {"b_dtype": "float4e2m1", "bs_dtype": "float8e4m3", "weight_scale_group_size": w.group}
    one = bool((w.more == w.more[0]).all())
    factor = w.more[:1].float() if one else w.more.to(weight.place.dtype)
    tensors = {"weight": words(w.codes), SCALE: w.scales.view(FP8), "weight_scale_2": factor}
    return options | {"weight_scale_2_type": "tensor" if one else "channel"}, tensors


def from_fp6(weight: Weight) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Four codes of 6 bits are three bytes, the first code in the lowest bits."""
    w = coded_of(weight)
    assert w.high is not None
    a, b, c, d = unpack_six(w.codes, w.high).unflatten(-1, (-1, 4)).unbind(-1)
    packed = torch.stack([a | b << 6, b >> 2 | c << 4, c >> 4 | d << 2], -1).flatten(-2)
    return {"b_dtype": "float6e3m2"}, {"weight": words(packed), SCALE: w.scales.to(weight.place.dtype)}


LAYOUTS = {
    "u4": from_u4,
    "i8": from_i8,
    "f8": from_f8,
    "mxfp4": from_mxfp4,
    "nvfp4": from_nvfp4,
    "fp6": from_fp6,
}
