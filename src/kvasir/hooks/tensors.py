"""Checked tensors of hooks, for the operations."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvasir.errors import ConfigError


def tensor(tensors: Mapping[str, torch.Tensor], name: str, *shape: int) -> torch.Tensor:
    """The tensor ``name`` in fp32, in this shape. Raises ConfigError where it is missing, has another number of
    elements, or holds a number that is not finite."""
    found = tensors.get(name)
    if found is None:
        raise ConfigError(f"the tensor '{name}' is missing; there are {', '.join(sorted(tensors)) or 'none'}")
    count = 1
    for size in shape:
        count *= size
    if found.numel() != count:
        raise ConfigError(f"'{name}' has the shape {list(found.shape)}, expected {list(shape)}")
    if not bool(torch.isfinite(found).all()):
        raise ConfigError(f"'{name}' holds numbers that are not finite")
    return found.float().reshape(shape)


def unit(x: torch.Tensor) -> torch.Tensor:
    """Vectors [..., D] at length 1; zeros stay zeros."""
    return x / x.norm(dim=-1, keepdim=True).clamp(min=1e-12)


def moving(direction_HD: torch.Tensor) -> torch.Tensor:
    """Heads [H] that have a direction."""
    return (direction_HD != 0).any(-1)
