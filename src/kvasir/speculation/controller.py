"""How much to draft: the slots a step, their owners, and whether to draft at all, by goodput (arXiv 2406.14066).

    goodput(N) = (sequences + expected accepted tokens of the best N nodes) / time of a step of sequences + N rows

What a node is worth is its *survival*, the product of its ancestors' hazards and its own; a hazard is the chance of a node to
be right when its parent was. It is learnt by depth and by the drafter's own estimate, which is the prior. Step times come
from the engine's model, which learns them while serving, plain steps and drafted ones apart: so the drafting itself, and the overlap and the CUDA
graphs that a drafted step does without, are part of the price.

Zero is an answer: then no drafter runs and the engine does what it does without one. It is asked again after a pause that
doubles with every trial that did not pay. Any rule is lossless here, since the verifying draw does not look at the draft.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

from kvasir.speculation.tree import DraftTree

EST_EDGES = (0.05, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9)  # of the bins of the drafter's estimate
DEPTHS = 8  # bins of depth; the last one is for all that are deeper
PRIOR_WEIGHT = 4.0  # observations that the drafter's own estimate counts for
FORGETTING = 0.99  # of a bin's evidence, an observation
DECAY = 0.9  # of the running means of drafted steps
MIN_GAIN = 1.02  # below this drafting is not worth it
TRIAL_STEPS = 4  # drafted steps in a trial
TRIAL_NODES = 4  # a sequence, whatever they are believed to be worth: else what is believed bad is never seen again
MIN_PAUSE, MAX_PAUSE = 16, 1024  # plain steps between trials

# (sequences that decode, their context tokens, draft rows, drafted step or plain) -> seconds
StepSeconds = Callable[[int, int, int, bool], float]


class Survival:
    """Hazards by depth and by the drafter's estimate: [right, tried] with forgetting."""

    def __init__(self) -> None:
        self._bins: dict[tuple[int, int], list[float]] = {}

    def hazard(self, depth: int, est: float) -> float:
        right, tried = self._bins.get(_bin(depth, est), (0.0, 0.0))
        return min(1.0, (right + PRIOR_WEIGHT * est) / (tried + PRIOR_WEIGHT))

    def observe(self, depth: int, est: float, right: bool) -> None:
        entry = self._bins.setdefault(_bin(depth, est), [0.0, 0.0])
        entry[0] = FORGETTING * entry[0] + right
        entry[1] = FORGETTING * entry[1] + 1.0

    def of(self, tree: DraftTree) -> list[float]:
        """By node: the chance that it is reached and right."""
        survival: list[float] = []
        for parent, depth, est in zip(tree.parents, tree.depths, tree.est):
            survival.append(self.hazard(depth, est) * (survival[parent] if parent >= 0 else 1.0))
        return survival


def _bin(depth: int, est: float) -> tuple[int, int]:
    return min(depth, DEPTHS - 1), bisect_left(EST_EDGES, est)


@dataclass(slots=True)
class Means:
    """Running means of drafted steps, a sequence: accepted tokens and slots."""

    accepted: float = 0.0
    slots: float = 0.0
    known: bool = False

    def add(self, accepted: float, slots: float) -> None:
        keep = DECAY if self.known else 0.0
        self.accepted = keep * self.accepted + (1 - keep) * accepted
        self.slots = keep * self.slots + (1 - keep) * slots
        self.known = True


