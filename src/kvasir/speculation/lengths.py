"""Length-aware budgets: whoever will run long drafts, whoever will not does without. DAS (arXiv 2511.13841, section 4).

A batch of rollouts ends with its longest members, so a token saved there is worth more than one saved elsewhere, and rows
are cheapest when few are left. How long a sequence will be is not known; how long those of its prompt were, and those of
all prompts, is. Its class is by the median length of those that were longer than it is now, so it rises as it outlives its
likes: *short* (up to the median of all) drafts nothing, *medium* (up to the 85th percentile) half, *long* in full. The paper
does not publish its bounds; these are ours.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict, deque

from kvasir.types import Sequence

OWN, ALL = 64, 2048  # lengths kept of one prompt, and of all
ENOUGH = 4  # of one prompt, to go by them
MAX_PROMPTS = 4096
MEDIUM, LONG = 0.5, 0.85  # quantiles


class Lengths:
    def __init__(self) -> None:
        self._own: OrderedDict[int, deque[int]] = OrderedDict()  # by prompt, the one seen last at the end
        self._order: deque[int] = deque()  # all, by time
        self._all: list[int] = []  # the same, sorted

    def ended(self, seq: Sequence) -> None:
        """A sequence ended with all its output."""
        length = seq.num_output
        self._own.setdefault(self._key(seq), deque(maxlen=OWN)).append(length)
        self._own.move_to_end(self._key(seq))
        if len(self._own) > MAX_PROMPTS:
            self._own.popitem(last=False)
        insort(self._all, length)
        self._order.append(length)
        if len(self._order) > ALL:
            del self._all[bisect_right(self._all, self._order.popleft()) - 1]

    def budget(self, seq: Sequence, most: int) -> int:
        """Nodes of at most ``most`` that it may draft."""
        if len(self._all) < ENOUGH:
            return most
        own = self._own.get(self._key(seq), ())
        expected = self._expected(sorted(own) if len(own) >= ENOUGH else self._all, seq.num_output)
        if expected is None or expected >= self._all[int(LONG * (len(self._all) - 1))]:
            return most
        return 0 if expected <= self._all[int(MEDIUM * (len(self._all) - 1))] else most // 2

    @staticmethod
    def _expected(lengths: list[int], so_far: int) -> int | None:
        """The median of those that were longer; None: it has outlived all."""
        longer = bisect_right(lengths, so_far)
        return lengths[(longer + len(lengths)) // 2] if longer < len(lengths) else None

    @staticmethod
    def _key(seq: Sequence) -> int:
        if "prompt_key" not in seq.state:
            seq.state["prompt_key"] = hash((seq.request.tenant, *seq.request.prompt_ids))
        return seq.state["prompt_key"]
