"""How much to draft: the slots a step, their owners, and whether to draft at all, by goodput (arXiv 2406.14066).

    goodput(N) = (sequences + expected accepted tokens of the best N nodes) / time of a step of sequences + N rows

What a node is worth is its *survival*, the product of its ancestors' hazards and its own; a hazard is the chance of a node to
be right when its parent was. It is learnt by drafter, by depth and by the drafter's own estimate, which is the prior. Step
times come from the engine, which measures them while serving, plain steps and drafted ones apart: so the drafting itself, and
the overlap that a drafted step does without, are part of the price.

Zero is an answer: then no drafter runs and the engine does what it does without one. Nothing is searched for: as soon as it was
seen what is proposed and how a few proposals fare, the best number of nodes follows from the two tables, and drafting goes there at
once. A *trial*, a few steps with a few nodes for a few sequences, shows that much: at the start, and again after pauses that
double while it does not pay. Trials and errors are paid from an account: plain steps add a share of their time, drafted
steps what they gained or lost against plain ones. Where it is empty nothing is drafted, so whatever the estimates say,
drafting cannot cost more than that share and the credit at the start. One step takes no more out of it than some dozens of plain ones
do: a server that stood still for a second must not do without drafts for an hour. Any rule is lossless here, since the verifying draw
does not look at the draft.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from kvasir.speculation.forest import Forest, native
from kvasir.speculation.tree import DraftTree

EST_EDGES = (0.05, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9)  # of the bins of the drafter's estimate
DEPTHS, PLACES = (
    8,
    len(EST_EDGES) + 1,
)  # bins of depth, the last of which is for all that are deeper, and of the estimate
# Observations that the drafter's own estimate counts for, and what was learnt of the depth above: powers of two, so that a bin without
# evidence changes no bit.
EST_WEIGHT, ABOVE_WEIGHT = 2.0, 8.0
FORGETTING, FADING = 0.995, 0.5  # of a bin's evidence, an observation, and when drafts are tried again after a pause
START_GAIN, MIN_GAIN = 1.04, 1.02  # drafting starts above the one, by what is predicted, and ends below the other
TRIAL_STEPS = 4  # at most,
TRIAL_TRIED = (
    8  # and no more once so many proposals were seen and a step was measured, or one that was not measured came before
)
TRIAL_NODES = 4  # a sequence, whatever they are believed to be worth: else what is believed bad is never seen again
TRIAL_SEQS = 8  # of those that decode: enough to learn from, and cheap in a large batch
AGAIN = 4  # steps until it is asked again whether a trial that is due has the device for itself
MIN_PAUSE, MAX_PAUSE = (
    16,
    128,
)  # plain steps between trials, and at least as many as pay for two steps of one, unless drafting did
ALLOWANCE = 0.008  # of the time of plain steps goes into the account
CREDIT_STEPS, MAX_DEBT_STEPS = 1.5, 32.0  # plain steps' time in the account at the start, and that it may lack at most
MAX_ALLOWED_STEPS, MAX_CREDIT_STEPS = (
    2.0,
    4.0,
)  # and that it may hold, of plain steps' shares and of what drafting gained
MARGIN = 2  # nodes that are proposed beyond the most that was worth verifying in the last step
REFRESH, REFRESH_STEPS = 512, 4  # after so many drafted steps in a row, plain ones to see what those cost by now
RECENT = 32  # proposals that show what the next ones will be like
PACKED = 16  # trees from which on they are worth packing

# (sequences that decode, their context tokens, draft rows, drafted step or plain) -> seconds
StepSeconds = Callable[[int, int, int, bool], float]


class Survival:
    """Hazards by drafter, depth and the drafter's estimate: [right, tried] with forgetting. The prior of a depth is what was
    learnt of the depth before it, that of the first is the estimate: so a little tells much, and depths that were never
    verified are not believed to be what the drafter says."""

    def __init__(self) -> None:
        self._bins: dict[str, array] = {}
        self._known: dict[tuple[str, int, float], float] = {}

    def bins(self, source: str) -> array:
        """Of a drafter: [right, tried] by depth and place of the estimate. Who writes into it calls ``learnt``."""
        found = self._bins.get(source)
        if found is None:
            found = self._bins[source] = array("d", bytes(16 * DEPTHS * PLACES))
        return found

    def learnt(self) -> None:
        self._known.clear()

    def hazard(self, source: str, depth: int, est: float) -> float:
        known = self._known.get((source, depth, est))
        if known is None:
            bins, known, place = self.bins(source), min(1.0, est), bisect_left(EST_EDGES, est)
            for above in range(min(depth, DEPTHS - 1) + 1):
                at, weight = 2 * (above * PLACES + place), ABOVE_WEIGHT if above else EST_WEIGHT
                known = min(1.0, (bins[at] + weight * known) / (bins[at + 1] + weight))
            self._known[source, depth, est] = known
        return known

    def observe(self, source: str, depth: int, est: float, right: bool) -> None:
        bins, at = self.bins(source), 2 * (min(depth, DEPTHS - 1) * PLACES + bisect_left(EST_EDGES, est))
        bins[at] = FORGETTING * bins[at] + right
        bins[at + 1] = FORGETTING * bins[at + 1] + 1.0
        self.learnt()

    def fade(self) -> None:
        """Some time has passed: what was learnt is believed less."""
        for source, bins in self._bins.items():
            self._bins[source] = array("d", (FADING * number for number in bins))
        self.learnt()

    def of(self, tree: DraftTree) -> list[float]:
        """By node: the chance that it is reached and right."""
        survival: list[float] = []
        source = tree.source
        for parent, depth, est in zip(tree.parents, tree.depths, tree.est):
            survival.append(self.hazard(source, depth, est) * (survival[parent] if parent >= 0 else 1.0))
        return survival


def _within(tree: DraftTree, rows: int) -> DraftTree:
    """As many leading nodes as have room with their guests; where not even the anchor's have, as many of these as do."""
    if not tree.guests or tree.num_rows <= rows:
        return tree
    count, left = 0, rows - tree.num_guests(-1)
    while count < len(tree) and (left := left - 1 - tree.num_guests(count)) >= 0:
        count += 1
    kept = tree.keep(range(count))
    if kept.num_rows > rows:
        length = rows // len(tree.guests[-1])
        kept.guests = {-1: tuple(chain[:length] for chain in tree.guests[-1])} if length else {}
    return kept


