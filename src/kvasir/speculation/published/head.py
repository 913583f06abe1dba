"""Heads that people publish: one Llama decoder layer over the served model's hidden states.

Two architectures: EAGLE-3 (arXiv 2503.01840), whose layer reads the next token's embedding beside a state that fuses
several layers, and EAGLE-1 and 2 (arXiv 2401.15077, 2406.16858), whose layer reads one product of both. They are
written from the published tensors and configs. Attention spans the whole text, and RoPE pairs the halves of a head.

Legend: R rows, N = leading dimensions, L tapped layers, E dim of the head, F dim of the served model, H query heads,
G KV heads, D head dim, V rows of the head's own output matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from kvasir.kernels.rope import rotate
from kvasir.layers.rope import RopeTable
from kvasir.layers.spec import RopeSpec
from kvasir.speculation.drafter import ServedModel
from kvasir.speculation.head import Norm


@dataclass(frozen=True)
class PublishedShape:
    """The shape of a published head.

    ``served_dim``: hidden size of the served model; ``layers``: indices of the layers whose outputs it reads, in the
    order in which it concatenates them; ``depth``: tokens of a chain; ``own_rows``: rows of its own output matrix, 0:
    it uses the model's; ``own_embedding``: rows of its own embeddings, 0: the model's; ``biases``: which products have
    one; ``head_norm``: whether queries and keys have a norm; ``tap_norm``: norms before the fusing product, none, one
    over all layers or one for each; ``norm_first``: whether the residual is the state after its norm; ``norm_output``:
    whether the next step reads the state after the last norm; ``window``: positions that its attention sees, its own
    included, 0: all."""

    dim: int
    served_dim: int
    layers: tuple[int, ...]
    depth: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    norm_eps: float
    rope: RopeSpec
    own_rows: int = 0
    own_embedding: int = 0
    biases: frozenset[str] = frozenset()
    head_norm: bool = False
    tap_norm: Literal["none", "all", "each"] = "none"
    norm_first: bool = False
    norm_output: bool = False
    window: int = 0


class PublishedHead(nn.Module):
    """The parts that both architectures share. ``ids``: the served model's id for each row of the head's output matrix;
    None: they are the same."""

    input_dims = 1  # inputs of the layer's attention, in units of E
    ids: torch.Tensor | None

    def __init__(self, shape: PublishedShape) -> None:
        super().__init__()
        self.shape = s = shape
        self.qkv_proj = self._product("qkv", self.input_dims * s.dim, (s.heads + 2 * s.kv_heads) * s.head_dim)
        self.o_proj = self._product("o", s.heads * s.head_dim, s.dim)
        self.ffn_norm = Norm(s.dim, s.norm_eps)
        self.gate_up_proj = self._product("mlp", s.dim, 2 * s.ffn)
        self.down_proj = self._product("mlp", s.ffn, s.dim)
        if s.head_norm:
            self.q_norm, self.k_norm = Norm(s.head_dim, s.norm_eps), Norm(s.head_dim, s.norm_eps)
        self.table: RopeTable | None = None
        self.ids = None
        self.own_table: nn.Parameter | None = None
        if s.own_embedding:
            self.own_table = nn.Parameter(torch.empty(s.own_embedding, s.dim))

    def _product(self, name: str, inner: int, outer: int) -> nn.Linear:
        return nn.Linear(inner, outer, bias=name in self.shape.biases)

    def reserve(self, num_positions: int) -> None:
        """Have the rotations of so many positions at hand, on the weights' device."""
        device = self.qkv_proj.weight.device
        if self.table is None or len(self.table.table) < num_positions or self.table.table.device != device:
            self.table = RopeTable(self.shape.rope, num_positions, device)

    def rotation_bytes(self, num_positions: int) -> int:
        """Number of bytes that ``reserve`` takes."""
        return num_positions * self.shape.rope.head_dim * 4

    def embed(self, model: ServedModel, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [..., E] of tokens, the head's own or the model's."""
        return model.embed(ids) if self.own_table is None else F.embedding(ids, self.own_table)

    def attention(
        self, mixed: torch.Tensor, positions_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [N, H, D], keys and values [N, G, D] of the layer's inputs."""
        s = self.shape
        qkv_RHD = self.qkv_proj(mixed).reshape(-1, s.heads + 2 * s.kv_heads, s.head_dim)
        qk_RHD, v_RGD = qkv_RHD.split((s.heads + s.kv_heads, s.kv_heads), 1)
        if s.head_norm:
            q, k = qk_RHD.split((s.heads, s.kv_heads), 1)
            qk_RHD = torch.cat([self.q_norm(q.contiguous()), self.k_norm(k.contiguous())], 1)
        cos, sin = self.table.rows(positions_N.reshape(-1))
        q_RHD, k_RGD = rotate(qk_RHD.contiguous(), cos, sin).split((s.heads, s.kv_heads), 1)
        shape = positions_N.shape
        return q_RHD.unflatten(0, shape), k_RGD.unflatten(0, shape), v_RGD.unflatten(0, shape)

    def residual(self, state_NE: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """The value [N, E] that the layer's attention is added to."""
        raise NotImplementedError

    def read(self, model: ServedModel, output_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits [N, V] of the layer's outputs, and the states [N, E] of the next step."""
        raise NotImplementedError

    def step(
        self, model: ServedModel, state_NE: torch.Tensor, mixed: torch.Tensor, attended_NHD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits [N, V] and the states [N, E] of the next step, from the layer's states, its inputs, and what its
        heads attended to."""
        h = self.residual(state_NE, mixed) + self.o_proj(attended_NHD.flatten(-2))
        gate, up = self.gate_up_proj(self.ffn_norm(h)).chunk(2, -1)
        return self.read(model, h + self.down_proj(F.silu(gate) * up))


class Eagle3Head(PublishedHead):
    input_dims = 2

    def __init__(self, shape: PublishedShape) -> None:
        super().__init__(shape)
        s = shape
        self.fuse_proj = self._product("fc", len(s.layers) * s.served_dim, s.dim)
        self.token_norm, self.state_norm, self.norm = (Norm(s.dim, s.norm_eps) for _ in range(3))
        if s.tap_norm == "all":
            self.tap_norm = Norm(len(s.layers) * s.served_dim, s.norm_eps)
        elif s.tap_norm == "each":
            self.tap_norms = nn.ModuleList(Norm(s.served_dim, s.norm_eps) for _ in s.layers)
        self.head = nn.Linear(s.dim, s.own_rows, bias=False) if s.own_rows else None

    def begin(self, model: ServedModel, taps_RLF: torch.Tensor) -> torch.Tensor:
        """Outputs of the tapped layers [R, L, F] -> states [R, E]."""
        if self.shape.tap_norm == "each":
            taps_RLF = torch.stack([norm(taps_RLF[:, i].contiguous()) for i, norm in enumerate(self.tap_norms)], 1)
        joined = taps_RLF.flatten(-2)
        return self.fuse_proj(self.tap_norm(joined) if self.shape.tap_norm == "all" else joined)

    def mix(self, state_NE: torch.Tensor, embedded_NE: torch.Tensor) -> torch.Tensor:
        """The layer's inputs [N, 2E]: the normed embeddings of the tokens that follow, and the normed states."""
        return torch.cat([self.token_norm(embedded_NE), self.state_norm(state_NE)], -1)

    def residual(self, state_NE: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        return mixed[..., self.shape.dim :] if self.shape.norm_first else state_NE

    def read(self, model: ServedModel, output_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.norm(output_NE)
        logits = model.read_out(normed) if self.head is None else self.head(normed)
        return logits, normed if self.shape.norm_output else output_NE


class Eagle1Head(PublishedHead):
    def __init__(self, shape: PublishedShape) -> None:
        super().__init__(shape)
        self.fuse_proj = self._product("fc", 2 * shape.dim, shape.dim)

    def begin(self, model: ServedModel, taps_RLF: torch.Tensor) -> torch.Tensor:
        """The last layer's outputs [R, 1, E] -> states [R, E]: what the model's own output matrix reads."""
        return model.norm(taps_RLF[:, 0].contiguous())

    def mix(self, state_NE: torch.Tensor, embedded_NE: torch.Tensor) -> torch.Tensor:
        """The layer's inputs [N, E] of states and of the embeddings of the tokens that follow; no norm."""
        return self.fuse_proj(torch.cat([embedded_NE, state_NE], -1))

    def residual(self, state_NE: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        return mixed

    def read(self, model: ServedModel, output_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # The layer's outputs were trained to be what the model's output matrix reads. They are the next states, too.
        return model.read_out(output_NE), output_NE
