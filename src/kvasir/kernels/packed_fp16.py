"""Products of a few rows with large fp32 weights on a CPU, read as fp16: half the bytes, the same numbers.

A decode step reads every weight once, and a core gets few GB/s of what its caches do not hold. Checkpoints are stored
in 16 bits: a bf16 number has 8 bits of precision and an fp16 number 11, so within fp16's range the copy is exact (below
2^-14 an error of at most 2^-25 remains), and FBGEMM multiplies it with fp32 rows and sums in fp32.

Measured (two cores of a Xeon with AVX512, 16M weights, interleaved with MKL in fp32, one thread): 1 row 4.5 -> 3.7 ms,
8 rows 9.7 -> 5.6, 16 rows 11.9 -> 8.5, 32 rows 14.0 -> 12.3, 64 rows slower. Small matrices lose more to the call than
they gain.

Legend: T rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvasir import tuned

MAX_ROWS = tuned.PACKED_ROWS.value
MIN_NUMEL = tuned.PACKED_WEIGHTS.value  # elements of a weight
MAX_ERROR = 2.0**-25


def fits(weight_NK: torch.Tensor) -> bool:
    """Whether these weights are worth a copy and lose nothing by it."""
    if weight_NK.dtype != torch.float32 or weight_NK.device.type != "cpu" or weight_NK.numel() < MIN_NUMEL:
        return False
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    return bool((weight_NK.half().float() - weight_NK).abs().amax() <= MAX_ERROR)


def pack(weight_NK: torch.Tensor) -> torch.ScriptObject:
    """Pack a weight for ``linear``."""
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        return torch.ops.quantized.linear_prepack_fp16(weight_NK.contiguous(), None)
    finally:
        torch.backends.quantized.engine = engine


def linear(x_TK: torch.Tensor, packed: torch.ScriptObject) -> torch.Tensor:
    """x @ weight^T in fp32: [T, N]."""
    return torch.ops.quantized.linear_dynamic_fp16(x_TK, packed)


@dataclass(frozen=True)
class Case:
    """One point of the test grid."""

    rows: int
    num_inputs: int
    num_outputs: int


def grid() -> Iterator[Case]:
    for rows in (0, 1, 5, 6, 7, 16, MAX_ROWS):
        yield Case(rows, 512, 520)
    for num_inputs, num_outputs in ((384, 1024), (1152, 384), (333, 801)):
        yield Case(3, num_inputs, num_outputs)
