"""Rotary angles: frequencies of every scaling kind, and a table of cosines and sines by position.

Sources: RoPE (arXiv 2104.09864), linear interpolation (2306.15595), YaRN (2309.00071), LongRoPE (2402.13753), the
Llama 3.1 rule (its model card). Legend: T rows, D head dim."""

from __future__ import annotations

import math

import torch

from kvasir.layers.spec import QueryScale, RopeSpec


def frequencies(spec: RopeSpec, long: bool = False) -> torch.Tensor:
    """Radians per position of each pair of dimensions, [D/2] fp32 on the CPU. ``long``: longrope's long factors."""
    plain = 1.0 / spec.theta ** (torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim)
    if spec.kind == "linear":
        return plain / spec.factor
    if spec.kind == "llama3":
        return _llama3(plain, spec)
    if spec.kind == "yarn":
        return _yarn(plain, spec)
    if spec.kind == "longrope":
        return plain / torch.tensor(spec.long_factors if long else spec.short_factors)
    if spec.kind == "proportional":
        plain[spec.num_pairs :] = 0.0
        return plain / spec.factor
    return plain


def _llama3(plain: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """Long waves are stretched by the factor, short ones kept, those between blended."""
    turns = spec.original_max_position * plain / (2 * math.pi)  # over the original context
    kept = ((turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)).clamp(0, 1)
    return plain / spec.factor * (1 - kept) + plain * kept


def _yarn(plain: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """Keep dimensions that turn more than beta_fast times, stretch those that turn less than beta_slow times, and blend
    linearly in between."""

    def dimension(turns: float) -> float:
        return spec.head_dim * math.log(spec.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.head_dim - 1)
    span = high - low if high != low else 0.001
    stretched = ((torch.arange(len(plain), dtype=torch.float32) - low) / span).clamp(0, 1)
    return plain / spec.factor * stretched + plain * (1 - stretched)


class Angles:
    """The angles of a step's rows, shared by all layers with the same table (None: they rotate nothing). A fused kernel
    reads the table by position; the plain path takes ``rows``."""

    __slots__ = ("_rows", "_scales", "positions_T", "table")

    def __init__(self, table: RopeTable | None, positions_T: torch.Tensor) -> None:
        self.table = table
        self.positions_T = positions_T
        self._rows: tuple[torch.Tensor, torch.Tensor] | None = None
        self._scales: dict[QueryScale, torch.Tensor] = {}

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``RopeTable.rows``, gathered once."""
        if self._rows is None:
            self._rows = self.table.rows(self.positions_T)
        return self._rows

    def scale(self, spec: QueryScale) -> torch.Tensor:
        """Factors of the rows' queries, [T, 1, 1] fp32, computed once."""
        if spec not in self._scales:
            steps = torch.div(self.positions_T + spec.offset, spec.length, rounding_mode="floor")
            # In fp64, so that rounding hides which of its two logarithms a CPU took for a row of this batch.
            self._scales[spec] = (1 + spec.beta * torch.log1p(steps.double())).float().view(-1, 1, 1)
        return self._scales[spec]


class RopeTable:
    """Cosines and sines of positions 0 .. num_positions - 1, computed once, so that a row's angle never depends on its
    batch."""

    def __init__(self, spec: RopeSpec, num_positions: int, device: torch.device) -> None:
        # Made on the CPU, so that every device has the same bits.
        # longrope has factors for contexts up to the original length and for longer ones. A served context has one set
        # for all its positions, or keys in the cache would have to change when a sequence grows.
        found = frequencies(spec, long=num_positions > spec.original_max_position)
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), found)
        table = torch.cat((angles.cos(), angles.sin()), -1).mul_(spec.attention_factor)
        self.table = table.to(device)  # [num_positions, D] fp32; D is ``spec.head_dim``

    @property
    def width(self) -> int:
        """Number of dimensions of a head that are turned."""
        return self.table.shape[1]

    def rows(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines [T, 1, 1, D/2] and sines [T, 1, 2, D/2] in fp32 for rows at these positions, as
        ``kernels.rope.rotate`` takes them."""
        cos, sin = self.table.index_select(0, positions_T).view(positions_T.shape[0], 1, 2, -1).split(1, 2)
        return cos, torch.cat((-sin, sin), 2)
