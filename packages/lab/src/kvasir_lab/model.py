"""The lab's trainable model: a Qwen3-shaped decoder in plain PyTorch, with the parameter names of the HF checkpoint.

It has an RMSNorm before each block, grouped-query attention with normalised queries and keys, RoPE, SwiGLU and tied
embeddings. With ``Shape.recurrent`` it has Qwen 3.5's form instead: those layers are Gated DeltaNet, attention is
gated, a quarter of a head rotates, and norms are stored around zero. It is for training and for checking what was
trained; kvasir's engine serves the exported folder.

Shape suffixes: B rows, T tokens, C cached positions, H query heads, G KV heads, D head dim, E model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from kvasir.errors import ConfigError
from kvasir_lab.delta import DeltaNet
from kvasir_lab.experts import Experts

Cache = list[tuple[torch.Tensor, torch.Tensor]]
BLOCK = 128  # Rows and columns of a BlockMask tile, which is kept or skipped as a whole.


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. ``positions``: the context length that it is trained for. ``experts``: blocks of width ``ffn``,
    of which each token uses ``top_k``; 0: one block for all. ``recurrent``: the layers that keep a state; the fields
    after it are theirs, and the model is a hybrid."""

    vocab: int = 2048
    dim: int = 192
    layers: int = 4
    ffn: int = 640
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    positions: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    experts: int = 0
    top_k: int = 0
    recurrent: tuple[int, ...] = ()
    key_heads: int = 4
    value_heads: int = 8
    state_dim: int = 64
    taps: int = 4

    def __post_init__(self) -> None:
        if self.recurrent and (self.value_heads % self.key_heads or max(self.recurrent) >= self.layers):
            raise ConfigError(
                f"value_heads={self.value_heads} must be a multiple of key_heads={self.key_heads}, and recurrent "
                f"layers below layers={self.layers}"
            )
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise ConfigError(
                f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}, and head_dim={self.head_dim} even"
            )
        if self.experts and self.recurrent:
            raise ConfigError("a model of the lab has experts or recurrent layers, not both")
        if self.experts and not 0 < self.top_k <= self.experts:
            raise ConfigError(f"top_k={self.top_k} must be from 1 to the number of experts, {self.experts}")

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that rotate."""
        return self.head_dim // 4 if self.recurrent else self.head_dim


class RMSNorm(nn.Module):
    """The scale is ``offset`` + the stored weight, which starts at 1 - ``offset``."""

    def __init__(self, dim: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((dim,), 1.0 - offset))
        self.eps, self.offset = eps, offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        if self.offset:  # as Qwen 3.5 computes it, in fp32
            scale = self.weight.float() + self.offset
            return (scale * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply RoPE in the "half" layout to x [B, heads, T, D]; cos, sin [B or 1, 1, T, D], or fewer than D dimensions,
    which are the ones that rotate."""
    if (turned := cos.shape[-1]) < x.shape[-1]:
        return torch.cat((rotate(x[..., :turned], cos, sin), x[..., turned:]), -1)
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape, self.gated = s, bool(s.recurrent)
        self.q_proj = nn.Linear(s.dim, s.heads * s.head_dim * (2 if self.gated else 1), bias=False)
        self.k_proj = nn.Linear(s.dim, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.dim, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.dim, bias=False)
        self.q_norm, self.k_norm = (RMSNorm(s.head_dim, s.norm_eps, float(self.gated)) for _ in range(2))

    def forward(
        self,
        x: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | BlockMask | None,
        cache: tuple[torch.Tensor, torch.Tensor] | None,
        at: int | torch.Tensor,
    ) -> torch.Tensor:
        """Attend from x [B, T, E].

        ``cache``: K and V [B, G, C, D], written in place from position ``at``. When ``at`` is a tensor [1], it is the
        place of the only token, and ``mask`` covers the whole cache: a CUDA graph needs shapes that never change.
        """
        b, t, _ = x.shape
        s = self.shape
        q = self.q_proj(x).view(b, t, s.heads, -1)
        gate = None
        if self.gated:  # the second half of each head
            q, gate = q.chunk(2, -1)
        q = self.q_norm(q).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(b, t, s.kv_heads, s.head_dim)).transpose(1, 2)
        v = self.v_proj(x).view(b, t, s.kv_heads, s.head_dim).transpose(1, 2)
        q, k = rotate(q, *rope).to(v.dtype), rotate(k, *rope).to(v.dtype)
        if isinstance(at, torch.Tensor):
            k, v = (kept.index_copy_(2, at, new.to(kept.dtype)) for kept, new in zip(cache or (), (k, v), strict=True))
        elif cache is not None:
            cache[0][:, :, at : at + t], cache[1][:, :, at : at + t] = k, v
            k, v = cache[0][:, :, : at + t], cache[1][:, :, : at + t]
        if isinstance(mask, BlockMask):
            out = flex_attention(q, k, v, block_mask=mask, enable_gqa=s.heads != s.kv_heads)
        elif cache is not None and t == 1:
            # For one token, the heads of a group take the place of queries, so the cache is read once and not copied.
            out = F.scaled_dot_product_attention(
                q.reshape(b, s.kv_heads, -1, s.head_dim), k, v, attn_mask=mask
            ).reshape(b, s.heads, 1, s.head_dim)
        else:
            # K and V are repeated by hand, because the fused kernels that take a mask do not take grouped heads.
            k, v = (z.repeat_interleave(s.heads // s.kv_heads, 1) for z in (k, v))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        out = out.transpose(1, 2).reshape(b, t, -1)
        return self.o_proj(out if gate is None else out * gate.reshape(b, t, -1).sigmoid())


class MLP(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(s.dim, s.ffn, bias=False)
        self.up_proj = nn.Linear(s.dim, s.ffn, bias=False)
        self.down_proj = nn.Linear(s.ffn, s.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A layer. ``recurs``: it keeps a state, and its ``mask`` is the document [B, T] of every token."""

    def __init__(self, s: Shape, index: int) -> None:
        super().__init__()
        offset, self.recurs = float(bool(s.recurrent)), index in s.recurrent
        self.input_layernorm = RMSNorm(s.dim, s.norm_eps, offset)
        if self.recurs:
            self.linear_attn = DeltaNet(s)
        else:
            self.self_attn = Attention(s)
        self.post_attention_layernorm = RMSNorm(s.dim, s.norm_eps, offset)
        self.mlp = Experts(s.dim, s.experts, s.top_k, lambda: MLP(s)) if s.experts else MLP(s)

    def forward(
        self,
        x: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | BlockMask | None,
        cache: tuple[torch.Tensor, torch.Tensor] | None = None,
        at: int | torch.Tensor = 0,
    ) -> torch.Tensor:
        if self.recurs:
            x = x + self.linear_attn(self.input_layernorm(x), mask, cache)
        else:
            x = x + self.self_attn(self.input_layernorm(x), rope, mask, cache, at)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    """Everything below the output matrix. A module of its own, so that names start with ``model.`` as in HF files."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(s.vocab, s.dim)
        self.layers = nn.ModuleList(Block(s, i) for i in range(s.layers))
        self.norm = RMSNorm(s.dim, s.norm_eps, float(bool(s.recurrent)))


class Model(nn.Module):
    """The decoder; ``forward`` returns logits [B, T, V].

    Weights are drawn from ``seed`` on the CPU, so they are the same on every machine.
    """

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                into_residual = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=0.02 / (2 * shape.layers) ** 0.5 if into_residual else 0.02, generator=generator)
        for index in shape.recurrent:
            self.model.layers[index].linear_attn.draw(generator)
        # Not a buffer: a checkpoint holds weights only, and autocast must not round the angles.
        frequency = shape.rope_theta ** (-torch.arange(0, shape.rotary_dim, 2).float() / shape.rotary_dim)
        angle = torch.arange(shape.positions).float()[:, None] * torch.cat([frequency, frequency])
        self._rope = (angle.cos(), angle.sin())

    def _apply(self, fn, recurse: bool = True):
        self._rope = tuple(t.to(fn(t).device) for t in self._rope)  # change the device, never the precision
        return super()._apply(fn, recurse)

    def forward(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        positions: torch.Tensor | None = None,
        cache: Cache | None = None,
        at: int | torch.Tensor = 0,
        last: bool = False,
    ) -> torch.Tensor:
        """Logits of ids [B, T].

        mask [B, 1, T, at + T] bool marks what a token may see (None: causal); positions [B, T] (None: ``at`` onwards).
        ``at`` as a tensor needs ``positions``; see `Attention`. ``last``: logits of the last position only, [B, 1, V].
        """
        if positions is None:
            rope = self.rope(ids.shape[1], int(at))
        else:
            rope = tuple(t[positions][:, None] for t in self._rope)
        x = self.model.embed_tokens(ids)
        documents = documents_of(mask) if self.shape.recurrent and mask is not None and ids.shape[1] > 1 else None
        for i, layer in enumerate(self.model.layers):
            x = layer(x, rope, documents if layer.recurs else mask, cache[i] if cache else None, at)
        return self.logits(x[:, -1:] if last else x)

    def train_by_chunks(self, dtype: torch.dtype | None) -> None:
        """Compute recurrent layers by `delta_chunks` where they run in ``dtype`` and without a cache; None: never."""
        for index in self.shape.recurrent:
            self.model.layers[index].linear_attn.chunked = dtype

    def rope(self, length: int, at: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [1, 1, length, D] of the positions from ``at`` on."""
        cos, sin = (t[at : at + length][None, None] for t in self._rope)
        return cos, sin

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)

    def new_cache(self, rows: int, length: int) -> Cache:
        s, weight = self.shape, self.model.embed_tokens.weight
        size = (rows, s.kv_heads, length, s.head_dim)
        state = (rows, s.value_heads, s.state_dim, s.state_dim)
        tail = (rows, s.taps - 1, (2 * s.key_heads + s.value_heads) * s.state_dim)
        return [
            (weight.new_zeros(state, dtype=torch.float32), weight.new_zeros(tail))
            if i in s.recurrent
            else (weight.new_zeros(size), weight.new_zeros(size))
            for i in range(s.layers)
        ]

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())


def document_mask(documents: torch.Tensor) -> torch.Tensor:
    """Mask [B, 1, T, T] bool from document numbers [B, T]: causal, and never across documents."""
    t = documents.shape[1]
    causal = torch.ones(t, t, dtype=torch.bool, device=documents.device).tril()
    return ((documents[:, :, None] == documents[:, None, :]) & causal)[:, None]


def documents_of(mask: torch.Tensor) -> torch.Tensor:
    """Document numbers [B, T] from a mask [B, 1, T, T] like that of `document_mask`: a token that does not see the one
    before it begins a document. Padding on the left sees itself only, so that each of it is a document of its own."""
    begins = ~mask[:, 0].diagonal(-1, -2, -1)
    return F.pad(begins.cumsum(-1), (1, 0)).to(torch.int16)


def block_mask(documents: torch.Tensor) -> BlockMask:
    """The mask of `document_mask` for the fused kernel: which tiles to visit, and the rule inside them.

    A document is contiguous, so a tile of queries sees the tiles from the start of its first document up to itself.
    """
    rows, length = documents.shape
    place = torch.arange(length, device=documents.device)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    first = torch.where(begins, place, 0).cummax(1).values[:, ::BLOCK] // BLOCK
    tiles = torch.arange(first.shape[1], device=documents.device)
    visited = (first[..., None] + tiles).clamp(max=len(tiles) - 1)

    def same_document(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (documents[b, q] == documents[b, k]) & (k <= q)

    return BlockMask.from_kv_blocks(
        (tiles - first + 1)[:, None].int(),
        visited[:, None].int(),
        BLOCK_SIZE=BLOCK,
        mask_mod=same_document,
        seq_lengths=(length, length),
    )


def run_layer(
    layer: nn.Module, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor | BlockMask | None
) -> torch.Tensor:
    return layer(x, rope, mask)


def head_losses(model: Model, x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The last step of `losses`, from the last layer's output x [M, E] and the tokens ``target`` [M] to predict."""
    logits = model.logits(x).float()
    partition = logits.logsumexp(-1)
    # A masked sum, because the compiler fuses it; the backward of a gather would scatter into a matrix of zeros.
    chosen = torch.where(torch.arange(logits.shape[-1], device=x.device) == target[:, None], logits, 0.0).sum(-1)
    correct = (logits.argmax(-1) == target).float()
    return torch.stack(
        [((partition - chosen) * weight).sum(), (partition.square() * weight).sum(), (correct * weight).sum()]
    )


@dataclass(frozen=True)
class Compute:
    """The functions with which training runs the model: plain ones, or their compiled forms.

    One layer is compiled, and every layer runs it. ``fused``: packed rows use the fused kernel, which skips other
    documents, instead of a dense mask.
    """

    layer: Callable[..., torch.Tensor] = run_layer
    head: Callable[..., torch.Tensor] = head_losses
    fused: bool = False


def compiled(*, fused: bool, **options: Any) -> Compute:
    """Compile the layer and the head; ``options`` go to torch.compile.

    Shapes are fixed: each row shape of a recipe costs one graph of a layer and one of the head.
    """
    return Compute(
        *(torch.compile(f, dynamic=False, fullgraph=True, **options) for f in (run_layer, head_losses)), fused=fused
    )


PLAIN = Compute()


def losses(
    model: Model,
    ids: torch.Tensor,
    documents: torch.Tensor | None,
    trained: torch.Tensor,
    compute: Compute = PLAIN,
    chosen: torch.Tensor | None = None,
) -> torch.Tensor:
    """Summed cross-entropy (nats), summed z term (log-partition squared) and correct guesses over trained targets: [3].

    ids, documents, trained [B, T]; ``trained`` marks the tokens to predict. ``documents`` None: each row is one
    document. ``chosen`` [M]: flat places b * T + t (t >= 1) that include all trained ones. The head, the most expensive
    layer, computes these only.
    """
    mask = None if documents is None else block_mask(documents) if compute.fused else document_mask(documents)
    rope = model.rope(ids.shape[1])
    x = model.model.embed_tokens(ids)
    for layer in model.model.layers:
        x = compute.layer(layer, x, rope, documents if layer.recurs else mask)
    if chosen is None:
        return compute.head(model, x[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), trained[:, 1:].flatten().float())
    return compute.head(
        model, x.flatten(0, 1).index_select(0, chosen - 1), ids.flatten()[chosen], trained.flatten()[chosen].float()
    )
