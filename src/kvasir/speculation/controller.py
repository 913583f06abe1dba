"""How much to draft: the slots a step, their owners, and whether to draft at all, by goodput (arXiv 2406.14066).

    goodput(N) = (sequences + expected accepted tokens of the best N nodes) / time of a step of sequences + N rows

What a node is worth is its *survival*, the product of its ancestors' hazards and its own; a hazard is the chance of a node to
be right when its parent was. It is learnt by drafter, by depth and by the drafter's own estimate, which is the prior. Step
times come from the engine, which measures them while serving, plain steps and drafted ones apart: so the drafting itself, and
the overlap that a drafted step does without, are part of the price.

Zero is an answer: then no drafter runs and the engine does what it does without one. Whether drafts would pay by now is asked
again in *trials* of a few steps and sequences, after pauses that double with every trial that did not pay. Trials and
errors are paid from an account: plain steps add one per cent of their time, drafted steps what they gained or lost against
plain ones. Where it is empty nothing is drafted, so whatever the estimates say, drafting cannot cost more than that per
cent and the credit at the start. Any rule is lossless here, since the verifying draw does not look at the draft.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from kvasir.speculation.tree import DraftTree

EST_EDGES = (0.05, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9)  # of the bins of the drafter's estimate
DEPTHS = 8  # bins of depth; the last one is for all that are deeper
PRIOR_WEIGHT = 4.0  # observations that the drafter's own estimate counts for
FORGETTING = 0.997  # of a bin's evidence, an observation
START_GAIN, MIN_GAIN = 1.04, 1.02  # drafting starts above the one, by what is predicted, and ends below the other
TRIAL_STEPS, MAX_TRIAL = 4, 16  # drafted steps in a trial that could be measured, and at most
TRIAL_NODES = 4  # a sequence, whatever they are believed to be worth: else what is believed bad is never seen again
TRIAL_SEQS = 8  # of those that decode: enough to learn from, and cheap in a large batch
AGAIN = 4  # steps until it is asked again whether a trial that is due has the device for itself
MIN_PAUSE, MAX_PAUSE = 16, 1024  # plain steps between trials
ALLOWANCE = 0.01  # of the time of plain steps goes into the account
CREDIT_STEPS = 8  # plain steps' time in the account at the start, and at most
OUTLIER = 4.0  # times its prediction: more of a step is not charged, it was something else
UNKNOWN = 1.0  # plain step that a drafted one is charged beside its own which compiled, say, and tells nothing of what it will cost
MARGIN = 2  # nodes that are proposed beyond the most that was worth verifying in the last step
REFRESH, REFRESH_STEPS = 512, 4  # after so many drafted steps in a row, plain ones to see what those cost by now
RECENT = 32  # proposals that show what the next ones will be like

# (sequences that decode, their context tokens, draft rows, drafted step or plain) -> seconds
StepSeconds = Callable[[int, int, int, bool], float]


class Survival:
    """Hazards by drafter, depth and the drafter's estimate: [right, tried] with forgetting. The prior of a depth is what was
    learnt of the depth before it, that of the first is the estimate: so a little tells much, and depths that were never
    verified are not believed to be what the drafter says."""

    def __init__(self) -> None:
        self._bins: dict[tuple[str, int, int], list[float]] = {}
        self._known: dict[tuple[str, int, float], float] = {}

    def hazard(self, source: str, depth: int, est: float) -> float:
        known = self._known.get((source, depth, est))
        if known is None:
            known, place = min(1.0, est), bisect_left(EST_EDGES, est)
            for above in range(min(depth, DEPTHS - 1) + 1):
                seen = self._bins.get((source, above, place))
                if seen is not None:
                    known = min(1.0, (seen[0] + PRIOR_WEIGHT * known) / (seen[1] + PRIOR_WEIGHT))
            self._known[source, depth, est] = known
        return known

    def observe(self, source: str, depth: int, est: float, right: bool) -> None:
        entry = self._bins.setdefault(_bin(source, depth, est), [0.0, 0.0])
        entry[0] = FORGETTING * entry[0] + right
        entry[1] = FORGETTING * entry[1] + 1.0
        self._known.clear()

    def of(self, tree: DraftTree) -> list[float]:
        """By node: the chance that it is reached and right."""
        survival: list[float] = []
        source = tree.source
        for parent, depth, est in zip(tree.parents, tree.depths, tree.est):
            survival.append(self.hazard(source, depth, est) * (survival[parent] if parent >= 0 else 1.0))
        return survival


def _bin(source: str, depth: int, est: float) -> tuple[str, int, int]:
    return source, min(depth, DEPTHS - 1), bisect_left(EST_EDGES, est)


def _trial_nodes(left: int) -> int:
    """A sequence, with so many steps of a trial left: few and many in turns, since two sizes of step show what a row costs."""
    return 1 if left % 2 else TRIAL_NODES


@dataclass(slots=True)
class DraftStats:
    """Counters since the start. ``by_depth``: [tried, accepted] nodes, where a node is tried when its parent was accepted."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0  # tokens of sequences with a draft, the model's own included
    verified: int = 0  # sequences times steps in which they had a draft
    by_depth: list[list[int]] = field(default_factory=list)
    by_source: dict[str, list[int]] = field(default_factory=dict)  # [drafted, accepted] by drafter


