"""Heads of one decoder layer, as their drafter runs them: our own and published ones.

A head turns the outputs of some layers into a state for each row. The layer reads a state and the token after it, and
its output is the state of the next step. Attention is the drafter's: keys of committed rows depend on their own state
and token alone, so they are computed in any order and kept.

Legend: B sequences, R rows, N = leading dimensions, L tapped layers, E dim of the head, F dim of the served model, H
query heads, G KV heads, D head dim, V rows of the output matrix, S slots, C nodes in growth, M nodes seen so far.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from kvasir.speculation.drafter import ServedModel


class LayerHead(Protocol):
    """``shape``: ``dim`` (E), ``layers`` (tapped, in the order in which ``begin`` reads them), ``depth``, ``kv_heads``,
    ``head_dim``; ``ids``: the model's token for each row of the output matrix, None: they are the same."""

    shape: Any
    ids: torch.Tensor | None

    def reserve(self, num_positions: int) -> None:
        """Have the rotations of so many positions at hand."""

    def rotation_bytes(self, num_positions: int) -> int:
        """Number of bytes that ``reserve`` takes."""

    def begin(self, model: ServedModel, taps_RLF: torch.Tensor) -> torch.Tensor:
        """Outputs of the tapped layers -> states [R, E]."""

    def embed(self, model: ServedModel, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [..., E] of tokens."""

    def mix(self, state_NE: torch.Tensor, embedded_NE: torch.Tensor) -> torch.Tensor:
        """Inputs of the layer's attention, from states and the embeddings of the tokens that follow them."""

    def attention(
        self, mixed: torch.Tensor, positions_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated queries [N, H, D] and keys, and values [N, G, D]."""

    def step(
        self, model: ServedModel, state_NE: torch.Tensor, mixed: torch.Tensor, attended_NHD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits [N, V] and the states [N, E] of the next step, given what the heads attended to."""

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]: ...


def attend(
    q_BCHD: torch.Tensor,
    roots: tuple[torch.Tensor, torch.Tensor],
    sees_BS: torch.Tensor,
    nodes: tuple[torch.Tensor, torch.Tensor] | None,
    sees_BCM: torch.Tensor | None,
) -> torch.Tensor:
    """Attention [B, C, H, D] of nodes over the kept rows of their sequence and over the nodes above them.

    ``roots``: keys and values [B, G, S, D] of the kept rows, of which a sequence sees one at least; ``nodes``: those
    [B, M, G, D] of the nodes so far, None at the first level. The kept rows are many and the same at every level, so
    they are never copied: softmax runs over the scores of both. In fp32 but for the products."""
    batch, count, num_heads, size = q_BCHD.shape
    keys, values = roots
    groups = keys.shape[1]
    each, slots = num_heads // groups, keys.shape[2]
    # Every query head of a group is a row of its KV head.
    q_BGRD = (q_BCHD * size**-0.5).view(batch, count, groups, each, size).transpose(1, 2).flatten(2, 3)
    scores = (q_BGRD @ keys.mT).float().masked_fill_(~sees_BS[:, None, None], -float("inf"))
    if nodes is not None:
        k_BGMD, v_BGMD = (x.transpose(1, 2) for x in nodes)
        sees = sees_BCM[:, None, :, None].expand(-1, groups, -1, each, -1).flatten(2, 3)
        own = (q_BGRD @ k_BGMD.mT).float().masked_fill_(~sees, -float("inf"))
        weights = torch.cat([scores, own], -1).softmax(-1).to(values.dtype)
        out = weights[..., :slots] @ values + weights[..., slots:] @ v_BGMD
    else:
        out = scores.softmax(-1).to(values.dtype) @ values
    return out.view(batch, groups, count, each, size).transpose(1, 2).reshape(batch, count, num_heads, size)
