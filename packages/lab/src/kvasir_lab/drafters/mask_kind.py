"""Models that draft with mask rows: what I-DLM's adapter and its conversion of a whole model have in common.

Legend: B texts, T tokens, R mask rows of a text, J masks of a block (stride - 1), E model dim, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from kvasir.errors import ConfigError
from kvasir.learn import walk
from kvasir_lab.drafters import acceptance, mask_rows
from kvasir_lab.drafters import data as drafter_data
from kvasir_lab.drafters.data import BATCH_TOKENS, Batch, Texts
from kvasir_lab.drafters.kind import Kind
from kvasir_lab.drafters.mask_rows import Layout
from kvasir_lab.drafters.prompt_rows import Keys
from kvasir_lab.drafters.target import Target


@dataclass(frozen=True)
class MaskConfig:
    """``stride``: tokens of a forward in which all drafts are accepted; 2 is trained first. ``objective``: of mask
    rows, see `mask_rows.divergence`. ``block_offset``: blocks begin anywhere, or at multiples of their size as in the
    released code. ``data``: replies of the target, or those that the tasks give."""

    stride: int = 4
    objective: Literal["kl", "ce", "tv"] = "kl"
    block_offset: Literal["random", "aligned"] = "random"
    data: Literal["self", "text"] = "self"

    def __post_init__(self) -> None:
        if not 2 <= self.stride <= 16:
            raise ConfigError(f"idlm:stride={self.stride}: must be from 2 to 16")


class MaskKind(Kind):
    """A kind whose drafts are drawn by mask rows. A subclass says how text and masks run through the model."""

    config: MaskConfig
    loss_text = (
        "The loss of the mask rows is summed over blocks of one mask\nin the first third of the run, and of "
        "all masks after it."
    )

    def __init__(self, config: MaskConfig) -> None:
        super().__init__(config)
        self.data = config.data
        self.loss_name = config.objective.upper()
        self.depth = config.stride - 1

    def begin(self, target: Target, seed: int) -> None:
        self.target, self.seed = target, seed

    @abstractmethod
    def text(self, ids_BT: torch.Tensor) -> tuple[torch.Tensor, list[Keys]]:
        """The final norm's output [B, T, E] of the clean half, and its keys and values by layer."""
        raise NotImplementedError

    @abstractmethod
    def masks(self, rows: Layout, text: list[Keys]) -> torch.Tensor:
        """The final norm's output [B, R, E] of mask rows."""
        raise NotImplementedError

    @abstractmethod
    def log_probs(self, normed: torch.Tensor) -> torch.Tensor:
        """Log-probabilities [..., V] in fp32 from the final norm's output."""
        raise NotImplementedError

    def offsets(self, batch: Batch, step: int, masks: int) -> torch.Tensor:
        """Offsets [B] of the blocks of each text, drawn for each step from its number."""
        rng = np.random.default_rng([self.seed, step])
        most = masks if self.config.block_offset == "random" else 1
        return torch.from_numpy(rng.integers(0, most, len(batch.ids)))

    def mask_losses(
        self, batch: Batch, step: int, share: float, normed_BTE: torch.Tensor, text: list[Keys]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The mask rows' loss, summed and divided by the number of reply tokens, and its means by depth [J]."""
        ids = batch.ids.to(self.target.device)
        masks = mask_rows.stride_of(self.config.stride, share) - 1
        rows = mask_rows.layout(batch, masks, self.offsets(batch, step, masks), ids.device)
        text_of, at = rows.used.nonzero(as_tuple=True)
        place = rows.place[text_of, at]
        log_q = self.log_probs(self.masks(rows, text)[text_of, at])
        with torch.no_grad():
            log_p = self.log_probs(normed_BTE[text_of, place])
        loss = mask_rows.divergence(self.config.objective, log_q, log_p, ids[text_of, place + 1])
        means = mask_rows.by_depth(loss, rows.depth[text_of, at], self.depth)
        return loss.sum() / max(1, int((batch.lengths - batch.begins).sum())), means

    @torch.no_grad()
    def probe(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Drafts of mask rows behind every root: [J, B, T] each, with row p for the root and j for token p + 2 + j.

        The likeliest token; min(1, p / q) of a token drawn from p, in expectation; and sum min(p, q), the chance that a
        draft sampled from q is accepted. p is the clean row's distribution, q the mask's.
        """
        ids = batch.ids.to(self.target.device)
        shape = (self.depth, *ids.shape)
        tokens = torch.zeros(shape, dtype=torch.long, device=ids.device)
        ratio, overlap = torch.zeros(shape, device=ids.device), torch.zeros(shape, device=ids.device)
        with self.target.autocast():
            normed, text = self.text(ids)
            for offset in range(self.depth):
                rows = mask_rows.layout(batch, self.depth, torch.full((len(ids),), offset), ids.device)
                text_of, at = rows.used.nonzero(as_tuple=True)
                place, depth = rows.place[text_of, at], rows.depth[text_of, at]
                log_q = self.log_probs(self.masks(rows, text)[text_of, at])
                log_p = self.log_probs(normed[text_of, place])
                where = depth, text_of, place - 1 - depth
                tokens[where] = log_q.argmax(-1)
                ratio[where] = (log_p + (log_p - log_q).clamp(max=0)).exp().sum(-1)
                overlap[where] = torch.minimum(log_p, log_q).exp().sum(-1)
        return tokens, ratio, overlap

    def guesses(self, batch: Batch) -> Iterator[torch.Tensor]:
        yield from self.probe(batch)[0]

    def measure(self, texts: Texts) -> dict[str, Any]:
        """Acceptance with a group of masks behind every possible last token (the tree layout), and in addition:

        ``chain``: masks behind the last draft alone, with the shares of forwards that verify all, reject, or are cold.
        ``alpha_introspective``: mean of min(1, p / q) over the places of the replies, for a token drawn there at
        temperature 1, with q of the mask row that proposed a draft for the place (1 where none did).
        ``overlap_by_depth``: the chance that a draft sampled at temperature 1 is accepted, where the drafts before it
        are the written tokens.
        """
        served, found = self.served(), {}
        assert isinstance(served, MaskKind)
        tokens = count = alpha = 0.0
        kinds = dict.fromkeys(("verified", "rejected", "cold"), 0)
        overlaps = np.zeros((2, self.depth))
        for batch in drafter_data.batches(texts, BATCH_TOKENS[self.target.device.type], 0, 0):
            guessed, ratio, overlap = served.probe(batch)
            right = walk.correct(guessed, batch.ids.to(self.target.device))
            ratios = ratio.cpu().numpy()
            overlaps += torch.stack([overlap.sum((1, 2)), (overlap > 0).sum((1, 2))]).cpu().numpy()
            for i, (begin, length) in enumerate(zip(batch.begins.tolist(), batch.lengths.tolist())):
                tokens += max(0, length - 1 - begin)
                for _, tried, accepted in walk.forwards(right[i], begin, length, chain=True):
                    count += 1
                    kinds["cold" if not tried else "verified" if accepted == tried else "rejected"] += 1
                for root, tried, accepted in walk.forwards(right[i], begin, length):
                    # The anchor draws one token more where all drafts were right, unless the reply has ended.
                    alpha += float(ratios[:tried, i, root].sum()) + (accepted == tried < length - 2 - root)
        total = sum(kinds.values())
        found["chain"] = {
            "forwards": total,
            "tokens_per_forward": tokens / max(1, total),
            "shares": {name: number / max(1, total) for name, number in kinds.items()},
        }
        found["overlap_by_depth"] = (overlaps[0] / np.maximum(1, overlaps[1])).tolist()
        found["alpha_introspective"] = alpha / max(1, tokens)
        return acceptance.acceptance(served.guesses, self.depth, texts, self.target.device) | found

    @classmethod
    def more(cls, found: dict[str, Any]) -> str:
        chain = found["chain"]
        shares = ", ".join(f"{name} {share:.1%}" for name, share in chain["shares"].items())
        overlap = ", ".join(f"{x:.3f}" for x in found["overlap_by_depth"])
        return f"""
These forwards carry masks behind every draft. With masks behind the last draft alone (chain) there are
**{chain["tokens_per_forward"]:.2f} tokens a forward**; forwards: {shares}.

At temperature 1 a draft is accepted with the chance {overlap} (by depth, the drafts before it being right).
`alpha_introspective` is {found["alpha_introspective"]:.3f}.
"""
