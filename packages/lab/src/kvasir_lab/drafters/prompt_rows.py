"""Prompt tokens in training: rows behind every token of the replies, run through the frozen model with gradients.

The rows of token p, their *root*, see the text up to p and the earlier rows of the same root. They stand at the
positions that follow p, as guest rows do when serving. The text does not see them, so its keys and values are computed
once and without gradients.

Shape suffixes: B texts, T tokens, R roots of a text, H query heads, G KV heads, D head dim, E model dim, C members of
an ensemble, K prompt tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvasir_lab.drafters.data import Batch
from kvasir_lab.model import Attention, Block, Model, rotate

Keys = tuple[torch.Tensor, torch.Tensor]
Rope = tuple[torch.Tensor, torch.Tensor]


def read(model: Model, ids_BT: torch.Tensor) -> tuple[torch.Tensor, list[Keys]]:
    """The final norm's output for a text [B, T, E], and the keys and values of each layer."""
    x, rope, kept = model.model.embed_tokens(ids_BT), model.rope(ids_BT.shape[1]), []
    for layer in model.model.layers:
        kept.append(_keys(layer.self_attn, layer.input_layernorm(x), rope))
        x = layer(x, rope, None)
    return model.model.norm(x), kept


def unroll(model: Model, weight_CKE: torch.Tensor, batch: Batch, text: list[Keys]) -> Iterator[torch.Tensor]:
    """Yield for j = 0, 1, ... the final norm's output [B, T, E] whose row p predicts token p + 2 + j.

    It is averaged over the ensemble; the output matrix is linear, so this averages the logits. Rows that predict no
    token of a reply are meaningless. ``text``: the keys and values that `read` returned for the batch.
    """
    trunk, device = model.model, model.model.norm.weight.device
    count = batch.ids.shape[1]
    replied = int((batch.lengths - batch.begins).max())
    roots_BR = (batch.begins.to(device)[:, None] - 1 + torch.arange(replied, device=device)).clamp(0, count - 1)
    whole = model.rope(count)
    unseen = (torch.arange(count, device=device) > roots_BR[..., None])[:, None]
    members, depth, dim = weight_CKE.shape
    own: list[list[list[Keys]]] = [[[] for _ in trunk.layers] for _ in range(members)]
    for j in range(depth):
        at_BR = (roots_BR + 1 + j).clamp(max=count - 1)
        rope, states = tuple(part[0, 0][at_BR][:, None] for part in whole), []
        for member in range(members):
            x = weight_CKE[member, j].to(trunk.embed_tokens.weight.dtype).expand(*roots_BR.shape, -1)
            for layer, keys, mine in zip(trunk.layers, text, own[member]):
                x = _block(layer, x, rope, keys, unseen, mine)
            states.append(trunk.norm(x))
        found = torch.stack(states).mean(0)
        yield found.new_zeros(*batch.ids.shape, dim).index_put(
            (torch.arange(len(roots_BR), device=device)[:, None], roots_BR), found
        )


def _keys(attention: Attention, normed: torch.Tensor, rope: Rope) -> Keys:
    """Keys and values [B, G, rows, D]."""
    k, v = (proj(normed).unflatten(-1, (-1, attention.shape.head_dim)) for proj in (attention.k_proj, attention.v_proj))
    return rotate(attention.k_norm(k).transpose(1, 2), *rope).to(v.dtype), v.transpose(1, 2)


def _block(
    layer: Block, x_BRE: torch.Tensor, rope: Rope, text: Keys, unseen: torch.Tensor, mine: list[Keys]
) -> torch.Tensor:
    """Run one layer for one prompt token of every root.

    ``unseen`` [B, 1, R, T] marks the text that a root does not see. ``mine``: keys and values of the same root's
    earlier prompt tokens in this layer; this token's are added.
    """
    attention = layer.self_attn
    normed = layer.input_layernorm(x_BRE)
    q = attention.q_norm(attention.q_proj(normed).unflatten(-1, (-1, attention.shape.head_dim))).transpose(1, 2)
    mine.append(_keys(attention, normed, rope))
    q = rotate(q, *rope).to(mine[-1][1].dtype)
    share = attention.shape.heads // attention.shape.kv_heads
    k, v = (x.repeat_interleave(share, 1) for x in text)
    before = [tuple(x.repeat_interleave(share, 1) for x in pair) for pair in mine]
    scores = torch.cat(
        [
            (q @ k.transpose(-1, -2)).masked_fill(unseen, -float("inf")),
            *((q * k).sum(-1, keepdim=True) for k, _ in before),
        ],
        -1,
    )
    weights = (scores.float() * attention.shape.head_dim**-0.5).softmax(-1).to(v.dtype)
    out = weights[..., : v.shape[2]] @ v
    for i, (_, value) in enumerate(before):
        out = out + weights[..., v.shape[2] + i, None] * value
    x = x_BRE + attention.o_proj(out.transpose(1, 2).flatten(2))
    return x + layer.mlp(layer.post_attention_layernorm(x))
