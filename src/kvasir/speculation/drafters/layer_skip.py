"""Draft with the served model's own first layers, which share its weights and pages. Exact; pays for models trained to
exit early.

DEL (arXiv 2504.05598) chooses the exit layer and the draft length at run time. Evidence comes from *shadow tokens*: a
step that commits rows has the outputs of all exits for them, and the head applied there tells what each exit would have
drafted after the accepted tokens, whichever exit did draft. For every exit E and sequence the drafter keeps two sums,
of right and of wrong tokens, which are multiplied by OMEGA each round. The share a of right tokens is the chance that a
drafted token is right, here and now. It takes the exit and length with the most tokens for each layer computed:

    TPL(E, d) = sum over the sequences of (1 - a^(d + 1)) / (1 - a)  /  (d (E + h) + L + 2 h)
    TPL(0) = sequences / (L + h)

L is the number of layers. h is the cost of the head in layers, which the paper does not count: the head is read for
every drafted token, by the model, and for the shadow tokens. Where no draft is best, none is made; exits are still
judged, a few rows at a time.

A draft may end before d: after the first token whose probability is below the mean of the average probabilities of
right and of wrong tokens at this exit. These sums are kept in the same way.

Three things differ from the paper. The sequences of a step share one exit and d, since they are one batch, whose draft
costs what its longest member does (the authors' code, for one sequence, ends drafts by probability alone). A sequence
starts from what all others have shown, not from the end of its prompt, whose last layers are not computed. With
temperature, a shadow token is drawn with the noise of its position, as drafts are.

The early layers of an ordinary checkpoint predict little: this is for models trained with layer dropout and early-exit
loss.

Legend: R rows, X exits, E model dim.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from kvasir.errors import ConfigError
from kvasir.speculation.drafter import Ask, Capture, Drafter, ExitModel, Host, ServedModel
from kvasir.speculation.tree import DraftTree
from kvasir.types import Sequence

SHADOWS = True  # False: judge an exit by its accepted drafts alone, as where there are no hidden states
OMEGA = 0.95  # factor of the sums, each round
FORGOTTEN = 0.5  # weight of right or of wrong tokens below which their sums say nothing
START = (2.0, 2.0, 1.5, 0.5)  # initial sums: right and wrong tokens, and the probabilities of each
BEGIN = 4.0  # observations that the evidence of all sequences counts for in a new one
MAX_WAITING = 8  # most rows of a sequence that wait to be judged: the last ones
MAX_JUDGED = 64  # most rows of the head in one call; sequences with the most waiting rows come first
LEAST_JUDGED = 8  # rows that must wait before they are judged in a step without drafts


@dataclass(frozen=True, slots=True)
class Config:
    """``exits``: layers before an exit, as ``8+16+24``; default: a quarter, a half and three quarters of the
    model's. ``static``: drafts of every step, from the first of the exits, to compare with; 0: chosen at run time."""

    exits: str = ""
    max_depth: int = 8
    static: int = 0


@dataclass(slots=True)
class Evidence:
    """Evidence of one exit: weights of right and of wrong tokens, and the sums of their probabilities."""

    right: float
    wrong: float
    sure_right: float
    sure_wrong: float

    @property
    def share(self) -> float:
        """Share of right tokens."""
        return self.right / (self.right + self.wrong)

    @property
    def threshold(self) -> float:
        """Probability below which a draft ends: halfway between the averages of right and of wrong tokens.

        It is 0 until both were seen, as in the paper, and again when one of them is forgotten."""
        if min(self.right, self.wrong) < FORGOTTEN:
            return 0.0
        return (self.sure_right / self.right + self.sure_wrong / self.wrong) / 2

    def add(self, verdicts: Iterable[tuple[bool, float]]) -> None:
        """Add a round of (whether the token was right, its probability)."""
        self.right, self.wrong, self.sure_right, self.sure_wrong = (
            OMEGA * s for s in (self.right, self.wrong, self.sure_right, self.sure_wrong)
        )
        for right, sure in verdicts:
            if right:
                self.right, self.sure_right = self.right + 1, self.sure_right + sure
            else:
                self.wrong, self.sure_wrong = self.wrong + 1, self.sure_wrong + sure

    def worth(self, observations: float) -> Evidence:
        """Return evidence with the same shares and this many observations."""
        k = observations / (self.right + self.wrong)
        return Evidence(k * self.right, k * self.wrong, k * self.sure_right, k * self.sure_wrong)


@dataclass(slots=True)
class _Known:
    """State of a sequence: evidence by exit, and the rows that wait to be judged.

    ``hidden`` [R, X, E]: waiting rows from position ``start`` on; ``end``: position after the last row seen;
    ``drafted``: exit of the last draft."""

    exits: dict[int, Evidence] = field(default_factory=dict)
    start: int = 0
    end: int = 0
    hidden: Any = None
    drafted: int = 0


