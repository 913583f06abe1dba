"""The model that a drafter is trained for.

Shape suffixes: B texts, T tokens, L tapped layers, E model dim.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from kvasir.speculation import heads
from kvasir_lab.model import Model
from kvasir_lab.sample import serving_copy


class Target:
    """The frozen target model: the states that a drafter reads, and its distribution.

    ``model``: its weights as they are served; ``source``: as they were given.
    """

    def __init__(self, model: Model, name: str) -> None:
        self.source, self.model = model, serving_copy(model)
        weight = self.model.model.embed_tokens.weight
        self.device, self.dtype = weight.device, weight.dtype
        s = model.shape
        self.facts = {
            "name": name,
            "hidden_size": s.dim,
            "vocab_size": s.vocab,
            "num_layers": s.layers,
            "weights": heads.fingerprint(model.model.norm.weight),
        }

    @torch.no_grad()
    def features(
        self, ids_BT: torch.Tensor, layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Outputs of ``layers`` [B, T, L, E], the final norm's output [B, T, E], and embeddings [B, T, E].

        The embeddings are those of the next token; the last row has its own.
        """
        trunk = self.model.model
        x = embedded = trunk.embed_tokens(ids_BT)
        rope, found = self.model.rope(ids_BT.shape[1]), {}
        for i, layer in enumerate(trunk.layers):
            x = layer(x, rope, None)
            found[i] = x
        return (
            torch.stack([found[i] for i in layers], 2),
            trunk.norm(x),
            torch.cat([embedded[:, 1:], embedded[:, -1:]], 1),
        )

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits in fp32 from the final norm's output; only the output matrix is applied."""
        return F.linear(normed.to(self.dtype), self.model.model.embed_tokens.weight).float()

    def autocast(self) -> torch.autocast:
        """Matrix products in bf16 on a GPU, whatever type the weights have."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")
