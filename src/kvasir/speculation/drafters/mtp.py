"""Draft with the MTP layer of the served checkpoint, which shares its embedding, head and pages. Exact; needs no
weights of its own.

Multi-token prediction as DeepSeek V3 publishes it (arXiv 2412.19437, section 2.2): one decoder layer over the model's
last hidden state and the embedding of the next token. Used once it drafts one token; for a chain it is used again on
its own state. It draws with the noise that the model will use at the same positions (coupled drafting), at the
request's temperature.

``tree=dyspec`` grows a tree of the likeliest paths, one step of the layer a level (`kvasir.speculation.growth`);
``tree=fixed`` one of a fixed shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvasir.errors import ConfigError
from kvasir.kv.policy import KVPolicy
from kvasir.models.loader import brings_mtp
from kvasir.speculation.drafter import Ask, Capture, Drafter, Host, MTPModel, ServedModel
from kvasir.speculation.growth import Growth
from kvasir.speculation.tree import DraftTree
from kvasir.technique import Technique
from kvasir.types import Sequence


@dataclass(frozen=True, slots=True)
class Config:
    """``max_depth``: most uses of the layer in a draft; ``width``: most children of a node of a tree; ``threshold``:
    chance of a path below which no node is added."""

    max_depth: int = 3
    tree: Literal["chain", "dyspec", "fixed"] = "chain"
    width: int = 4
    threshold: float = 0.02


class MTP(Drafter):
    place = "same_device"
    follows = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        kind, width, depth, threshold = config.tree, config.width, config.max_depth, config.threshold
        if kind not in (kinds := ("chain", "dyspec", "fixed")):
            raise ConfigError(f"mtp:tree={kind}: expected one of {', '.join(kinds)}")
        if width < 1 or depth < 1 or not 0.0 < threshold < 1.0:
            raise ConfigError(
                f"mtp:max_depth={depth},width={width},threshold={threshold}: depth and width are at least 1, the "
                "threshold between 0 and 1"
            )
        self._growth = None if kind == "chain" else Growth(kind, width, depth, threshold)
        self.topology = "chain" if kind == "chain" else "tree"
        self._model: MTPModel | None = None

    @classmethod
    def comes_with(cls, path: Path) -> bool:
        return brings_mtp(path)

    def conflicts(self, others: list[Technique]) -> list[str]:
        found = super().conflicts(others)
        if any(isinstance(other, KVPolicy) for other in others):
            found.append(
                "drafter 'mtp' keeps its keys in the model's pages by position, and a KV policy moves tokens there: "
                "leave --kv-policy out, or use --drafter suffix"
            )
        return found

    def prepare(self, host: Host) -> None:
        self._model = host.mtp_model()

    def attach(self, model: ServedModel, capture: Capture | None = None) -> None:
        self.hidden_layers = (len(model.spec.layers) - 1,)

    def ingest(self, seq: Sequence, hidden: Any, start: int) -> None:
        self._model.keep(seq, hidden[:, 0], start)

    def settle(self) -> None:
        self._model.settle()

    def propose(self, asks: list[Ask]) -> list[DraftTree]:
        if self._growth is not None:
            return [grown.tree.keep(range(len(grown.tree))) for grown in self._growth.grow(self._model, asks)]
        short = [Ask(a.seq, a.max_nodes, min(a.max_depth, self.config.max_depth)) for a in asks]
        return [DraftTree.chain(tokens, chances) for tokens, chances in self._model.draw(short)]

    def close(self, seq: Sequence) -> None:
        self._model.close(seq)
