"""Recurrent mixers beside Gated DeltaNet as plain data (`kvasir.layers.spec`): KDA, Mamba-3 and M2RNN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvasir.layers.spec import LOOK_AHEAD, NormSpec
from kvasir.types import StatePlane


class Recurrent:
    """The parts that recurrent mixers share: no keys, no window, no attention of a backend."""

    __slots__ = ()
    window: ClassVar[int | None] = None

    def cache_row(self) -> None:
        return None

    def attention(self) -> None:
        return None

    def pair_flops(self) -> int:
        return 0


def waiting(width: int) -> tuple[StatePlane, ...]:
    """The planes that every recurrence has: inputs of rows after the state, of ``width`` numbers each, and the position
    that the state has reached."""
    return StatePlane("ahead", (LOOK_AHEAD, width), "model"), StatePlane("position", (1,), "position")


@dataclass(frozen=True, slots=True)
class KDASpec(Recurrent):
    """Kimi Delta Attention (Kimi Team 2025, arXiv:2510.26692): the gated delta rule with a decay for each channel of a
    key. ``num_heads`` matrices of ``dim`` by ``dim``. A causal convolution over ``taps`` rows comes before, and an RMS
    norm with ``norm.eps`` after, gated by a sigmoid. Decays and gates are products of rank ``dim``."""

    kind: ClassVar[str] = "kda"
    num_heads: int
    dim: int
    norm: NormSpec
    taps: int = 4

    @property
    def side(self) -> int:
        """Elements of a row of queries, of keys, of values, of decays or of gates."""
        return self.num_heads * self.dim

    @property
    def row(self) -> int:
        """Numbers of a row that the recurrence reads: queries, keys, values, decays and write strengths."""
        return 4 * self.side + self.num_heads

    def state(self) -> tuple[StatePlane, ...]:
        return (
            StatePlane("matrix", (self.num_heads, self.dim, self.dim), "state"),
            StatePlane("tail", (self.taps - 1, 3 * self.side), "model"),
            *waiting(self.row),
        )

    def matrices(self, hidden: int, writes: bool = True) -> int:
        low_rank = 2 * self.dim * (hidden + self.side)
        return (4 * self.side + self.num_heads) * hidden + low_rank

    def vectors(self, hidden: int, writes: bool = True) -> int:
        return 3 * self.side * self.taps + self.num_heads + self.side + self.dim


@dataclass(frozen=True, slots=True)
class Mamba3Spec(Recurrent):
    """Mamba-3 (arXiv:2603.15569): a state of ``state_dim`` for each of ``dim`` channels of a head, discretised by a
    trapezoid, rotated by angles that depend on the data, with ``rank`` inputs and outputs.

    ``groups``: heads of B and C; each serves as many heads as the others. ``rotated``: share of the state's dimensions
    that rotate. ``rank`` 1 has no factors for its one input (SISO), and rotates neighbours; otherwise dimension ``i``
    is paired with ``i + state_dim / 2``. ``rate``: how the decay is made of its projection; the two published
    implementations differ, and their checkpoints cannot be exchanged.
    """

    kind: ClassVar[str] = "mamba3"
    num_heads: int
    dim: int
    state_dim: int
    norm: NormSpec
    groups: int = 1
    rotated: float = 0.5
    rank: int = 1
    rate: Literal["reciprocal", "softplus"] = "reciprocal"

    def __post_init__(self) -> None:
        assert self.num_heads % self.groups == 0, "groups of B and C have equally many heads"
        assert 0 < self.angles <= self.state_dim // 2, "angles turn pairs of the state's dimensions"

    @property
    def inner(self) -> int:
        """Elements of a row of x, and of its gate."""
        return self.num_heads * self.dim

    @property
    def angles(self) -> int:
        return int(self.state_dim * self.rotated) // 2

    @property
    def parts(self) -> dict[str, int]:
        """Outputs of the projection, in the order in which checkpoints store them."""
        side = self.state_dim * self.groups * self.rank
        heads = self.num_heads
        return {"z": self.inner, "x": self.inner, "B": side, "C": side} | {
            "dt": heads, "A": heads, "trap": heads, "angle": self.angles
        }  # fmt: skip

    def state(self) -> tuple[StatePlane, ...]:
        heads = self.num_heads
        return (
            StatePlane("matrix", (heads, self.dim, self.state_dim), "state"),
            StatePlane("angle", (heads, self.angles), "float32"),  # sums of angles lose their precision in less
            StatePlane("last_B", (self.rank, heads, self.state_dim), "state"),
            StatePlane("last_x", (heads, self.dim), "state"),
            *waiting(sum(self.parts.values()) - self.inner),
        )

    def matrices(self, hidden: int, writes: bool = True) -> int:
        return (sum(self.parts.values()) + self.inner) * hidden

    def vectors(self, hidden: int, writes: bool = True) -> int:
        heads = self.num_heads
        factors = 3 * heads * self.rank * self.dim if self.rank > 1 else 0
        return 2 * heads + 2 * heads * self.rank * self.state_dim + factors + 2 * self.state_dim


@dataclass(frozen=True, slots=True)
class M2RNNSpec(Recurrent):
    """M2RNN (arXiv:2603.14360): a matrix of ``key_dim`` by ``value_dim`` for each of ``num_heads``, which goes through
    a matrix of its head and a tanh at every row. All heads share ``key_heads`` queries and keys (1: one of each). A
    causal convolution over ``taps`` rows comes before, and a gated RMS norm after."""

    kind: ClassVar[str] = "m2rnn"
    num_heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    norm: NormSpec
    taps: int = 4

    def __post_init__(self) -> None:
        assert self.num_heads % self.key_heads == 0, "key heads have equally many heads of values"

    @property
    def values(self) -> int:
        """Elements of a row of values, and of its gate."""
        return self.num_heads * self.value_dim

    @property
    def mixed(self) -> int:
        """Elements of a row that the convolution reads: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.values

    def state(self) -> tuple[StatePlane, ...]:
        return (
            StatePlane("matrix", (self.num_heads, self.key_dim, self.value_dim), "state"),
            StatePlane("tail", (self.taps - 1, self.mixed), "model"),
            *waiting(self.mixed + self.num_heads),
        )

    def matrices(self, hidden: int, writes: bool = True) -> int:
        return (self.mixed + self.num_heads + 2 * self.values) * hidden + self.num_heads * self.value_dim**2

    def vectors(self, hidden: int, writes: bool = True) -> int:
        return self.mixed * self.taps + 3 * self.num_heads + self.values
