"""What launchers ask of a device, asked once: torch's own query takes longer than a launch."""

from __future__ import annotations

import functools

import torch


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of the GPU; where there is none, few enough for Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
