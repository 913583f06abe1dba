"""Decide how much to draft, for which sequences, and whether to draft at all, by goodput (arXiv 2406.14066).

    goodput(N) = (sequences + expected accepted tokens of the best N nodes) / time of a step of sequences + N rows

Guests (see ``Span``) are rows, too. They yield nothing in this step: a drafter says what they promise for the next one
(``DraftTree.promise``), which is worth as much times the chance that the walk ends where they stand.

The value of a node is its *survival*: the product of its own hazard and its ancestors'. A hazard is the chance that a
node is accepted when its parent was. Hazards are learnt by drafter, by depth and by the drafter's own estimate, which
is the prior. The engine measures step times while serving, plain and drafted steps apart. The price of drafting
therefore includes the drafter's own time and the lost overlap of a drafted step.

Zero nodes is a valid answer: then no drafter runs, and the engine works as it does without one. There is no search.
Once a few proposals have been verified, the two tables give the best number of nodes, and drafting goes there at once.
A *trial* collects this evidence: a few steps with a few nodes for a few sequences, at the start and again after pauses.
The pauses double while drafting does not pay.

An account pays for trials and errors. Plain steps add a share of their time; drafted steps add what they gained, or
subtract what they lost, compared with plain ones. Without credit nothing is drafted, so drafting never costs more than
that share plus the initial credit, however wrong the estimates are. A single step is charged at most a few dozen plain
steps: a server that stood still for a second must not go without drafts for an hour. Any decision is lossless
(outside exact mode up to ties), since the verifying draw does not look at the draft.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from kvasir.speculation.drafter import StepSeconds
from kvasir.speculation.forest import Forest, native
from kvasir.speculation.tree import DraftTree

EST_EDGES = (0.05, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9)  # edges between the bins of the drafter's estimate
DEPTHS, PLACES = 8, len(EST_EDGES) + 1  # number of bins of depth (the last holds all deeper nodes) and of the estimate
# Observations that the prior counts for: the drafter's estimate at the first depth, the depth above at the others. They
# are powers of two, so that a bin without evidence changes no bit.
EST_WEIGHT, ABOVE_WEIGHT = 2.0, 8.0
FORGETTING = 0.995  # factor on a bin's evidence at each observation
FADING = 0.5  # factor on all evidence when drafts are tried again after a pause
START_GAIN, MIN_GAIN = 1.04, 1.02  # predicted gain above which drafting starts, and below which it ends
TRIAL_STEPS = 4  # most steps of a trial
# Proposals after which a trial ends early, if a step was measured or an unmeasured one came before.
TRIAL_TRIED = 8
TRIAL_NODES = 4  # nodes a sequence in a trial, whatever their value: bad nodes would never be seen again otherwise
TRIAL_SEQS = 8  # sequences drafted for in a trial: enough to learn from, and cheap in a large batch
AGAIN = 4  # steps until a due trial checks again whether it would run without prompts in the step
# Plain steps between trials. The pause is also long enough to pay for two steps of a trial, unless drafting has paid
# for them.
MIN_PAUSE, MAX_PAUSE = 16, 128
ALLOWANCE = 0.008  # share of a plain step's time that goes into the account
CREDIT_STEPS, MAX_DEBT_STEPS = 1.5, 32.0  # initial credit and largest debt of the account, in plain steps
# Most credit from the shares of plain steps, and most credit in all, in plain steps.
MAX_ALLOWED_STEPS, MAX_CREDIT_STEPS = 2.0, 4.0
MARGIN = 2  # nodes proposed beyond the largest number that was worth verifying in the last step
REFRESH, REFRESH_STEPS = 512, 4  # after this many drafted steps in a row come this many plain ones, to time those again
RECENT = 32  # number of recent proposals that predict what the next ones are worth
PACKED = 16  # number of trees from which on packing them into a ``Forest`` pays


class Survival:
    """Hazards by drafter, depth and the drafter's estimate, from exponentially forgotten [accepted, tried] counts.

    The prior of a depth is the hazard learnt for the depth above it; the prior of the first is the drafter's estimate.
    So a few observations teach a lot, and depths that were never verified do not rely on the drafter's word."""

    def __init__(self) -> None:
        self._bins: dict[str, array] = {}
        self._known: dict[tuple[str, int, float], float] = {}

    def bins(self, source: str) -> array:
        """Counts of a drafter: [accepted, tried] by depth and estimate bin. Writers call ``learnt`` afterwards."""
        found = self._bins.get(source)
        if found is None:
            found = self._bins[source] = array("d", bytes(16 * DEPTHS * PLACES))
        return found

    def learnt(self) -> None:
        """Drop cached hazards, since counts have changed."""
        self._known.clear()

    def hazard(self, source: str, depth: int, est: float) -> float:
        """Chance that a node is accepted when its parent was."""
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
        """Halve the weight of all evidence, since time has passed."""
        for source, bins in self._bins.items():
            self._bins[source] = array("d", (FADING * number for number in bins))
        self.learnt()

    def of(self, tree: DraftTree) -> list[float]:
        """Survival of each node: the chance that it is reached and accepted."""
        survival: list[float] = []
        source = tree.source
        for parent, depth, est in zip(tree.parents, tree.depths, tree.est):
            survival.append(self.hazard(source, depth, est) * (survival[parent] if parent >= 0 else 1.0))
        return survival


