"""Length-aware draft budgets: sequences that will be long draft, short ones do not. DAS (arXiv 2511.13841, section 4).

A batch of rollouts ends with its longest members. A token saved there is worth more than one saved elsewhere, and rows
are cheapest when few sequences are left. The length of a running sequence is predicted from finished ones: the median
of those, of the same prompt or of all, that were longer than it is now. The prediction rises as the sequence grows. A
*short* sequence (up to the median of all) drafts nothing, a *medium* one (up to the 85th percentile) half, a *long* one
in full. The paper does not publish its bounds; these are ours. Its formula is in `kvasir.speculation.budgets`.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Sequence as Many

from kvasir.speculation.drafter import StepSeconds
from kvasir.types import Sequence

OWN, ALL = 64, 2048  # number of recent lengths kept for one prompt, and for all
ENOUGH = 4  # lengths of a prompt from which on they are used instead of those of all prompts
MAX_PROMPTS = 4096  # prompts remembered, the ones seen last
MEDIUM, LONG = 0.5, 0.85  # quantiles of all lengths where the medium and the long class begin


class Lengths:
    """Lengths of finished sequences, and the draft budgets that follow from them."""

    def __init__(self) -> None:
        self._own: OrderedDict[int, deque[int]] = OrderedDict()  # lengths by prompt; the prompt seen last is at the end
        self._order: deque[int] = deque()  # all lengths in order of arrival
        self._all: list[int] = []  # all lengths, sorted

    def ended(self, seq: Sequence) -> None:
        """Record the length of a sequence that ended by itself."""
        length = seq.num_output
        self._own.setdefault(self._key(seq), deque(maxlen=OWN)).append(length)
        self._own.move_to_end(self._key(seq))
        if len(self._own) > MAX_PROMPTS:
            self._own.popitem(last=False)
        insort(self._all, length)
        self._order.append(length)
        if len(self._order) > ALL:
            del self._all[bisect_right(self._all, self._order.popleft()) - 1]

    @property
    def known(self) -> bool:
        """Whether enough sequences have ended to predict the length of others."""
        return len(self._all) >= ENOUGH

    def verified(self, seq: Sequence, drafts: int, accepted: int) -> None:
        """Learn that ``accepted`` of the ``drafts`` of a sequence were right in a step. The classes need nothing."""

    def plan(self, seqs: Many[Sequence], seconds: StepSeconds) -> None:
        """Prepare the budgets of a step that decodes ``seqs``. The classes need nothing.

        ``seconds``: `kvasir.engine.drafts.draft_times.DraftTimes.predict`."""

    def left(self, seq: Sequence) -> int:
        """Predicted number of tokens to come, at least 1; as many again for one that has outlived all others."""
        expected = self._predicted(seq)
        return max(1, seq.num_output if expected is None else expected - seq.num_output)

    def budget(self, seq: Sequence, most: int) -> int:
        """Number of nodes, at most ``most``, that the sequence may draft."""
        if not self.known:
            return most
        expected = self._predicted(seq)
        if expected is None or expected >= self._all[int(LONG * (len(self._all) - 1))]:
            return most
        return 0 if expected <= self._all[int(MEDIUM * (len(self._all) - 1))] else most // 2

    def _predicted(self, seq: Sequence) -> int | None:
        own = self._own.get(self._key(seq), ())
        return self._expected(sorted(own) if len(own) >= ENOUGH else self._all, seq.num_output)

    @staticmethod
    def _expected(lengths: list[int], so_far: int) -> int | None:
        """Median of the lengths above ``so_far``; None when there are none."""
        longer = bisect_right(lengths, so_far)
        return lengths[(longer + len(lengths)) // 2] if longer < len(lengths) else None

    @staticmethod
    def _key(seq: Sequence) -> int:
        if "prompt_key" not in seq.state:
            seq.state["prompt_key"] = hash((seq.request.tenant, *seq.request.prompt_ids))
        return seq.state["prompt_key"]
