"""A block of masks, filled in one forward of a few layers over the model's hidden states, drafts. Exact.

DFlash (arXiv 2602.06036) as z-lab publishes it (`kvasir.speculation.published.dflash`): the layers attend over the
anchor, the masks and keys that they make of the model's own hidden states. So a draft of 15 tokens costs what one of a
single token does. The guesses of a block do not see each other: the tree takes those of largest products, with the
noise of their positions; ``width=1`` gives chains.

Keys of committed rows lie in lanes (`kvasir.speculation.lane_drafter`), for all layers: about five times the memory of
an EAGLE head's.

Legend: B sequences, K masks, C candidates a mask, N nodes of a level, S slots, R rows, L tapped layers, E hidden size,
G KV heads of all layers, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from kvasir.errors import ConfigError
from kvasir.speculation import heads
from kvasir.speculation.drafter import Capture, ServedModel
from kvasir.speculation.lane_drafter import LEAST, LaneDrafter
from kvasir.speculation.published import folder as published
from kvasir.speculation.published.dflash import DFlashLayout

WINDOW = 2048  # positions of a lane where the settings do not say
KEPT = 4  # first positions that lanes keep, where attention rests (arXiv 2309.17453)


@dataclass(frozen=True, slots=True)
class Config:
    """``model``: folder of a published drafter; ``max_depth``: deepest draft, 0: a block less its anchor; ``width``:
    nodes followed a level, and candidates of each mask; ``window``: positions of a lane, 0: 2,048; ``lanes``: sequences
    at once."""

    model: str = ""
    max_depth: int = 0
    width: int = 4
    window: int = 0
    lanes: int = 16


class DFlash(LaneDrafter):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if not self.config.model:
            raise ConfigError("dflash needs a published drafter: --drafter dflash:model=FOLDER")
        self._found: tuple[published.Folder, published.Layout] | None = None

    def _opened(self) -> tuple[published.Folder, published.Layout]:
        if self._found is None:
            folder = heads.folder_of(self.name, self.config.model)
            self._found = published.open_published(Path(folder), [DFlashLayout()])
        if self._found is None:
            raise ConfigError(
                f"{self.config.model} holds no drafter of DFlash's layout (architectures: DFlashDraftModel). "
                f"{published.ADVICE}"
            )
        return self._found

    @torch.inference_mode()
    def attach(self, model: ServedModel, capture: Capture | None = None) -> None:
        self._head = head = published.load(*self._opened(), model)
        self._begin(model, capture, head.shape, self._size(model), KEPT)
        self._depth = min(self._depth, head.shape.depth)
        head.reserve(model.spec.max_position + 1 + head.shape.depth)

    def _size(self, model: ServedModel) -> int:
        return self.config.window or min(WINDOW, max(LEAST, model.spec.max_position))

    def device_bytes(self, model: ServedModel) -> int:
        """Number of bytes of weights, rotations and lanes. Lanes count twice, because a draft reads a copy of those
        that it extends."""
        plan, weights = published.planned(*self._opened(), model)
        shape = plan.shape
        rotations = (model.spec.max_position + 1 + shape.depth) * shape.rope.head_dim * 4
        return weights * model.place.dtype.itemsize + rotations + self._lane_bytes(model, shape, self._size(model), 1)

    def _rows(
        self, taps_RLF: torch.Tensor, token_R: torch.Tensor, position_R: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        return None, *self._head.keys(taps_RLF, position_R)

    def _expand(self, given_5B: torch.Tensor, slots: int, depth: int, hot: bool) -> torch.Tensor:
        lane_B, root_B, token_B, draws = given_5B[0], given_5B[1], given_5B[2], heads.Draws.of(given_5B[3:], hot)
        *roots, sees_BS = self._roots(lane_B, root_B, slots)
        logits_BKV = self._head.fill(self._model, token_B, root_B + 1, depth, (roots[0], roots[1]), sees_BS)
        # The anchor stands behind the last committed row, and its row draws the token of the first mask.
        position_BK = root_B[:, None] + 1 + torch.arange(depth, device=root_B.device)
        log_BKC, id_BKC = heads.guess(logits_BKV, draws, position_BK).topk(min(self.config.width, logits_BKV.shape[-1]))
        batch, _, fanout = log_BKC.shape
        joint_BN = torch.zeros(batch, 1, device=given_5B.device)
        place_BN = torch.full_like(token_B[:, None], -1)  # places of this level's nodes among all nodes
        found: list[torch.Tensor] = []
        total = 0
        for d in range(depth):
            count = joint_BN.shape[1]
            sum_BNC = joint_BN[..., None] + log_BKC[:, d, None]
            shape = (batch, count, fanout)
            columns = [id_BKC[:, d, None].expand(shape), place_BN[..., None].expand(shape)]
            columns += [log_BKC[:, d, None].expand(shape), sum_BNC]
            found.append(torch.stack([x.flatten(1).float() for x in columns]))
            joint_BN, chosen = sum_BNC.flatten(1).topk(min(self.config.width, count * fanout), -1)
            place_BN = total + chosen
            total += count * fanout
        return torch.cat(found, 2)