def _within(tree: DraftTree, rows: int) -> DraftTree:
    """Cut a tree with guests to ``rows`` rows: the most leading nodes that fit with their guests. Where not even the
    anchor's guests fit, cut these."""
    if not tree.guests or tree.num_rows <= rows:
        return tree
    tail = tree.has_tail
    count, left = 0, rows - tree.num_guests(len(tree) - 1 if tail else -1)
    while count < len(tree) and (left := left - 1 - (0 if tail else tree.num_guests(count))) >= 0:
        count += 1
    kept = tree.keep(range(count))
    if kept.num_rows > rows:
        length = rows // len(kept.guests[-1])
        kept.guests = {-1: tuple(chain[:length] for chain in kept.guests[-1])} if length else {}
    return kept


def _kept(trees: Many[DraftTree], ranked: Many[tuple[float, int, int]]) -> list[DraftTree]:
    """The trees of these nodes (-survival, tree, node)."""
    chosen: list[list[int]] = [[] for _ in trees]
    for _, i, node in ranked:
        chosen[i].append(node)
    return [tree if len(nodes) == len(tree) else tree.keep(nodes) for tree, nodes in zip(trees, chosen)]


class _Promises:
    """Promises of the guests of a step's trees, and the rows they take, as nodes are kept one by one. The tail of a
    chain moves along with its last node kept. ``survival``: by tree, that of its nodes."""

    def __init__(self, trees: Many[DraftTree], survival: Many[Many[float]]) -> None:
        self._trees, self._survival = trees, survival
        self._tails = [tree.has_tail for tree in trees]
        self._last = [1.0] * len(trees)  # by tree with a tail: the chance that the walk ends at its last node kept
        self.rows, self.tokens = 0, 0.0
        for tree, tail in zip(trees, self._tails):
            if tree.guests:
                node = len(tree) - 1 if tail else -1
                self.rows += tree.num_guests(node)
                self.tokens += tree.promised(node)

    def keep(self, i: int, node: int) -> None:
        """Keep a node of tree ``i``, whose parent is kept."""
        tree = self._trees[i]
        if not tree.guests:
            return
        chance = self._survival[i][node]
        if self._tails[i]:
            self.tokens += (chance - self._last[i]) * tree.promised(len(tree) - 1)
            self._last[i] = chance
        else:
            self.rows += tree.num_guests(node)
            self.tokens += chance * (tree.promised(node) - tree.promised(tree.parents[node]))


