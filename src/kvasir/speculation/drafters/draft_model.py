"""Draft with a smaller checkpoint of the same vocabulary, which has KV pages of its own. Costs a small forward a token.
Exact.

It draws with the request's own parameters and with the noise that the served model will use at the same positions
(coupled drafting), so at T > 0 the two agree more often than independent draws would. With ``max_accept`` it draws with
noise of its own instead, and the model verifies whole blocks (`kvasir.decoding.max_accept`). Then more drafts are
accepted and the distribution is the same, but a seed gives other tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvasir.errors import ConfigError
from kvasir.speculation.drafter import Ask, ChainModel, Drafter, Host
from kvasir.speculation.tree import DraftTree
from kvasir.types import Sequence

TRUST = 0.7  # estimate for a drawn token; the controller learns the real rate


@dataclass(frozen=True, slots=True)
class Config:
    model: str = ""
    max_depth: int = 4
    kv_tokens: int = 1 << 16
    max_accept: bool = False


class DraftModel(Drafter):
    place = "same_device"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if not self.config.model:
            raise ConfigError("draft_model needs a checkpoint: --drafter draft_model:model=FOLDER")
        self.exact = not self.config.max_accept
        self._model: ChainModel | None = None

    def prepare(self, host: Host) -> None:
        self._model = host.chain_model(self.config.model, self.config.kv_tokens, self.config.max_accept)

    def propose(self, asks: list[Ask]) -> list[DraftTree]:
        short = [Ask(a.seq, a.max_nodes, min(a.max_depth, a.max_nodes, self.config.max_depth)) for a in asks]
        return [DraftTree.chain(tokens, TRUST) for tokens in self._model.draw(short, keep=self.config.max_accept)]

    def close(self, seq: Sequence) -> None:
        self._model.close(seq)

    def load(self, weights: Any, version: int) -> None:
        """Take new weights. The KV of running sequences stays, so their drafts are worse for a while, but never
        wrong."""
        self._model.load(weights)
        self.version = version
