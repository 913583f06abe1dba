"""Trained prompt tokens behind the verified rows: their outputs are the next guesses. Exact; needs no draft model.

PPD, parallel prompt decoding (arXiv 2405.18628): K embeddings stand behind a row as if they were tokens. The model's
output for number j guesses the token j + 2 places after that row. They are guest rows of the step
(`kvasir.types.Span`): no row of the text sees them, and only what they draw remains. Each candidate may carry prompt
tokens of its own, so the next guesses are there whichever path is accepted. The guesses of an ensemble are averaged.

The sparse tree is dynamic. ``rows`` rows are divided between candidates and prompt tokens so that they promise the most
tokens: candidates for this step, prompt tokens for the next one. A candidate carries as many prompt tokens as it is
likely to be the last accepted one. By default ``rows`` follows from the step times that the engine measures: the paper
is called hardware-aware for this. Where a step left no guess (the first step, after a pause, or where the last token's
row had no prompt tokens), the anchor's row carries all of them, and nothing is verified.

Legend: K prompt tokens, C members of an ensemble, E model dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch

from kvasir.errors import ConfigError
from kvasir.kernels.guess import MOST
from kvasir.speculation import heads
from kvasir.speculation.drafter import Ask, Capture, ServedModel, StepSeconds
from kvasir.speculation.self_drafter import SelfDrafter, merged
from kvasir.speculation.tree import DraftTree, products
from kvasir.types import Guess, Guessing

LEAST = 0.02  # tokens that a prompt token must promise to be worth a row
SIZES = 16  # number of candidate tree sizes that are tried
ROWS = 24  # rows of a sequence where step times are not known
CHOICES = (6, 8, 12, 16, 24, 32, 48, 64)  # rows of a sequence to choose from by step times
AGAIN, SAMPLED = 32, 4  # proposals until rows are chosen again, and trees that the choice looks at


@dataclass(frozen=True, slots=True)
class Config:
    """``model``: folder of trained prompt tokens (default: those in the package); ``width``: guesses of each prompt
    token; ``rows``: most rows of a sequence in a step, candidates and prompt tokens together, 0: those that promise
    the most tokens a second by the step times of this machine."""

    model: str = ""
    width: int = 4
    rows: int = 0


class PromptDrafter(SelfDrafter):
    topology = "tree"

    def attach(self, model: ServedModel, capture: Capture | None = None) -> None:
        self._head = heads.load_for("ppd", self.config.model, model)
        shape = self._head.shape
        if not torch.isfinite(self._head.weight).all():
            raise ConfigError(
                f"the prompt tokens of ppd:model={self.config.model} hold NaN or infinity. Train them again with "
                f"`kvasir train drafter ppd --target MODEL --out FOLDER`."
            )
        self._seconds: StepSeconds | None = None
        self._rows, self._until_choice = self.config.rows or max(ROWS, shape.depth * shape.ensemble), 0
        if 0 < self.config.rows < shape.depth * shape.ensemble or not 1 <= self.config.width <= MOST:
            raise ConfigError(
                f"ppd:rows={self.config.rows},width={self.config.width}: rows must be at least "
                f"{shape.depth * shape.ensemble}, for {shape.depth} prompt tokens of {shape.ensemble}, and "
                f"width from 1 to {MOST}"
            )
        self.guests = self._head.weight.detach().flatten(0, 1)
        self.guessing = Guessing(self.config.width)
        if shape.ensemble == 1:
            self.tail = tuple(range(shape.depth))
        self.learn_depths(shape.depth)

    def use_times(self, seconds: StepSeconds) -> None:
        if not self.config.rows:
            self._seconds = seconds

    @torch.inference_mode()
    def propose(self, asks: list[Ask]) -> list[DraftTree]:
        promise = self.promise()
        if self._seconds is not None:
            self._until_choice -= 1
            if self._until_choice < 0:
                self._choose(asks, promise, self._seconds)
        return [self._tree(self.guesses_of(ask.seq), ask, promise) for ask in asks]

    def _choose(self, asks: list[Ask], promise: tuple[float, ...], seconds: StepSeconds) -> None:
        """Choose the rows of a sequence that promise the most tokens a second, from trees of this step."""
        ensemble, depth = self._head.shape.ensemble, self._head.shape.depth
        wholes = [self._whole(guesses, ask) for ask in asks if (guesses := self.guesses_of(ask.seq))][:SAMPLED]
        if not wholes:
            return
        self._until_choice = AGAIN
        context, best = sum(len(ask.seq.tokens) for ask in asks), 0.0
        for rows in CHOICES:
            if rows < depth * ensemble:
                continue
            tokens = sum(1.0 + best_tree(whole, promise, rows, ensemble)[0] for whole in wholes) / len(wholes)
            rate = tokens / seconds(len(asks), context, rows * len(asks), True)
            if rate > best:
                best, self._rows = rate, rows

    def _whole(self, guesses: list[list[Guess]], ask: Ask) -> DraftTree:
        """The best tree of all candidates that may be proposed."""
        ensemble, width = self._head.shape.ensemble, self.config.width
        count = len(guesses) // ensemble  # chains are equally long, one for each member of an ensemble
        rows = [merged(guesses[j::count], width) for j in range(count)]
        rows = rows[: next((j for j, row in enumerate(rows) if not row), count)]
        ids, est = ([[pair[part] for pair in row] for row in rows] for part in (0, 1))
        return products(est, ids, ask.max_nodes, ask.max_depth)

    def _tree(self, guesses: list[list[Guess]], ask: Ask, promise: tuple[float, ...]) -> DraftTree:
        whole, ensemble, depth = self._whole(guesses, ask), self._head.shape.ensemble, len(promise)
        nodes, carried = dynamic_tree(whole, promise, self._rows, ensemble)
        whole.guests = {
            node: tuple(tuple(range(c * depth, c * depth + num)) for c in range(ensemble))
            for node, num in sorted(carried.items())
        }
        whole.promise = promise
        return whole.keep(range(nodes))

    def weights(self) -> Mapping[str, torch.Tensor]:
        """The prompt tokens, of which ``guests`` is a view."""
        return dict(self._head.named_parameters())


def dynamic_tree(tree: DraftTree, gains: Many[float], rows: int, ensemble: int) -> tuple[int, dict[int, int]]:
    """Return how many leading nodes of a best-first tree to verify, and how many prompt tokens each node carries."""
    return best_tree(tree, gains, rows, ensemble)[1:]


def best_tree(tree: DraftTree, gains: Many[float], rows: int, ensemble: int) -> tuple[float, int, dict[int, int]]:
    """Return the tokens that the best division of ``rows`` rows promises, and that division, as in `dynamic_tree`.

    The key -1 is the anchor; all fit into ``rows`` rows. The value of a node is its chance to be accepted. The value of
    a node's prompt token j is the chance that the walk ends at the node times ``gains[j]`` (falling), which is what it
    adds to the next step. A prompt token takes ``ensemble`` rows."""
    survival: list[float] = []
    for parent, est in zip(tree.parents, tree.est):
        survival.append(est * (survival[parent] if parent >= 0 else 1.0))
    best, found = -1.0, (0.0, 0, {})
    ends = {-1: 1.0}  # by node: the chance that the walk ends there, if the tree has only the nodes so far
    most = min(len(tree), rows)
    step = max(1, most // SIZES)
    for count in range(most + 1):
        if count:
            node = count - 1
            ends[node] = survival[node]
            ends[tree.parents[node]] -= survival[node]
        if count % step and count < most:
            continue
        worth = sorted(
            ((chance * gain, -node, -j) for node, chance in ends.items() for j, gain in enumerate(gains)), reverse=True
        )
        chosen = [entry for entry in worth[: (rows - count) // ensemble] if entry[0] >= LEAST]
        total = sum(survival[:count]) + sum(value for value, _, _ in chosen)
        if total > best:
            carried: dict[int, int] = {}
            for _, node, _ in chosen:
                carried[-node] = carried.get(-node, 0) + 1
            best, found = total, (total, count, carried)
    return found
