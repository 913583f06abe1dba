"""The parts of a layer as plain data, read by front ends, sizing and cost without torch.

A ``kind`` names the module that computes the part: ``GQASpec.kind = "gqa"`` is ``kvasir.layers.mixers.gqa``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvasir.attention.backend import AttentionSpec

Activation = Literal["silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class NormSpec:
    """RMS norm. The scale is ``offset`` + the stored weight (Gemma stores it around zero: offset 1)."""

    eps: float = 1e-6
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of the whole head; the first half is paired with the second half.

    Fields after ``theta`` belong to one kind each. linear: factor. llama3: factor, low/high_freq_factor,
    original_max_position. yarn: factor, betas, truncate, attention_factor (multiplies cos and sin),
    original_max_position.
    """

    theta: float
    head_dim: int
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class GQASpec:
    """Grouped-query attention. ``qk_norm``: norm of every query and key head before RoPE."""

    kind: ClassVar[str] = "gqa"
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    qk_norm: NormSpec | None = None
    qkv_bias: bool = False
    o_bias: bool = False

    def attention(self) -> AttentionSpec:
        """The attention that a backend is asked for."""
        return AttentionSpec(
            self.num_heads, self.num_kv_heads, self.head_dim, self.scale, self.window, self.softcap, self.sinks
        )


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """down(activation(gate(x)) * up(x)). ``intermediate_size``: the width F."""

    kind: ClassVar[str] = "dense"
    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False


@dataclass(frozen=True, slots=True)
class MoESpec:
    """A softmax router over all experts picks ``top_k`` dense blocks of ``intermediate_size`` per row. ``renormalize``:
    the picked weights are scaled to sum to one."""

    kind: ClassVar[str] = "moe"
    num_experts: int
    top_k: int
    intermediate_size: int
    renormalize: bool
    activation: Activation = "silu"
