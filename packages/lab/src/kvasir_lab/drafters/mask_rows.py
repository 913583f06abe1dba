"""Mask rows in training: the two halves of I-DLM (arXiv 2604.11035), noisy and clean.

Every text has a noisy copy in which all tokens of the reply are masks, at the same positions. A mask at position i
predicts token i + 1, as every row does. Positions are cut into blocks of N - 1 (N is the stride), and what a row sees
depends on the block:

- a mask sees the clean tokens of strictly earlier blocks, and the noisy rows of its own block up to itself;
- a clean row sees clean rows up to itself, never a noisy one: it is exactly a row of the plain model.

The noisy copies of prompt tokens see what the clean ones see, and so have the same keys and values. They are not
computed: a mask sees the clean prompt tokens of its own block instead. The first mask of a block then stands where an
engine's first mask row stands, behind the last known token.

Shape suffixes: B texts, T tokens, R mask rows of a text, H query heads, G KV heads, D head dim, E model dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from kvasir_lab.drafters.data import Batch
from kvasir_lab.drafters.prompt_rows import Keys
from kvasir_lab.model import Model, rotate

ROWS = 16  # Numbers of mask rows are rounded up to a multiple of this, for fused attention needs aligned masks.
# Applies a matrix of layer i: (layer, name within the layer, module, x) -> y.
Product = Callable[[int, str, nn.Linear, torch.Tensor], torch.Tensor]


def plain_product(layer: int, name: str, linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """The model's own matrix."""
    return linear(x)


@dataclass(frozen=True, slots=True)
class Layout:
    """Mask rows of a batch.

    place [B, R]: position, whose next token a row predicts; depth [B, R]: number within its block, from 0; used [B, R]:
    whether there is such a token; sees [B, 1, R, T + R]: clean tokens, then mask rows, that a row attends to.
    """

    place: torch.Tensor
    depth: torch.Tensor
    used: torch.Tensor
    sees: torch.Tensor


def layout(batch: Batch, masks: int, offsets_B: torch.Tensor, device: torch.device) -> Layout:
    """The mask rows of all replies in blocks of ``masks``. Block numbers are (position + offset) // masks."""
    begins, lengths, offsets = (x.to(device)[:, None] for x in (batch.begins, batch.lengths, offsets_B))
    # The last token of a text predicts nothing.
    count = max(1, int((batch.lengths - 1 - batch.begins).max()))
    place = begins + torch.arange(-(-count // ROWS) * ROWS, device=device)
    block = (place + offsets) // masks
    tokens = torch.arange(batch.ids.shape[1], device=device)
    earlier = (tokens + offsets)[:, None] // masks < block[..., None]
    same = block[..., None] == block[:, None]
    sees = torch.cat([earlier | (tokens < begins)[:, None], same.tril()], -1)
    first = torch.maximum(block * masks - offsets, begins)
    return Layout(place, place - first, place < lengths - 1, sees[:, None])


def run(
    model: Model, mask_E: torch.Tensor, rows: Layout, text: list[Keys], product: Product = plain_product
) -> torch.Tensor:
    """The final norm's output [B, R, E] of the mask rows. ``text``: keys and values of the clean half by layer, from
    `prompt_rows.read`."""
    trunk, last = model.model, text[0][0].shape[2] - 1
    rope = tuple(part[0, 0][rows.place.clamp(max=last)][:, None] for part in model.rope(last + 1))
    x = mask_E.expand(*rows.place.shape, -1)
    for i, (layer, (text_k, text_v)) in enumerate(zip(trunk.layers, text, strict=True)):
        attention, s = layer.self_attn, layer.self_attn.shape
        normed = layer.input_layernorm(x)
        q, k, v = (
            product(i, f"self_attn.{name}", getattr(attention, name), normed).unflatten(-1, (-1, s.head_dim))
            for name in ("q_proj", "k_proj", "v_proj")
        )
        q = rotate(attention.q_norm(q).transpose(1, 2), *rope).to(text_v.dtype)
        k = torch.cat([text_k, rotate(attention.k_norm(k).transpose(1, 2), *rope).to(text_v.dtype)], 2)
        v = torch.cat([text_v, v.transpose(1, 2).to(text_v.dtype)], 2)
        k, v = (z.repeat_interleave(s.heads // s.kv_heads, 1) for z in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=rows.sees)
        x = x + product(i, "self_attn.o_proj", attention.o_proj, out.transpose(1, 2).flatten(2))
        normed, mlp = layer.post_attention_layernorm(x), layer.mlp
        gate, up = (product(i, f"mlp.{name}", getattr(mlp, name), normed) for name in ("gate_proj", "up_proj"))
        x = x + product(i, "mlp.down_proj", mlp.down_proj, F.silu(gate) * up)
    return trunk.norm(x)


def divergence(objective: str, log_q: torch.Tensor, log_p: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """The loss [M] of rows with log-probabilities ``log_q`` [M, V]: ``ce`` of the written token [M] (int64), or ``kl``
    (KL(p || q), nats) or ``tv`` (total variation: 1 - the chance that a sampled draft is accepted) from ``log_p``."""
    if objective == "ce":
        return -log_q.gather(-1, token[:, None])[:, 0]
    if objective == "kl":
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)


def by_depth(loss_M: torch.Tensor, depth_M: torch.Tensor, depths: int) -> torch.Tensor:
    """Mean loss by depth [depths]; 0 where no row has it."""
    sums, counts = (loss_M.new_zeros(depths).index_add(0, depth_M, x) for x in (loss_M, torch.ones_like(loss_M)))
    return (sums / counts.clamp(min=1)).detach()


def stride_of(stride: int, share: float) -> int:
    """The stride that is trained when ``share`` of a run is done: 2 in its first third, then the last one."""
    return 2 if share < 1 / 3 else stride
