"""Rows of random logits with random sampling parameters: what the tests of ``kernels/sample.py`` draw from."""

from __future__ import annotations

import torch

KINDS = ("normal", "ties", "flat", "peaked", "masked", "bf16")


def logits(kind: str, rows: int, width: int, draw: torch.Generator) -> torch.Tensor:
    """[M, width] fp32, or bf16 for that kind. ``masked``: most ids are -inf, as under a grammar."""
    x = torch.randn(rows, width, generator=draw) * 3
    if kind == "ties":
        return x.round()
    if kind == "flat":
        return torch.zeros(rows, width)
    if kind == "peaked":
        return x * 10
    if kind == "masked":
        return x.masked_fill(torch.rand(rows, width, generator=draw) < 0.9, float("-inf")).index_fill(
            1, torch.tensor([0]), 0.5
        )
    return x.bfloat16() if kind == "bf16" else x


def parameters(rows: int, vocab_size: int, draw: torch.Generator) -> tuple[torch.Tensor, ...]:
    """temperature, top_k, top_p, min_p, stream and position of each row: about a third of each filter is off."""

    def pick(values: list, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)[torch.randint(0, len(values), (rows,), generator=draw)]

    ks = [1, 2, 20, 50, 700, vocab_size // 2, vocab_size, vocab_size, vocab_size + 7]
    return (
        pick([0.0, 1e-6, 0.3, 0.7, 1.0, 1.0, 1.7], torch.float32),
        pick([min(k, vocab_size + 7) for k in ks], torch.int32),
        pick([1e-9, 0.1, 0.5, 0.9, 0.95, 0.999, 1.0, 1.0, 1.0], torch.float64),
        pick([0.0, 0.0, 0.01, 0.2, 1.0], torch.float64),
        torch.randint(-(1 << 62), 1 << 62, (rows,), generator=draw),
        torch.randint(0, 1 << 20, (rows,), generator=draw),
    )
