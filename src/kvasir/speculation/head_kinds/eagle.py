"""EAGLE-3 (arXiv 2503.01840): one decoder layer over the fused outputs of several layers and the embedding of the next
token.

The layer's own output stands for the fused states at the next step; training unrolls these steps ("training-time
test").

Legend: B texts, T tokens, R rows, M guesses of a level, N = leading dimensions, L tapped layers, E model dim, H query
heads, G KV heads, D head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvasir.speculation.drafter import ServedModel
from kvasir.speculation.head import Head, Level, Norm

NEG_INF = -float("inf")
# Forms of attention that take a new shape as it comes. cuDNN makes a plan for it first, on the host, and paths have new
# shapes in every slice of a trainer: on an H100 the plans took most of its time (docs/methods/learning.md).
ANY_SHAPE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class EagleShape:
    """Layers whose outputs are fused (``layers``), steps that training unrolled (``depth``), and the shape of the
    head's own layer."""

    dim: int
    layers: tuple[int, ...]
    depth: int = 6
    heads: int = 4
    kv_heads: int = 1
    head_dim: int = 64
    ffn: int = 352
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6


class Eagle(Head):
    shape_class = EagleShape
    ids = None  # the rows of the output matrix are the model's tokens

    def __init__(self, shape: EagleShape) -> None:
        super().__init__(shape)
        s = shape
        self.fuse_proj = nn.Linear(len(s.layers) * s.dim, s.dim, bias=False)
        self.token_norm, self.state_norm, self.ffn_norm, self.norm = (Norm(s.dim, s.norm_eps) for _ in range(4))
        self.qkv_proj = nn.Linear(2 * s.dim, (s.heads + 2 * s.kv_heads) * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.dim, bias=False)
        self.gate_up_proj = nn.Linear(s.dim, 2 * s.ffn, bias=False)
        self.down_proj = nn.Linear(s.ffn, s.dim, bias=False)
        self.turns = torch.zeros(0, s.head_dim // 2, dtype=torch.complex64)  # e^(i position frequency): RoPE; no weight

    @classmethod
    def shape_for(cls, dim: int, num_layers: int) -> EagleShape:
        """An eighth to a quarter of one of the model's layers' parameters."""
        wide = 64 if dim % 64 == 0 or dim > 128 else 32
        return EagleShape(
            dim,
            tuple(sorted({num_layers // 4, num_layers // 2, num_layers - 1})),
            heads=max(2, min(4, dim // wide)),
            head_dim=wide,
            ffn=max(32, dim * 11 // 12 // 32 * 32),
        )

    def reserve(self, num_positions: int) -> None:
        """Have the rotations of so many positions at hand, on the weights' device."""
        device = self.norm.weight.device
        if len(self.turns) < num_positions or self.turns.device != device:
            half = self.shape.head_dim // 2
            frequency = self.shape.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
            angle = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequency
            self.turns = torch.polar(torch.ones_like(angle), angle).to(device, torch.complex64)

    def begin_with(self, norm_E: torch.Tensor, embed_VE: torch.Tensor, generator: torch.Generator) -> None:
        """Draw the weights so that the state before the first update is the last tapped layer's output, under the
        model's final norm."""
        s = self.shape
        with torch.no_grad():
            for name, p in self.named_parameters():
                if p.ndim == 2:
                    std = p.shape[1] ** -0.5 * (0.2 if name.startswith(("o_proj", "down_proj", "fuse_proj")) else 1.0)
                    p.copy_(torch.randn(p.shape, generator=generator) * std)
            self.fuse_proj.weight[:, -s.dim :] += torch.eye(s.dim)
            self.norm.weight.copy_(norm_E)

    # ----------------------------------------------------------------------------------------------- parts, for serving

    def fuse(self, features_NLE: torch.Tensor) -> torch.Tensor:
        """Outputs of the tapped layers [N, L, E] -> states [N, E]."""
        return self.fuse_proj(features_NLE.flatten(-2))

    def mix(self, state_NE: torch.Tensor, embedded_NE: torch.Tensor) -> torch.Tensor:
        """[N, 2E], the layer's input, of states and of the embeddings of the tokens that follow them."""
        return torch.cat([self.token_norm(embedded_NE), self.state_norm(state_NE)], -1)

    def attention(
        self, mixed: torch.Tensor, positions_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [N, H, D], keys and values [N, G, D]. RoPE turns neighbouring pairs of numbers, in fp32."""
        s = self.shape
        qkv = self.qkv_proj(mixed).unflatten(-1, (s.heads + 2 * s.kv_heads, s.head_dim))
        qk, v = qkv.split((s.heads + s.kv_heads, s.kv_heads), -2)
        turned = torch.view_as_complex(qk.float().unflatten(-1, (-1, 2))) * self.turns[positions_N][..., None, :]
        q, k = torch.view_as_real(turned).flatten(-2).to(qkv.dtype).split((s.heads, s.kv_heads), -2)
        return q, k, v

    def finish(self, state_NE: torch.Tensor, attended_NHD: torch.Tensor) -> torch.Tensor:
        """The layer's output [N, E]: the state of the next step; under ``norm``, what the output matrix reads."""
        h = state_NE + self.o_proj(attended_NHD.flatten(-2))
        gate, up = self.gate_up_proj(self.ffn_norm(h)).chunk(2, -1)
        return h + self.down_proj(F.silu(gate) * up)

    # --------------------------------------------------------------------------------------- as its drafter runs it

    def rotation_bytes(self, num_positions: int) -> int:
        """Number of bytes that ``reserve`` takes."""
        return num_positions * (self.shape.head_dim // 2) * 8

    def embed(self, model: ServedModel, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [..., E] of tokens: the model's."""
        return model.embed(ids)

    def begin(self, model: ServedModel, features_NLE: torch.Tensor) -> torch.Tensor:
        return self.fuse(features_NLE)

    def step(
        self, model: ServedModel, state_NE: torch.Tensor, mixed: torch.Tensor, attended_NHD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits [N, V] and the states [N, E] of the next step."""
        h = self.finish(state_NE, attended_NHD)
        return model.read_out(self.norm(h)), h

    # --------------------------------------------------------------------------------------------------------- training

    def unroll(
        self, features_BTLE: torch.Tensor, normed_BTE: torch.Tensor, embedded_BTE: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """Yield for j = 0, 1, ... a tensor [B, T, E] whose row p predicts token p + 2 + j, after j steps over the
        text's own tokens from root p.

        ``embedded``: of token p + 1 in row p. A step's query sees the roots up to its own and its own earlier steps, as
        when drafting.
        """
        count = embedded_BTE.shape[1]
        place = torch.arange(count, device=embedded_BTE.device)
        seen = place[:, None] >= place
        state, embedded = self.fuse(features_BTLE), embedded_BTE
        steps: list[tuple[torch.Tensor, torch.Tensor]] = []
        group = self.shape.heads // self.shape.kv_heads
        self.reserve(count + self.shape.depth)
        for j in range(self.shape.depth):
            mixed = self.mix(state, embedded)
            q, *kv = self.attention(mixed, place + j)
            k, v = (x.repeat_interleave(group, -2) for x in kv)
            steps.append((k, v))
            roots, values = steps[0]
            scores = torch.einsum("bthd,bshd->bhts", q, roots).masked_fill(~seen, NEG_INF)
            own = [torch.einsum("bthd,bthd->bht", q, k)[..., None] for k, _ in steps[1:]]
            weights = (torch.cat([scores, *own], -1).float() * self.shape.head_dim**-0.5).softmax(-1).to(v.dtype)
            attended = torch.einsum("bhts,bshd->bthd", weights[..., :count], values)
            for i, (_, v) in enumerate(steps[1:]):
                attended = attended + weights[..., count + i].transpose(1, 2)[..., None] * v
            state = self.finish(state, attended)
            yield self.norm(state)
            # Token p + 2 + j comes next in row p; the last rows have none, and predict nothing that exists.
            embedded = torch.cat([embedded[:, 1:], embedded[:, -1:]], 1)

    def unroll_paths(
        self,
        features_RLE: torch.Tensor,
        normed_RE: torch.Tensor,
        positions_R: torch.Tensor,
        num_positions: int,
        levels: Iterable[Level],
    ) -> Iterator[torch.Tensor]:
        state = self.fuse(features_RLE)
        group = self.shape.heads // self.shape.kv_heads
        self.reserve(num_positions)
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for j, level in enumerate(levels):
            if j:
                state = state[level.above_M]
            q, k, v = self.attention(self.mix(state, level.embedded_ME), positions_R[level.root_M] + j)
            keys.append(k.repeat_interleave(group, -2))
            values.append(v.repeat_interleave(group, -2))
            with sdpa_kernel(ANY_SHAPE):
                attended = F.scaled_dot_product_attention(
                    *(x.transpose(0, 1)[None] for x in (q, torch.cat(keys), torch.cat(values))),
                    attn_mask=level.sees_MK[None, None],
                )
            state = self.finish(state, attended[0].transpose(0, 1))
            yield self.norm(state)