class Controller:
    """``fixed``: no control, every proposal is verified whole (for measurements and tests)."""

    def __init__(self, seconds: StepSeconds, *, fixed: bool = False) -> None:
        self._seconds = seconds
        self._fixed = fixed
        self.survival = Survival()
        self.stats = DraftStats()
        self._recent: deque[DraftTree] = deque(maxlen=RECENT)  # proposals, whole
        self._credit: float | None = None  # seconds; None: not opened yet
        self._trial = self._trial_left = 0  # steps left of the trial that runs: to be measured, and in all
        self._pause = MIN_PAUSE
        self._rest = 0 if fixed else MIN_PAUSE  # plain steps until drafts are thought of; the first ones show what a plain step costs
        self._due = True  # a trial, when the rest is over
        self._in_a_row = 0  # drafted steps
        self._drafted_last = False  # because it pays, not on trial
        self._accepted = 0  # of the step being observed
        self.most_nodes: int | None = None  # worth proposing for a sequence; None: all that there may be

    # ---------------------------------------------------------------------------------------------------------- decide

    @property
    def trying(self) -> bool:
        """Whether the step that is being planned belongs to a trial: it drafts for ``TRIAL_SEQS`` sequences only."""
        return self._trial > 0

    def resting(self) -> bool:
        """Once a step: whether drafting is out of the question in this one."""
        if self._rest:
            self._rest -= 1
            return True
        return False

    @property
    def rest_left(self) -> int:
        """Plain steps until drafting is tried again; 0: it is not resting."""
        return self._rest

    def wanted(self, num_seqs: int, context: int, alone: bool = True) -> bool:
        """Whether to draft in the next step, for ``num_seqs`` decodes with ``context`` tokens before them in all. ``alone``: no
        prompt is computed beside them; only then a trial tells anything."""
        if not num_seqs:
            return False
        if self._fixed:
            return True
        if self._trial:
            return alone
        plain = self._seconds(num_seqs, context, 0, False)
        self._credit = CREDIT_STEPS * plain if self._credit is None else min(self._credit, CREDIT_STEPS * plain)
        if self._credit >= 0 and self._gain(num_seqs, context, plain) >= (MIN_GAIN if self._drafted_last else START_GAIN):
            self._pause, self._due, self._drafted_last = MIN_PAUSE, False, True
            if self._in_a_row < REFRESH:
                return True
            self._in_a_row, self._rest = 0, REFRESH_STEPS - 1
            return False
        self._drafted_last, self.most_nodes = False, None
        if self._due:
            if not alone:
                self._rest = AGAIN
                return False
            self._trial, missing = self._affordable(num_seqs, context, plain)
            if self._trial:
                self._due, self._trial_left = False, MAX_TRIAL
                return True
            self._rest = min(MAX_PAUSE, 1 + int(missing / (ALLOWANCE * plain)))
            return False
        self._rest, self._pause, self._due, self._in_a_row = self._pause, min(2 * self._pause, MAX_PAUSE), True, 0
        return False

    def _affordable(self, num_seqs: int, context: int, plain: float) -> tuple[int, float]:
        """Steps of a trial that the account pays for even if nothing is right; and what it lacks for the first, if it does."""
        steps, left = 0, self._credit
        while steps < TRIAL_STEPS:
            nodes = _trial_nodes(steps + 1) * min(num_seqs, TRIAL_SEQS)
            left -= max(self._seconds(num_seqs, context, nodes, True) - plain, ALLOWANCE * plain)
            if left < 0:
                break
            steps += 1
        return steps, max(0.0, -left)

    def _gain(self, num_seqs: int, context: int, plain: float) -> float:
        """Tokens a second with drafts over those without, if the next proposals are like the recent ones: at the best number
        of nodes a sequence."""
        if not self._recent:
            return 0.0
        worth = [sorted(self.survival.of(tree), reverse=True) for tree in self._recent]
        best, tokens, slots = 0.0, 1.0, 0.0
        for rank in range(max(map(len, worth))):
            added = [survivals[rank] for survivals in worth if rank < len(survivals)]
            tokens, slots = tokens + sum(added) / len(worth), slots + len(added) / len(worth)
            if rank < 8 or rank % 8 == 7:
                best = max(best, tokens * plain / self._seconds(num_seqs, context, round(slots * num_seqs), True))
        return best

    def allocate(self, trees: list[DraftTree], context: int, budget: int, num_seqs: int | None = None, weights: Many[float] | None = None
                 ) -> list[DraftTree]:
        """Cut the trees to the slots that give the most tokens a second, ``budget`` at most. ``num_seqs``: sequences that
        decode in the step, if more than have a tree; ``weights``: what a token of each is worth (default: 1)."""
        if self._fixed or self._trial:
            self._recent.extend(trees[:RECENT])
            share = budget // max(1, len(trees))
            most = max(1, share) if self._fixed else min(_trial_nodes(self._trial), share)
            return [tree if len(tree) <= most else tree.keep(range(most)) for tree in trees]
        self._recent.extend(trees[::-(-len(trees) // RECENT)] if trees else ())
        worth = [1.0] * len(trees) if weights is None else weights
        ranked = [(-s * w, i, node) for i, (tree, w) in enumerate(zip(trees, worth)) for node, s in enumerate(self.survival.of(tree))]
        ranked.sort()  # a parent is never worth less than its child, and stands first where they tie
        count = len(trees) if num_seqs is None else num_seqs
        last = min(len(ranked), budget)
        best, best_goodput, expected = 0, count / self._seconds(count, context, 0, True), float(count)
        for n, (survival, _, _) in enumerate(ranked[:last], 1):
            expected -= survival
            if count + n > 16 and (count + n) % 8 and n < last:
                continue  # padded to the next edge in any case
            goodput = expected / self._seconds(count, context, n, True)
            if goodput > best_goodput:
                best, best_goodput = n, goodput
        chosen: list[list[int]] = [[] for _ in trees]
        for _, i, node in ranked[:best]:
            chosen[i].append(node)
        self.most_nodes = max(map(len, chosen), default=0) + MARGIN
        return [tree if len(nodes) == len(tree) else tree.keep(nodes) for tree, nodes in zip(trees, chosen)]

    # ----------------------------------------------------------------------------------------------------------- learn

    def observe(self, tree: DraftTree, path: list[int]) -> None:
        """One verified tree: every child of a node on the path was tried, those on the path were right."""
        stats, reached, right = self.stats, {-1, *path}, set(path)
        tried: set[int] = set()
        for node, (parent, depth) in enumerate(zip(tree.parents, tree.depths)):
            if parent not in reached:
                continue
            self.survival.observe(tree.source, depth, tree.est[node], node in right)
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
        counts = stats.by_source.setdefault(tree.source, [0, 0])
        counts[0] += len(tree)
        counts[1] += len(path)
        self._accepted += len(path)

    def end_step(self, num_seqs: int, context: int, num_drafts: int, seconds: float | None) -> None:
        """A drafted step of ``num_seqs`` decodes was committed; ``seconds``: what it took, if that tells anything."""
        self.stats.steps += 1
        self._in_a_row += 1
        accepted, self._accepted = self._accepted, 0
        if self._trial:
            self._trial_left -= 1
            self._trial = 0 if not self._trial_left else self._trial - (seconds is not None)
        if not num_seqs or self._credit is None:
            return
        plain = self._seconds(num_seqs, context, 0, False)
        if seconds is None:
            self._credit -= UNKNOWN * plain
            self._trial = 0 if self._credit < 0 else self._trial
            return
        took = min(seconds, OUTLIER * self._seconds(num_seqs, context, num_drafts, True))
        self._credit += (1.0 + accepted / num_seqs) * plain - took
        self._trial = 0 if self._credit < 0 else self._trial

    def rested(self, seconds: float, excess: float = 0.0) -> None:
        """A plain step took ``seconds``; ``excess`` of them because the step before it was drafted."""
        if self._credit is not None:
            self._credit += ALLOWANCE * seconds - excess
