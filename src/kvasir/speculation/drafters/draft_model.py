"""Draft with a smaller checkpoint of nearly the same vocabulary, in KV pages of its own. Costs a small forward a token.
Exact.

It draws with the request's own parameters and with the noise that the served model will use at the same positions
(coupled drafting), so at T > 0 the two agree more often than independent draws would. With ``max_accept`` it draws with
noise of its own instead, and the model verifies whole blocks (`kvasir.decoding.max_accept`). Then more drafts are
accepted and the distribution is the same, but a seed gives other tokens.

``tree=dyspec`` grows a tree of the paths that the smaller model finds likeliest, one forward a level (DySpec, arXiv
2410.11744; `kvasir.speculation.growth`); ``tree=fixed`` one of a fixed shape. With ``max_accept`` the tree is drawn
without replacement and verified by multi-round rejection, as published.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from kvasir.decoding.multi_round import drawing_stream, keep_drawn
from kvasir.errors import ConfigError
from kvasir.speculation.drafter import Ask, ChainModel, Drafter, Host
from kvasir.speculation.growth import Growth
from kvasir.speculation.tree import DraftTree
from kvasir.types import Sequence

TRUST = 0.7  # estimate for a drawn token; the controller learns the real rate


@dataclass(frozen=True, slots=True)
class Config:
    """``width``: most children of a node of a tree; ``threshold``: chance of a path below which no node is added."""

    model: str = ""
    max_depth: int = 4
    kv_tokens: int = 1 << 16
    max_accept: bool = False
    tree: Literal["chain", "dyspec", "fixed"] = "chain"
    width: int = 4
    threshold: float = 0.02


class DraftModel(Drafter):
    place = "same_device"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if not self.config.model:
            raise ConfigError("draft_model needs a checkpoint: --drafter draft_model:model=FOLDER")
        kind, width, depth = self.config.tree, self.config.width, self.config.max_depth
        if kind not in (kinds := ("chain", "dyspec", "fixed")):
            raise ConfigError(f"draft_model:tree={kind}: expected one of {', '.join(kinds)}")
        if width < 1 or not 0.0 < self.config.threshold < 1.0:
            raise ConfigError(
                f"draft_model:width={width},threshold={self.config.threshold}: a width of at least 1, and a threshold "
                "between 0 and 1"
            )
        if kind == "fixed" and self.config.max_accept:
            raise ConfigError(
                "draft_model:tree=fixed takes the likeliest tokens, which max_accept cannot verify: leave out "
                "max_accept, or choose tree=dyspec, whose nodes are drawn"
            )
        self._growth = None if kind == "chain" else Growth(kind, width, depth, self.config.threshold)
        self.topology = "chain" if kind == "chain" else "tree"
        self.exact = not self.config.max_accept
        self._model: ChainModel | None = None

    def prepare(self, host: Host) -> None:
        config, trees = self.config, self._growth is not None
        self._model = host.chain_model(config.model, config.kv_tokens, config.max_accept, trees)

    def propose(self, asks: list[Ask]) -> list[DraftTree]:
        if self._growth is not None:
            return self._grown(asks, self._growth)
        short = [Ask(a.seq, a.max_nodes, min(a.max_depth, a.max_nodes, self.config.max_depth)) for a in asks]
        return [DraftTree.chain(tokens, TRUST) for tokens in self._model.draw(short, keep=self.config.max_accept)]

    def _grown(self, asks: list[Ask], growth: Growth) -> list[DraftTree]:
        grown = growth.grow(self._model, asks, drawing_stream if self.config.max_accept else None)
        trees = []
        for g in grown:
            if g.drawn:
                keep_drawn(g.ask.seq, g.tree, g.weights)
            trees.append(g.tree if g.drawn else g.tree.keep(range(len(g.tree))))
        return trees

    def close(self, seq: Sequence) -> None:
        self._model.close(seq)

    def load(self, weights: Any, version: int) -> None:
        """Take new weights. The KV of running sequences stays, so their drafts are worse for a while, but never
        wrong."""
        self._model.load(weights)
        self.version = version