@dataclass(slots=True)
class DraftStats:
    """Counters since the start. ``by_depth``: [tried, accepted] nodes, where a node is tried when its parent was accepted."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0  # tokens of sequences with a draft, the model's own included
    verified: int = 0  # sequences times steps in which they had a draft
    by_depth: list[list[int]] = field(default_factory=list)


class Controller:
    """``fixed``: no control, every proposal is verified whole (for measurements and tests)."""

    def __init__(self, seconds: StepSeconds, *, fixed: bool = False) -> None:
        self._seconds = seconds
        self._fixed = fixed
        self.survival = Survival()
        self.stats = DraftStats()
        self._means: dict[int, Means] = {}  # by the bits of the number of sequences
        self._trial = 0  # steps left of the trial that runs
        self._pause = MIN_PAUSE
        self._rest = 0 if fixed else MIN_PAUSE  # plain steps until the next trial; the first ones show what a plain step costs
        self._accepted = self._slots = 0  # of the step being observed

    # ---------------------------------------------------------------------------------------------------------- decide

    def resting(self) -> bool:
        """Once a step: whether drafting is out of the question in this one."""
        if self._rest:
            self._rest -= 1
            if not self._rest:
                self._trial = TRIAL_STEPS
            return True
        return False

    @property
    def rest_left(self) -> int:
        """Plain steps until drafting is tried again; 0: it is not resting."""
        return self._rest

    def wanted(self, num_seqs: int, context: int) -> bool:
        """Whether to draft in the next step, for ``num_seqs`` decodes with ``context`` tokens before them in all."""
        if not num_seqs:
            return False
        if self._fixed:
            return True
        if self._trial:
            self._trial -= 1
            return True
        if self._gain(num_seqs, context) >= MIN_GAIN:
            self._pause = MIN_PAUSE
            return True
        self._rest, self._pause = self._pause, min(2 * self._pause, MAX_PAUSE)
        return False

    def _gain(self, num_seqs: int, context: int) -> float:
        """Tokens a second with drafts over those without, by what drafted steps of about as many sequences gave."""
        means = self._means.get(num_seqs.bit_length())
        if means is None:
            return MIN_GAIN
        if means.accepted < MIN_GAIN - 1.0:
            return 0.0
        drafted = self._seconds(num_seqs, context, round(means.slots * num_seqs), True)
        return (1.0 + means.accepted) * self._seconds(num_seqs, context, 0, False) / drafted

    def allocate(self, trees: list[DraftTree], context: int, budget: int) -> list[DraftTree]:
        """Cut the trees of all sequences that decode to the slots that give the most tokens a second, ``budget`` at most."""
        if self._fixed or self._trial:
            most = max(1, budget // max(1, len(trees))) if self._fixed else min(TRIAL_NODES, budget // max(1, len(trees)))
            return [tree if len(tree) <= most else tree.keep(range(most)) for tree in trees]
        ranked = [(-s, i, node) for i, tree in enumerate(trees) for node, s in enumerate(self.survival.of(tree))]
        ranked.sort()  # stable in the node: a parent is never worth less than its child, and stands first where they tie
        count = len(trees)
        best, best_goodput, expected = 0, count / self._seconds(count, context, 0, True), float(count)
        for n, (survival, _, _) in enumerate(ranked[:budget], 1):
            expected -= survival
            goodput = expected / self._seconds(count, context, n, True)
            if goodput > best_goodput:
                best, best_goodput = n, goodput
        chosen: list[list[int]] = [[] for _ in trees]
        for _, i, node in ranked[:best]:
            chosen[i].append(node)
        return [tree if len(nodes) == len(tree) else tree.keep(nodes) for tree, nodes in zip(trees, chosen)]

    # ----------------------------------------------------------------------------------------------------------- learn

    def observe(self, tree: DraftTree, path: list[int]) -> None:
        """One verified tree: every child of a node on the path was tried, those on the path were right."""
        stats, reached, right = self.stats, {-1, *path}, set(path)
        tried: set[int] = set()
        for node, (parent, depth) in enumerate(zip(tree.parents, tree.depths)):
            if parent not in reached:
                continue
            self.survival.observe(depth, tree.est[node], node in right)
            while len(stats.by_depth) <= depth:
                stats.by_depth.append([0, 0])
            if depth not in tried:
                stats.by_depth[depth][0] += 1
                tried.add(depth)
            stats.by_depth[depth][1] += node in right
        stats.drafted += len(tree)
        stats.accepted += len(path)
        stats.emitted += len(path) + 1
        stats.verified += 1
        self._accepted += len(path)
        self._slots += len(tree)

    def end_step(self, num_seqs: int) -> None:
        """A drafted step of ``num_seqs`` decodes was committed."""
        self.stats.steps += 1
        if num_seqs:
            means = self._means.setdefault(num_seqs.bit_length(), Means())
            means.add(self._accepted / num_seqs, self._slots / num_seqs)
        self._accepted = self._slots = 0