def _ends(tree: DraftTree, survival: Many[float]) -> dict[int, float]:
    """Chance that the walk ends at a node, by node (-1: the anchor)."""
    ends = {-1: 1.0}
    for node, parent in enumerate(tree.parents):
        ends[node] = survival[node]
        ends[parent] -= survival[node]
    return ends


@dataclass(slots=True)
class DraftStats:
    """Counters since the start. ``by_depth``: [tried, accepted] nodes; a node is tried when its parent was accepted."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    verified: int = 0  # number of verified trees
    by_depth: list[list[int]] = field(default_factory=list)
    by_source: dict[str, list[int]] = field(default_factory=dict)  # [drafted, accepted] by drafter
    by_source_depth: dict[str, list[list[int]]] = field(default_factory=dict)  # ``by_depth`` of each drafter

    def add_depths(self, source: str, counts: Many[Many[int]]) -> None:
        """Add [tried, accepted] nodes of ``source`` by depth."""
        for totals in (self.by_depth, self.by_source_depth.setdefault(source, [])):
            totals += [[0, 0] for _ in counts[len(totals) :]]
            for total, (tried, right) in zip(totals, counts):
                total[0] += tried
                total[1] += right


class Controller:
    """Decides what each step drafts, and learns from what was accepted.

    ``fixed``: verify every proposal whole, for measurements and tests. ``plain``: run without native code."""

    def __init__(self, seconds: StepSeconds, *, fixed: bool = False, plain: bool = False) -> None:
        self._seconds = seconds
        self._fixed = fixed
        self._packs = not plain and native().library is not None
        self.survival = Survival()
        self.stats = DraftStats()
        self._recent: deque[DraftTree] = deque(maxlen=RECENT)  # recent proposals, before they were cut
        self._credit: float | None = None  # the account in seconds; None: not opened yet
        self._fresh = not fixed  # no plain step of decodes alone has been timed yet
        self._trial = 0  # steps left of the running trial
        self._tried = 0  # proposals that the running trial has seen verified
        self.trying = False  # whether the next step belongs to a trial, which drafts for ``TRIAL_SEQS`` sequences only
        self._pause = MIN_PAUSE
        self._rest = 0  # plain steps until drafting is considered again
        self._due = True  # whether a trial follows the rest
        self._in_a_row = 0  # drafted steps since the last plain one
        self._drafted_last = False  # whether the last decision was to draft because it pays
        self._accepted = 0  # accepted nodes of the step that is being observed
        self.gain: float | None = None  # the last predicted gain, see ``_gain``
        self.most_nodes: int | None = None  # most nodes worth proposing for a sequence; None: no limit

    # ---------------------------------------------------------------------------------------------------------- decide

    def could_pay(self, num_seqs: int, context: int) -> bool:
        """Whether drafts would pay for so many decodes if every one of them were accepted: whether a better drafter has
        anything to gain."""
        plain = self._seconds(num_seqs, context, 0, False)
        return any(
            (1 + nodes) * plain > START_GAIN * self._seconds(num_seqs, context, nodes * num_seqs, True)
            for nodes in range(1, TRIAL_NODES + 1)
        )

    def resting(self) -> bool:
        """Whether this step must be plain. Called once a step."""
        if self._rest:
            self._rest -= 1
            return True
        return False

    @property
    def pays(self) -> bool:
        """Whether drafts of the last decodes paid, so that those of the next ones are worth preparing."""
        return self._fixed or self._drafted_last and not self._rest

    @property
    def rest_left(self) -> int:
        """Number of plain steps until drafting is tried again; 0 when it is not resting."""
        return self._rest

    def wanted(self, num_seqs: int, context: int, alone: bool = True) -> bool:
        """Whether to draft in the next step, for ``num_seqs`` decodes with ``context`` tokens before them in total.

        ``alone``: the step computes no prompt; a trial is informative only then."""
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
        # The price of a trial step if nothing is accepted.
        cost = self._seconds(num_seqs, context, TRIAL_NODES * min(num_seqs, TRIAL_SEQS), True) - plain
        if not self._trial and not self._due:
            earned = max(0.0, self._credit - CREDIT_STEPS * plain)  # what drafting earned while it paid
            self._rest = min(MAX_PAUSE, max(self._pause, int((2 * cost - earned) / (ALLOWANCE * plain))))
            self._pause, self._due, self._in_a_row = min(2 * self._pause, MAX_PAUSE), True, 0
            return False
        # A trial goes on until something was verified: the first step of what drafts for itself has nothing to verify.
        if cost > self._credit and (self._tried or not self._trial):
            self._trial, self._due = 0, True
            self._rest = min(MAX_PAUSE, 1 + int((cost - self._credit) / (ALLOWANCE * plain)))
        elif not alone:
            self._rest = 0 if self._trial else AGAIN
        else:
            if not self._trial:
                self._trial, self._tried, self._due = TRIAL_STEPS, 0, False
                self.survival.fade()
            self.trying = True
        return self.trying

    def _gain(self, num_seqs: int, context: int, plain: float) -> float:
        """Predict tokens a second with drafts over tokens a second without, at the best number of nodes a sequence.

        Assumes that the next proposals are like the recent ones."""
        if not self._recent:
            return 0.0
        worth = [sorted(self.survival.of(tree), reverse=True) for tree in self._recent]
        num_nodes = max(1, sum(map(len, self._recent)))
        # Rows of tails, which stay however many nodes are kept, for each proposal; and rows a node, with its guests.
        in_tails = sum(tree.num_rows - len(tree) for tree in self._recent if tree.has_tail)
        spread = (sum(tree.num_rows for tree in self._recent) - in_tails) / num_nodes
        tail = in_tails / len(self._recent)
        best, tokens, slots = 0.0, 1.0, 0.0
        for rank in range(max(map(len, worth))):
            added = [survivals[rank] for survivals in worth if rank < len(survivals)]
            tokens, slots = tokens + sum(added) / len(worth), slots + len(added) / len(worth)
            if rank < 8 or rank % 8 == 7:
                drafted = self._seconds(num_seqs, context, round((tail + spread * slots) * num_seqs), True)
                best = max(best, tokens * plain / drafted)
        self.gain = best
        return best

    def allocate(
        self, trees: Many[DraftTree], context: int, budget: int, num_seqs: int | None = None
    ) -> Many[DraftTree]:
        """Cut the trees to the nodes that give the most tokens a second, in at most ``budget`` rows.

        ``num_seqs``: number of sequences that decode in the step, if it differs from the number of trees."""
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
        survival = [self.survival.of(tree) for tree in trees]
        ranked = [(-s, i, node) for i, chances in enumerate(survival) for node, s in enumerate(chances)]
        ranked.sort()  # a parent never survives less often than its child, and comes first in a tie
        count = len(trees) if num_seqs is None else num_seqs
        best, _ = self._best(ranked, _Promises(trees, survival), context, budget, count)
        kept = _kept(trees, ranked[:best])
        guested = [tree for tree in kept if tree.guests]
        if sum(tree.num_rows for tree in guested) > budget:
            kept = [_within(tree, budget // len(trees)) for tree in kept]
        elif guested and all(tree.promise for tree in guested):
            goodput = self._thin(guested, context, count, sum(map(len, kept)))
            bare, without = self._best(ranked, None, context, budget, count)
            if without > goodput:
                best, kept = bare, _kept(trees, ranked[:bare])
                for tree in kept:
                    tree.guests = {}
        self.most_nodes = max(map(len, kept), default=0) + MARGIN
        return kept

    def _best(
        self, ranked: list[tuple[float, int, int]], promises: _Promises | None, context: int, budget: int, count: int
    ) -> tuple[int, float]:
        """Return how many of the ranked nodes (-survival, tree, node) to verify, and the goodput of that; with their
        guests, or without any."""
        last, rows, promised = min(len(ranked), budget), 0, 0.0
        if promises is not None:
            rows, promised = promises.rows, promises.tokens
        best, expected = 0, float(count)
        best_goodput = (expected + promised) / self._seconds(count, context, rows, True)
        for n, (chance, i, node) in enumerate(ranked[:last], 1):
            expected -= chance
            rows = n
            if promises is not None:
                promises.keep(i, node)
                rows, promised = n + promises.rows, promises.tokens
            if rows > budget:
                break
            if count + rows > 16 and (count + rows) % 8 and n < last:
                continue  # the step is padded to the next multiple of 8 anyway
            goodput = (expected + promised) / self._seconds(count, context, rows, True)
            if goodput > best_goodput:
                best, best_goodput = n, goodput
        return best, best_goodput

    def _thin(self, trees: list[DraftTree], context: int, count: int, nodes: int) -> float:
        """Take away guests that cost more than they promise; return the goodput of the rest. The step has ``count``
        decodes and ``nodes`` nodes.

        Guests are ranked by what each adds to the next step. Where a node has several chains, one more guest is a row
        in each of them."""
        ranked: list[tuple[float, int, int, int]] = []  # -tokens, tree, place in the chain, node
        expected = float(count)
        for i, tree in enumerate(trees):
            survival = self.survival.of(tree)
            expected += sum(survival)
            for node, end in _ends(tree, survival).items():
                longest = max(map(len, tree.guests.get(node, ())), default=0)
                ranked += [(-end * gain, i, j, node) for j, gain in enumerate(tree.promise[:longest])]
        ranked.sort()
        rows, best, best_goodput = nodes, 0, expected / self._seconds(count, context, nodes, True)
        for n, (tokens, i, j, node) in enumerate(ranked, 1):
            expected -= tokens
            rows += sum(len(chain) > j for chain in trees[i].guests[node])
            if count + rows > 16 and (count + rows) % 8 and n < len(ranked):
                continue
            goodput = expected / self._seconds(count, context, rows, True)
            if goodput > best_goodput:
                best, best_goodput = n, goodput
        lengths: list[dict[int, int]] = [{} for _ in trees]
        for _, i, _, node in ranked[:best]:
            lengths[i][node] = lengths[i].get(node, 0) + 1
        for tree, kept in zip(trees, lengths):
            tree.guests = {
                node: tuple(chain[: kept[node]] for chain in chains)
                for node, chains in tree.guests.items()
                if node in kept
            }
        return best_goodput

    def _cut(self, forest: Forest, context: int, budget: int, count: int) -> Forest:
        """Cut trees without guests, as ``allocate`` does, in one native call."""
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
        """Learn from one verified tree: the children of nodes on the path were tried, the nodes on the path
        accepted."""
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
        self._tried += len(tree) > 0

    def observe_all(self, forest: Forest, which: list[int], paths: list[list[int]]) -> None:
        """Learn from the trees ``which`` of a forest. ``paths``: for each, the anchor's row and those of the accepted
        nodes."""
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
        self._tried += int((forest.sizes[which] > 0).sum())

    def end_step(self, num_seqs: int, context: int, seconds: float, known: bool = True) -> None:
        """Settle a committed drafted step of ``num_seqs`` decodes, which is charged ``seconds``.

        ``known``: the time predicts what the next step of this size takes. ``num_seqs`` 0: the step held more than
        decodes."""
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
        self._trial = 0 if self._credit < 0 and self._tried else self._trial

    def rested(self, seconds: float, excess: float = 0.0) -> None:
        """Settle a plain step of ``seconds``, of which ``excess`` came from the drafted step before it."""
        if self._credit is not None:
            self._credit += (ALLOWANCE * seconds if self._credit < MAX_ALLOWED_STEPS * seconds else 0.0) - excess
