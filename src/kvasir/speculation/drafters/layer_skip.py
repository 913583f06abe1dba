"""The served model's own first layers run ahead, sharing weights and pages. Exact; pays for models trained to exit early.

DEL (arXiv 2504.05598): exit layer E and length d of a draft are those with the most tokens per layer computed,

    TPL(E, d) = sum over the sequences of (1 - a^(d + 1)) / (1 - a)  /  (d (E + h) + L + h)

where a is the running share of right tokens of that exit for that sequence, L the layers of the model and h what its head
costs, in layers. All sequences of a step share one exit, since they are one batch. The paper estimates a from every layer's
cached hidden states; here an exit is known by what was accepted of it, so the least known one drafts a token now and then.

An ordinary checkpoint's early layers predict little: this is for those trained with layer dropout and early-exit loss.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.errors import ConfigError
from kvasir.speculation.drafter import Ask, Drafter, ExitModel, Host
from kvasir.speculation.tree import DraftTree
from kvasir.types import Sequence

PRIOR = 0.5  # share of right tokens that an exit is believed to have,
PRIOR_WEIGHT = 4.0  # observations that this counts for; and those of all sequences together, for one of them
DECAY = 0.97  # of the evidence, a verification
EXPLORE = 16  # steps in which the least known exit drafts once


@dataclass(frozen=True, slots=True)
class Config:
    """``exits``: layers before an exit, as ``8+16+24``; default: a quarter, a half and three quarters of the model's."""

    exits: str = ""
    max_depth: int = 4


class LayerSkip(Drafter):
    place = "same_device"

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config or Config())
        try:
            self._exits = tuple(int(e) for e in self.config.exits.split("+") if e)
        except ValueError as e:
            raise ConfigError(f"layer_skip:exits={self.config.exits!r}: expected numbers of layers, as 8+16") from e
        self._model: ExitModel | None = None
        self._steps = 0
        self._all: dict[int, list[float]] = {}  # exit -> [right, tried] of all sequences

    def prepare(self, host: Host) -> None:
        self._model = host.exit_model(self._exits)

    def propose(self, asks: list[Ask]) -> list[DraftTree]:
        after, depth = self._choose([ask.seq for ask in asks])
        short = [Ask(a.seq, a.max_nodes, min(a.max_depth, a.max_nodes, depth)) for a in asks]
        for ask in asks:
            ask.seq.state["layer_skip_exit"] = after
        return [DraftTree.chain(tokens, self._share(ask.seq, after)) for tokens, ask in zip(self._model.draw(short, after), asks)]

    def observe(self, seq: Sequence, tree: DraftTree, path: list[int], hidden: object = None) -> None:
        after = seq.state["layer_skip_exit"]
        for counts in (self._all.setdefault(after, [0.0, 0.0]), self._own(seq).setdefault(after, [0.0, 0.0])):
            counts[0] = DECAY * counts[0] + len(path)
            counts[1] = DECAY * counts[1] + min(len(path) + 1, len(tree))

    def close(self, seq: Sequence) -> None:
        self._model.close(seq)

    @staticmethod
    def _own(seq: Sequence) -> dict[int, list[float]]:
        return seq.state.setdefault("layer_skip", {})

    def _share(self, seq: Sequence, after: int) -> float:
        """The running share of right tokens: the sequence's own, from that of all, from the prior."""
        share = PRIOR
        for right, tried in (self._all.get(after, (0.0, 0.0)), self._own(seq).get(after, (0.0, 0.0))):
            share = (right + PRIOR_WEIGHT * share) / (tried + PRIOR_WEIGHT)
        return min(share, 0.99)

    def _choose(self, seqs: list[Sequence]) -> tuple[int, int]:
        """The exit and the length of this step."""
        model = self._model
        exits = model.exits
        self._steps += 1
        if self._steps % EXPLORE == 0:
            return min(exits, key=lambda e: self._all.get(e, (0.0, 0.0))[1]), 1
        best, found = (exits[0], 1), 0.0
        for after in exits:
            shares = [self._share(seq, after) for seq in seqs]
            for depth in range(1, self.config.max_depth + 1):
                tokens = sum((1 - a ** (depth + 1)) / (1 - a) for a in shares)
                rate = tokens / (depth * (after + model.head_layers) + model.num_layers + model.head_layers)
                if rate > found:
                    best, found = (after, depth), rate
        return best
