"""I-DLM's conversion of a whole model (arXiv 2604.11035): mask rows and clean rows are trained together.

The loss is that of the mask rows plus a times the clean rows' cross-entropy on the replies: a = 0.2, and from stride 4
on the ratio of the two, so that both weigh the same. Not exact: the converted model is another model, whose task scores
must be measured. It drafts for itself, with the embedding of its own mask token.

Legend: B texts, T tokens, R mask rows of a text, E model dim, V vocabulary.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn import functional as F

from kvasir.models.checkpoint import SIDECAR
from kvasir_lab import export
from kvasir_lab import tokenizer as lab_tokenizer
from kvasir_lab.drafters import mask_rows, prompt_rows
from kvasir_lab.drafters.data import Batch, reply_rows
from kvasir_lab.drafters.kind import size_of
from kvasir_lab.drafters.mask_kind import MaskConfig, MaskKind
from kvasir_lab.drafters.mask_rows import Layout
from kvasir_lab.drafters.prompt_rows import Keys
from kvasir_lab.drafters.target import Target
from kvasir_lab.model import Model

CLEAN = 0.2  # Weight of the clean rows' loss below stride 4, as published.
BALANCED = 4  # Stride from which on the two losses weigh the same.
MASK = lab_tokenizer.SPECIAL.index("<mask>")


@dataclass(frozen=True)
class Config(MaskConfig):
    """Options of every kind with mask rows; here these learn the written tokens, as published."""

    objective: Literal["kl", "ce", "tv"] = "ce"


class ConvertedModel(MaskKind):
    title = "I-DLM conversion (arXiv 2604.11035)"
    rate = 3e-4
    places = 2
    module: Model

    loss_text = (
        f"The loss is that of the mask rows (written tokens: CE)\nplus {CLEAN} times the clean rows' cross-entropy, "
        "from stride 4 on balanced; the last value is the clean rows'."
    )

    @classmethod
    def intro(cls, run: dict[str, Any]) -> str:
        return f"""A model for kvasir that drafts for itself: `kvasir serve FOLDER --drafter idlm`. All its
{size_of(run["parameters"])} weights were trained on, so it is another model than `{run["target"]["name"]}`:
compare them with `kvasir eval FOLDER`. Its mask token, {MASK}, is never drawn."""

    def begin(self, target: Target, seed: int) -> None:
        super().begin(target, seed)
        self.module = copy.deepcopy(target.source).float().to(target.device).train().requires_grad_(True)

    def text(self, ids_BT: torch.Tensor) -> tuple[torch.Tensor, list[Keys]]:
        return prompt_rows.read(self.module, ids_BT)

    def masks(self, rows: Layout, text: list[Keys]) -> torch.Tensor:
        return mask_rows.run(self.module, self.module.model.embed_tokens.weight[MASK], rows, text)

    def log_probs(self, normed: torch.Tensor) -> torch.Tensor:
        """The mask is never drawn: its probability is 0."""
        logits = F.linear(normed, self.module.model.embed_tokens.weight).float()
        return logits.index_fill(-1, torch.tensor([MASK], device=logits.device), -1e4).log_softmax(-1)

    def losses(self, batch: Batch, step: int = 0, share: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Mask loss, plus the weighted clean loss; shown are the mask losses by depth and the clean one."""
        ids = batch.ids.to(self.target.device)
        text_of, at = reply_rows(batch, ids.device)
        with self.target.autocast():
            normed, text = self.text(ids)
            mask, means = self.mask_losses(batch, step, share, normed, text)
            log_p = self.log_probs(normed[text_of, at])
            clean = -log_p.gather(-1, ids[text_of, at + 1][:, None]).mean()
        weight = CLEAN
        if mask_rows.stride_of(self.config.stride, share) >= BALANCED:
            weight = mask.detach() / (clean.detach() + 1e-8)
        return mask + weight * clean, torch.cat([means, clean.detach()[None]])

    def whole_model(self) -> Model:
        return self.served().module

    def write(self, folder: Path, tokenizer: Any) -> None:
        export.export(self.module, tokenizer, folder)
        told = {"kind": "idlm", "mask_token_id": MASK, "stride": self.config.stride}
        (folder / SIDECAR).write_text(json.dumps(told, indent=1) + "\n")