@dataclass(slots=True)
class DraftStats:
    """Counters since the start. ``by_depth``: [tried, accepted] nodes, where a node is tried when its parent was accepted."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    verified: int = 0  # sequences times steps in which they had a draft
    by_depth: list[list[int]] = field(default_factory=list)
    by_source: dict[str, list[int]] = field(default_factory=dict)  # [drafted, accepted] by drafter
    by_source_depth: dict[str, list[list[int]]] = field(default_factory=dict)  # ``by_depth`` of each drafter

    def add_depths(self, source: str, counts: Many[Many[int]]) -> None:
        """``counts``: [tried, accepted] nodes of ``source`` by depth."""
        for totals in (self.by_depth, self.by_source_depth.setdefault(source, [])):
            totals += [[0, 0] for _ in counts[len(totals) :]]
            for total, (tried, right) in zip(totals, counts):
                total[0] += tried
                total[1] += right


class Controller:
    """``fixed``: no control, every proposal is verified whole (for measurements and tests). ``plain``: without native code."""

    def __init__(self, seconds: StepSeconds, *, fixed: bool = False, plain: bool = False) -> None:
        self._seconds = seconds
        self._fixed = fixed
        self._packs = not plain and native().library is not None
        self.survival = Survival()
        self.stats = DraftStats()
        self._recent: deque[DraftTree] = deque(maxlen=RECENT)  # proposals, whole
        self._credit: float | None = None  # seconds; None: not opened yet
        self._fresh = not fixed  # no step of decodes alone was left plain yet, which shows what one costs
        self._trial = 0  # steps left of the trial that runs
        self._tried = 0  # proposals that it saw
        self.trying = False  # whether the step that is being planned belongs to a trial: it drafts for ``TRIAL_SEQS`` sequences only
        self._pause = MIN_PAUSE
        self._rest = 0  # plain steps until drafts are thought of
        self._due = True  # a trial, when the rest is over
        self._in_a_row = 0  # drafted steps
        self._drafted_last = False  # because it pays, not on trial
        self._accepted = 0  # of the step being observed
        self.most_nodes: int | None = None  # worth proposing for a sequence; None: all that there may be

    # ---------------------------------------------------------------------------------------------------------- decide

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
        self.trying = False
        if not num_seqs or self._fixed:
            return bool(num_seqs)
        if self._fresh:
            self._fresh = not alone
            return False
        plain = self._seconds(num_seqs, context, 0, False)
        self._credit = CREDIT_STEPS * plain if self._credit is None else min(self._credit, MAX_CREDIT_STEPS * plain)
        if self._credit >= 0 and self._gain(num_seqs, context, plain) >= (
            MIN_GAIN if self._drafted_last else START_GAIN
        ):
            self._pause, self._due, self._trial, self._drafted_last = MIN_PAUSE, False, 0, True
            if self._in_a_row < REFRESH:
                return True
            self._in_a_row, self._rest = 0, REFRESH_STEPS - 1
            return False
        self._drafted_last, self.most_nodes = False, None
        # Of a step of a trial, even if nothing is right.
        cost = self._seconds(num_seqs, context, TRIAL_NODES * min(num_seqs, TRIAL_SEQS), True) - plain
        if not self._trial and not self._due:
            earned = max(0.0, self._credit - CREDIT_STEPS * plain)  # while drafting paid
            self._rest = min(MAX_PAUSE, max(self._pause, int((2 * cost - earned) / (ALLOWANCE * plain))))
            self._pause, self._due, self._in_a_row = min(2 * self._pause, MAX_PAUSE), True, 0
            return False
        if cost > self._credit:
            self._trial, self._due, self._rest = (
                0,
                True,
                min(MAX_PAUSE, 1 + int((cost - self._credit) / (ALLOWANCE * plain))),
            )
        elif not alone:
            self._rest = 0 if self._trial else AGAIN
        else:
            if not self._trial:
                self._trial, self._tried, self._due = TRIAL_STEPS, 0, False
                self.survival.fade()
            self.trying = True
        return self.trying

    def _gain(self, num_seqs: int, context: int, plain: float) -> float:
        """Tokens a second with drafts over those without, if the next proposals are like the recent ones: at the best number
        of nodes a sequence."""
        if not self._recent:
            return 0.0
        worth = [sorted(self.survival.of(tree), reverse=True) for tree in self._recent]
        spread = sum(tree.num_rows for tree in self._recent) / max(
            1, sum(map(len, self._recent))
        )  # rows a node, guests included
        best, tokens, slots = 0.0, 1.0, 0.0
        for rank in range(max(map(len, worth))):
            added = [survivals[rank] for survivals in worth if rank < len(survivals)]
            tokens, slots = tokens + sum(added) / len(worth), slots + len(added) / len(worth)
            if rank < 8 or rank % 8 == 7:
                best = max(
                    best, tokens * plain / self._seconds(num_seqs, context, round(spread * slots * num_seqs), True)
                )
        return best

    def allocate(
        self, trees: Many[DraftTree], context: int, budget: int, num_seqs: int | None = None
    ) -> Many[DraftTree]:
        """Cut the trees to the slots that give the most tokens a second, ``budget`` at most. ``num_seqs``: sequences that
        decode in the step, if more than have a tree."""
        if self._fixed or self.trying:
            if self.trying:
                self._recent.extend(trees[:RECENT])
            share = budget // max(1, len(trees))
            most = max(1, share) if self._fixed else min(TRIAL_NODES, share)
            if isinstance(trees, Forest) and trees.sizes.max(initial=0) <= most:
                return trees
            return [_within(tree if len(tree) <= most else tree.keep(range(most)), max(1, share)) for tree in trees]
        self._recent.extend(trees[:: -(-len(trees) // RECENT)] if trees else ())
        forest = Forest.of(trees) if self._packs and len(trees) >= PACKED else None
        if forest is not None:
            return self._cut(forest, context, budget, len(trees) if num_seqs is None else num_seqs)
        ranked = [(-s, i, node) for i, tree in enumerate(trees) for node, s in enumerate(self.survival.of(tree))]
        ranked.sort()  # a parent is never worth less than its child, and stands first where they tie
        count = len(trees) if num_seqs is None else num_seqs
        last = min(len(ranked), budget)
        rows = guests = sum(tree.num_guests(-1) for tree in trees if tree.guests)
        best, best_goodput, expected = 0, count / self._seconds(count, context, rows, True), float(count)
        for n, (survival, i, node) in enumerate(ranked[:last], 1):
            expected -= survival
            guests += trees[i].num_guests(node) if trees[i].guests else 0
            rows = n + guests
            if rows > budget:
                break
            if count + rows > 16 and (count + rows) % 8 and n < last:
                continue  # padded to the next edge in any case
            goodput = expected / self._seconds(count, context, rows, True)
            if goodput > best_goodput:
                best, best_goodput = n, goodput
        chosen: list[list[int]] = [[] for _ in trees]
        for _, i, node in ranked[:best]:
            chosen[i].append(node)
        self.most_nodes = max(map(len, chosen), default=0) + MARGIN
        trees = [tree if len(nodes) == len(tree) else tree.keep(nodes) for tree, nodes in zip(trees, chosen)]
        crowded = sum(tree.num_rows for tree in trees if tree.guests) > budget
        return [_within(tree, budget // len(trees)) for tree in trees] if crowded else trees

    def _cut(self, forest: Forest, context: int, budget: int, count: int) -> Forest:
        """The same of trees without guests, all at once."""
        order, expected = forest.rank(self.survival.bins(forest.source), float(count))
        last = min(len(order), budget)
        best, best_goodput = 0, count / self._seconds(count, context, 0, True)
        small = max(0, min(last, 16 - count))
        for n in (
            *range(1, small + 1),
            *range(small + 1 + -(count + small + 1) % 8, last, 8),
            *([last] if last > small else ()),
        ):
            goodput = expected[n] / self._seconds(count, context, n, True)
            if goodput > best_goodput:
                best, best_goodput = n, goodput
        kept = forest if best == len(order) else forest.keep(order, best)
        self.most_nodes = int(kept.sizes.max(initial=0)) + MARGIN
        return kept

    # ----------------------------------------------------------------------------------------------------------- learn

    def observe(self, tree: DraftTree, path: list[int]) -> None:
        """One verified tree: every child of a node on the path was tried, those on the path were right."""
        stats, reached, right = self.stats, {-1, *path}, set(path)
        depths: list[list[int]] = []
        for node, (parent, depth) in enumerate(zip(tree.parents, tree.depths)):
            if parent not in reached:
                continue
            self.survival.observe(tree.source, depth, tree.est[node], node in right)
            if depth == len(depths):
                depths.append([1, 0])
            depths[depth][1] += node in right
        stats.add_depths(tree.source, depths)
        stats.drafted += len(tree)
        stats.accepted += len(path)
        stats.verified += 1
        counts = stats.by_source.setdefault(tree.source, [0, 0])
        counts[0] += len(tree)
        counts[1] += len(path)
        self._accepted += len(path)
        self._tried += 1

    def observe_all(self, forest: Forest, which: list[int], paths: list[list[int]]) -> None:
        """The same of the trees ``which``, one after another; ``paths``: the row of the anchor and those of the right nodes, of each."""
        if not which:
            return
        bins, stats = self.survival.bins(forest.source), self.stats
        drafted, by_depth = forest.learn(which, paths, bins)
        self.survival.learnt()
        stats.add_depths(forest.source, by_depth)
        accepted = sum(map(len, paths)) - len(paths)
        counts = stats.by_source.setdefault(forest.source, [0, 0])
        counts[0] += drafted
        counts[1] += accepted
        stats.drafted += drafted
        stats.accepted += accepted
        stats.verified += len(paths)
        self._accepted += accepted
        self._tried += len(paths)

    def end_step(self, num_seqs: int, context: int, seconds: float, known: bool = True) -> None:
        """A drafted step of ``num_seqs`` decodes was committed, and is charged ``seconds``; ``known``: that tells what the next one of its
        size will take. ``num_seqs`` 0: it held more than decodes."""
        self.stats.steps += 1
        self._in_a_row += 1
        accepted, self._accepted = self._accepted, 0
        if self._trial:
            enough = self._tried >= TRIAL_TRIED and (known or self._trial < TRIAL_STEPS)
            self._trial = 0 if enough else self._trial - 1
        if not num_seqs or self._credit is None:
            return
        plain = self._seconds(num_seqs, context, 0, False)
        self._credit = max(self._credit + (1.0 + accepted / num_seqs) * plain - seconds, -MAX_DEBT_STEPS * plain)
        self._trial = 0 if self._credit < 0 else self._trial

    def rested(self, seconds: float, excess: float = 0.0) -> None:
        """A plain step took ``seconds``; ``excess`` of them because the step before it was drafted."""
        if self._credit is not None:
            self._credit += (ALLOWANCE * seconds if self._credit < MAX_ALLOWED_STEPS * seconds else 0.0) - excess