class LayerSkip(Drafter):
    place = "same_device"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        try:
            self._exits = tuple(sorted({int(e) for e in self.config.exits.split("+") if e}))
        except ValueError as e:
            raise ConfigError(f"layer_skip:exits={self.config.exits!r}: expected numbers of layers, as 8+16") from e
        if not 0 <= self.config.static <= self.config.max_depth or self.config.static and len(self._exits) != 1:
            raise ConfigError(
                f"layer_skip:exits={self.config.exits},static={self.config.static}: static drafts come from one exit, "
                f"at most max_depth={self.config.max_depth} of them, as in layer_skip:exits=8,static=4"
            )
        self._model: ExitModel | None = None
        self._all: dict[int, Evidence] = {}  # by exit: evidence of all sequences together
        self._drew = False

    def prepare(self, host: Host) -> None:
        self._model = host.exit_model(self._exits)

    def attach(self, model: ServedModel, capture: Capture | None = None) -> None:
        if SHADOWS and not self.config.static:
            self.hidden_layers = tuple(after - 1 for after in self._model.exits)

    def propose(self, asks: list[Ask]) -> list[DraftTree]:
        self._judge([ask.seq for ask in asks])
        after, depth = self._choose([ask.seq for ask in asks])
        self._drew = after > 0
        if not after:
            return [DraftTree() for _ in asks]
        short = [Ask(a.seq, a.max_nodes, min(a.max_depth, a.max_nodes, depth)) for a in asks]
        stops = []
        for ask in asks:
            self._known(ask.seq).drafted = after
            stops.append(0.0 if self.config.static else self._evidence(ask.seq, after).threshold)
        return [DraftTree.chain(tokens, sure) for tokens, sure in self._model.draw(short, after, stops)]

    def observe(self, seq: Sequence, tree: DraftTree, path: list[int]) -> None:
        if not self.hidden_layers and tree.source == self.name:
            after = self._known(seq).drafted
            self._learn(seq, after, [(node in path, est) for node, est in zip(range(len(path) + 1), tree.est)])

    def ingest(self, seq: Sequence, hidden: Any, start: int) -> None:
        """Keep the rows after which the model has drawn a token, each once."""
        known, end = self._known(seq), start + len(hidden)
        first = max(start, seq.num_prompt - 1, known.end, end - MAX_WAITING)
        if first >= end:
            return
        fresh = hidden[first - start :].clone()  # a view would keep the whole step's memory
        if known.hidden is not None and known.end == first:
            known.hidden = torch.cat([known.hidden, fresh])[-MAX_WAITING:]
        else:
            known.hidden = fresh
        known.start, known.end = end - len(known.hidden), end

    def close(self, seq: Sequence) -> None:
        seq.state.pop(self.name, None)
        self._model.close(seq)

    # ----------------------------------------------------------------------------------------------------------- learn

    def _judge(self, seqs: list[Sequence]) -> None:
        """Learn what the exits would have drafted, by one call of the head for the rows that wait."""
        waiting = [(seq, known) for seq in seqs if (known := self._known(seq)).hidden is not None]
        if not waiting or not self._drew and sum(len(known.hidden) for _, known in waiting) < LEAST_JUDGED:
            return
        waiting.sort(key=lambda pair: -len(pair[1].hidden))
        pieces, room = [], max(MAX_JUDGED // len(self._model.exits), MAX_WAITING)
        for seq, known in waiting:
            room -= len(known.hidden)
            if room < 0:
                break
            pieces.append((seq, known.start, known.hidden))
            known.hidden = None
        for (seq, start, hidden), by_exit in zip(pieces, self._model.judge(pieces)):
            drawn = seq.tokens[start + 1 : start + 1 + len(hidden)]
            for after, shadows in zip(self._model.exits, by_exit):
                self._learn(seq, after, [(token == right, sure) for (token, sure), right in zip(shadows, drawn)])

    def _learn(self, seq: Sequence, after: int, verdicts: list[tuple[bool, float]]) -> None:
        self._evidence(seq, after).add(verdicts)
        self._all[after].add(verdicts)

    def _known(self, seq: Sequence) -> _Known:
        return seq.state.setdefault(self.name, _Known())

    def _evidence(self, seq: Sequence, after: int) -> Evidence:
        """Evidence of a sequence for an exit; it starts from that of all sequences."""
        known = self._known(seq)
        if after not in known.exits:
            known.exits[after] = self._all.setdefault(after, Evidence(*START)).worth(BEGIN)
        return known.exits[after]

    # ---------------------------------------------------------------------------------------------------------- choose

    def _choose(self, seqs: list[Sequence]) -> tuple[int, int]:
        """Return the exit of this step and the largest draft length; (0, 0) when no draft pays for its layers."""
        model = self._model
        if self.config.static:
            return model.exits[0], self.config.static
        layers, head = model.num_layers, model.head_layers
        # Without shadow tokens only drafts teach anything, so drafting goes on whatever it gains.
        best, most = (0, 0), len(seqs) / (layers + head) if self.hidden_layers else 0.0
        for after in model.exits:
            shares = [self._evidence(seq, after).share for seq in seqs]
            right, tokens = [1.0] * len(seqs), float(len(seqs))
            for depth in range(1, self.config.max_depth + 1):
                right = [r * a for r, a in zip(right, shares)]
                tokens += sum(right)
                rate = tokens / (depth * (after + head) + layers + 2 * head)
                if rate > most:
                    best, most = (after, depth), rate
        return best
