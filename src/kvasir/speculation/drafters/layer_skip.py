"""The served model's own first layers run ahead, sharing weights and pages. Exact; pays for models trained to exit
early.

DEL (arXiv 2504.05598). *Shadow tokens*: a step that commits rows has the outputs of all exits for them; what the head
reads there is what each exit would have drafted behind the right tokens, whether it was the one that drafted or not. Of
every exit E and sequence two sums are kept, right and wrong ones, multiplied by OMEGA at every round: their share a of
right ones is the chance that a drafted token is right, here and now. Exit and length with the most tokens per layer
computed are

    TPL(E, d) = sum over the sequences of (1 - a^(d + 1)) / (1 - a)  /  (d (E + h) + L + 2 h),    TPL(0) = sequences /
    (L + h)

where L is the number of layers and h what the head costs, in layers (not counted in the paper): it is read for every
drafted token, by the model, and for the shadow tokens. Where no draft is best, none is made; the exits are still
judged, some rows at a time.

A draft may end before d, by the exit's own probability of its tokens: behind the first that is below the mean of what
right ones and wrong ones of this exit had on average, sums kept in the same way.

Otherwise than in the paper: sequences of a step share one exit and d, since they are one batch, whose draft costs what
the longest one does (the authors' code, for one sequence, ends drafts by their probability alone); a sequence begins
with what all others have shown, not with the end of its prompt, of which the last layer is not computed; with
temperature, a shadow token is drawn with the noise of its place, as drafts are.

An ordinary checkpoint's early layers predict little: this is for those trained with layer dropout and early-exit loss.

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

SHADOWS = True  # False: an exit is known by what was accepted of it, as where there are no hidden states
OMEGA = 0.95  # of the sums, a round
FORGOTTEN = 0.5  # observations, of right or of wrong ones: fewer say nothing
START = (2.0, 2.0, 1.5, 0.5)  # before anything was seen: right and wrong ones, and the sums of their probabilities
BEGIN = 4.0  # observations that a sequence begins with: what all others have shown
MAX_WAITING = 8  # rows of a sequence that wait to be judged: the last ones
MAX_JUDGED = 64  # rows of the head at once: the sequences with most rows waiting come first
LEAST_JUDGED = 8  # rows, where nothing is drafted


@dataclass(frozen=True, slots=True)
class Config:
    """``exits``: layers before an exit, as ``8+16+24``; default: a quarter, a half and three quarters of the
    model's."""

    exits: str = ""
    max_depth: int = 8


@dataclass(slots=True)
class Evidence:
    """Of one exit: rows at which it was right and wrong, and the sums of the probabilities that it gave its tokens
    there."""

    right: float
    wrong: float
    sure_right: float
    sure_wrong: float

    @property
    def share(self) -> float:
        """Of right ones."""
        return self.right / (self.right + self.wrong)

    @property
    def threshold(self) -> float:
        """Between what right ones had on average, and what wrong ones had. As in the paper, none (0) before there were
        both; and none when those of one kind are forgotten."""
        if min(self.right, self.wrong) < FORGOTTEN:
            return 0.0
        return (self.sure_right / self.right + self.sure_wrong / self.wrong) / 2

    def add(self, verdicts: Iterable[tuple[bool, float]]) -> None:
        """One round: whether each token was right, and its probability."""
        self.right, self.wrong, self.sure_right, self.sure_wrong = (
            OMEGA * s for s in (self.right, self.wrong, self.sure_right, self.sure_wrong)
        )
        for right, sure in verdicts:
            if right:
                self.right, self.sure_right = self.right + 1, self.sure_right + sure
            else:
                self.wrong, self.sure_wrong = self.wrong + 1, self.sure_wrong + sure

    def worth(self, observations: float) -> Evidence:
        """The same shares from so many observations."""
        k = observations / (self.right + self.wrong)
        return Evidence(k * self.right, k * self.wrong, k * self.sure_right, k * self.sure_wrong)


@dataclass(slots=True)
class _Known:
    """Of a sequence: its exits, and the rows that wait to be judged: hidden [R, X, E] from position ``start``. ``end``:
    rows before it were seen. ``drafted``: the exit of its last draft."""

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
        self._model: ExitModel | None = None
        self._all: dict[int, Evidence] = {}  # by exit: of all sequences
        self._drew = False

    def prepare(self, host: Host) -> None:
        self._model = host.exit_model(self._exits)

    def attach(self, model: ServedModel, capture: Capture | None = None) -> None:
        if SHADOWS:
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
            stops.append(self._evidence(ask.seq, after).threshold)
        return [DraftTree.chain(tokens, sure) for tokens, sure in self._model.draw(short, after, stops)]

    def observe(self, seq: Sequence, tree: DraftTree, path: list[int], hidden: Any = None) -> None:
        if hidden is not None:
            self.ingest(seq, hidden, seq.num_computed - len(hidden))
        elif tree.source == self.name:
            after = self._known(seq).drafted
            self._learn(seq, after, [(node in path, est) for node, est in zip(range(len(path) + 1), tree.est)])

    def ingest(self, seq: Sequence, hidden: Any, start: int) -> None:
        """Keeps the rows behind which the model has drawn, each once."""
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
        """What would the exits have drafted? One call of the head for the rows that wait."""
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
        """The sequence's own, which begins with what all have shown."""
        known = self._known(seq)
        if after not in known.exits:
            known.exits[after] = self._all.setdefault(after, Evidence(*START)).worth(BEGIN)
        return known.exits[after]

    # ---------------------------------------------------------------------------------------------------------- choose

    def _choose(self, seqs: list[Sequence]) -> tuple[int, int]:
        """The exit of this step and the most tokens of a draft; (0, 0): none is worth its layers."""
        model = self._model
        layers, head = model.num_layers, model.head_layers
        best, most = (
            (0, 0),
            len(seqs) / (layers + head) if self.hidden_layers else 0.0,
        )  # without shadows only drafts teach anything
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
