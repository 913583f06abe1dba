"""Facts about a device, asked for once, since torch's own query takes longer than a launch; and small copies to it."""

from __future__ import annotations

import functools
import os

import torch

# By the major compute capability, of its largest part (data sheets: A100, H200, B200): bytes a second, dense FLOP a
# second of 16-bit products on the tensor cores, and of fp32 products.
RATES = {8: (2.0e12, 312e12, 19.5e12), 9: (4.8e12, 989e12, 67e12), 10: (8.0e12, 2250e12, 80e12)}
CPU_BANDWIDTH, CORE_FLOPS = 1e11, 1e11  # bytes a second of a server's memory or a desktop's cache; fp32 of one core


def name_of(dtype: torch.dtype) -> str:
    """Name of a dtype, as the table of tuned numbers has it: "float32"."""
    return str(dtype).removeprefix("torch.")


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Number of the GPU's multiprocessors. Without a GPU: few enough for Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def rates(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes and FLOP a second that a device of this kind hardly exceeds. Estimates start from them; they are never
    reported."""
    if device.type != "cuda":
        return CPU_BANDWIDTH, CORE_FLOPS * (os.cpu_count() or 1)
    major = torch.cuda.get_device_capability(device)[0]
    bandwidth, half, single = RATES[min(max(major, min(RATES)), max(RATES))]
    return bandwidth, single if dtype == torch.float32 else half


def send(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a small host tensor to ``device`` without waiting: from pageable memory the copy would wait for the
    stream."""
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
