"""One decoder layer over the model's fused hidden states drafts, with keys of its own; a tree by joint probability.
Exact.

EAGLE-3 (arXiv 2503.01840) with the dynamic trees of EAGLE-2 (arXiv 2406.16858): each level expands the ``width`` nodes
of largest joint probability with ``width`` children each, and the best of all nodes are proposed. A child is the token
that the model would draw at its position if its distribution were the head's: the noise is the same (coupled drafting).
``width=1`` gives chains, which run in the CUDA graphs of decode steps.

The single layer makes keys of committed rows cheap. They lie in lanes (`kvasir.speculation.lane_drafter`).

A folder is in our own format, or one that others publish (`kvasir.speculation.published`): EAGLE-3 with its reduced
vocabulary, EAGLE-1 and 2. Published heads were trained on whole texts. Their lanes keep the first positions for good,
where such attention rests (StreamingLLM, arXiv 2309.17453).

Legend: B sequences, N nodes of a level, C children a node, S slots, R rows, L tapped layers, E model dim, H query
heads, G KV heads, D head dim, V rows of the head's output matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvasir.errors import ConfigError
from kvasir.speculation import heads
from kvasir.speculation.drafter import Capture, ServedModel
from kvasir.speculation.lane_drafter import LEAST, LaneDrafter
from kvasir.speculation.layer_head import LayerHead, attend
from kvasir.speculation.published import folder as published

OWN_WINDOW = 1024  # positions of a lane where the settings do not say, for heads of our own format
PUBLISHED_WINDOW = 2048  # the same for published heads: the length of the texts that most were trained on
KEPT = 4  # first positions that lanes of published heads keep, as many as StreamingLLM does


@dataclass(frozen=True, slots=True)
class Config:
    """``model``: folder of a trained head, ours or published (default: the one in the package; new: random weights, for
    --learn); ``max_depth``: deepest draft, 0: as trained; ``width``: nodes expanded a level, and children of each;
    ``window``: positions of a lane, 0: 1,024, and 2,048 for published heads; ``lanes``: sequences at once."""

    model: str = ""
    max_depth: int = 0
    width: int = 4
    window: int = 0
    lanes: int = 64


class EagleDrafter(LaneDrafter):
    learns = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._folder: Path | None = None

    @torch.inference_mode()
    def attach(self, model: ServedModel, capture: Capture | None = None) -> None:
        found = self._published()
        head: LayerHead
        if found is None:
            head = heads.load_for("eagle", self._given(), model)
        else:
            head = published.load(*found, model)
            self.learns = False
        self._head = head
        self._begin(model, capture, head.shape, *self._span(head.shape, found is not None, model))
        head.reserve(model.spec.max_position + self._depth)

    def _published(self) -> tuple[published.Folder, published.Layout] | None:
        """The folder of the settings where others published it; None: it is ours, or new."""
        if not self.config.model or self.config.model == heads.NEW:
            return None
        self._folder = self._folder or heads.folder_of("eagle", self.config.model)
        return published.open_published(self._folder)

    def _given(self) -> str:
        """The folder that the settings name, looked up once."""
        return str(self._folder or self.config.model)

    def _span(self, shape: Any, is_published: bool, model: ServedModel) -> tuple[int, int]:
        """Positions of a lane, and how many of them are the first of the text."""
        window = self.config.window or (
            min(PUBLISHED_WINDOW, max(LEAST, model.spec.max_position)) if is_published else OWN_WINDOW
        )
        if not is_published:
            return window, 0
        return (max(LEAST, min(window, shape.window)), 0) if shape.window else (window, KEPT)

    def device_bytes(self, model: ServedModel) -> int:
        """Number of bytes of weights and rotations, of the keys, values, positions and state of each lane, and of the
        rows that a replay reads. A published head's weights include embeddings of its own, even where they turn out to
        be the model's; and its lanes count twice, because a draft reads a copy of those that it extends."""
        found = self._published()
        if found is None:
            shape, weights = heads.planned("eagle", self._given(), model)
            rotation, copies, ids = (shape.head_dim // 2) * 8, 0, 0
        else:
            plan, weights = published.planned(*found, model)
            shape, copies = plan.shape, 1
            rotation, ids = shape.rope.head_dim * 4, shape.own_rows * 8
        window, _ = self._span(shape, found is not None, model)
        rotations = (model.spec.max_position + (self.config.max_depth or shape.depth)) * rotation
        return weights * model.place.dtype.itemsize + rotations + ids + self._lane_bytes(model, shape, window, copies)

    def _rows(
        self, taps_RLF: torch.Tensor, token_R: torch.Tensor, position_R: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        head = self._head
        state_RE = head.begin(self._model, taps_RLF)
        _, k_RGD, v_RGD = head.attention(head.mix(state_RE, head.embed(self._model, token_R)), position_R)
        return state_RE, k_RGD, v_RGD

    def _expand(self, given_5B: torch.Tensor, slots: int, depth: int, hot: bool) -> torch.Tensor:
        head, model, width = self._head, self._model, self.config.width
        lane_B, root_B, token_B, draws = given_5B[0], given_5B[1], given_5B[2], heads.Draws.of(given_5B[3:], hot)
        batch = len(lane_B)
        *roots, sees_BS = self._roots(lane_B, root_B, slots)
        nodes: tuple[torch.Tensor, torch.Tensor] | None = None
        sees_BNM: torch.Tensor | None = None
        state_BNE, token_BN, position_BN = self._states[lane_B][:, None], token_B[:, None], root_B[:, None]
        joint_BN = torch.zeros(batch, 1, device=given_5B.device)
        place_BN = torch.full_like(token_BN, -1)  # places of this level's nodes among all nodes
        found: list[torch.Tensor] = []
        total = 0
        for d in range(depth):
            count = token_BN.shape[1]
            mixed = head.mix(state_BNE, head.embed(model, token_BN))
            q_BNHD, *kv = head.attention(mixed, position_BN)
            if d:  # the root's keys are in the lane already
                itself = torch.eye(count, dtype=torch.bool, device=given_5B.device).expand(batch, -1, -1)
                if nodes is None or sees_BNM is None:
                    nodes, sees_BNM = (kv[0], kv[1]), itself
                else:
                    nodes = torch.cat([nodes[0], kv[0]], 1), torch.cat([nodes[1], kv[1]], 1)
                    sees_BNM = torch.cat([sees_BNM, itself], 2)
            attended = attend(q_BNHD, (roots[0], roots[1]), sees_BS, nodes, sees_BNM)
            logits_BNV, state_BNE = head.step(model, state_BNE, mixed, attended)
            log_BNV = heads.guess(logits_BNV, draws, position_BN + 1, head.ids, model.spec.vocab_size)
            log_BNC, id_BNC = log_BNV.topk(min(width, log_BNV.shape[-1]), -1) if width > 1 else log_BNV.max(-1, True)
            if head.ids is not None:
                id_BNC = head.ids[id_BNC]
            sum_BNC = joint_BN[..., None] + log_BNC
            columns = [id_BNC, place_BN[..., None].expand(-1, -1, id_BNC.shape[2]), log_BNC, sum_BNC]
            found.append(torch.stack([x.flatten(1).float() for x in columns]))
            if d + 1 == depth:
                break
            fanout = id_BNC.shape[2]
            position_BN = position_BN[:, :1] + 1
            if width == 1:  # there is nothing to choose from
                joint_BN, token_BN, place_BN = sum_BNC[..., 0], id_BNC[..., 0], place_BN + 1
            else:
                joint_BN, chosen = sum_BNC.flatten(1).topk(min(width, count * fanout), -1)
                token_BN, place_BN = id_BNC.flatten(1).gather(1, chosen), total + chosen
                position_BN = position_BN.expand(-1, chosen.shape[1])
                parent = chosen // fanout
                state_BNE = state_BNE.gather(1, parent[..., None].expand(-1, -1, state_BNE.shape[2]))
                if sees_BNM is not None:
                    sees_BNM = sees_BNM.gather(1, parent[..., None].expand(-1, -1, sees_BNM.shape[2]))
            total += count * fanout
        return torch.cat(found, 2)

    def weights(self) -> Mapping[str, torch.Tensor]:
        """The head's parameters. When they change, keys of running sequences stay, so that their drafts are worse for a
        while, but never wrong. Raises ConfigError for a published head, which is served as it is."""
        if not self.learns:
            raise ConfigError(
                f"{self.config.model} holds a published head, and --learn trains heads of our own format. Leave "
                "--learn out, or start one with --drafter eagle:model=new"
            )
        return dict(self._head.named_parameters())

    def export(self, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
        heads.write_tensors(self._head, weights, folder, heads.facts_of(self._model))
