"""First m of n: requests of which only the first m branches count (``SamplingParams.finish_after``).

Branches are ordered by their number of tokens, then by branch number, never by time: a branch that waited longer may
still be shorter. A running branch is beaten only once its next token would put it behind the m-th, and it is cancelled
in the step that shows this. Only branches that ended by themselves ("stop") count.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvasir.engine.part import LiveRequests, Part
from kvasir.types import FinishReason, Plan, Sequence


class Groups(Part):
    """Ends of branches, by request, for requests with ``finish_after``. ``eos_ids``: tokens that end a text."""

    def __init__(self, eos_ids: frozenset[int] = frozenset()) -> None:
        self._eos_ids = eos_ids
        self._ends: dict[str, list[tuple[int, int]]] = {}  # (tokens, branch) of the branches that count
        self._decided: dict[str, tuple[int, int]] = {}  # the m-th of these, once there are m

    def ended(self, seq: Sequence, reason: FinishReason) -> None:
        """Count a branch that has ended by itself."""
        if reason == "stop":
            self._add(seq)

    def replayed(self, seq: Sequence) -> None:
        """Count a branch that ended before the engine was restarted. Its last token tells whether it counts."""
        ends = seq.stop_ids if seq.request.params.ignore_eos else seq.stop_ids | self._eos_ids
        if seq.output and seq.output[-1] in ends:
            self._add(seq)

    def _add(self, seq: Sequence) -> None:
        m = seq.request.params.finish_after
        if m is None:
            return
        ends = self._ends.setdefault(seq.request.id, [])
        ends.append((seq.num_output, seq.branch))
        if len(ends) >= m:
            self._decided[seq.request.id] = sorted(ends)[m - 1]

    def completed(self, plan: Plan, requests: LiveRequests) -> None:
        """Cancel the branches that can no longer be among the first."""
        for request_id in self.decided() if self._decided else ():
            for seq in self.beaten(requests.branches(request_id)):
                requests.finish(seq, "cancelled")

    def forgotten(self, request_id: str) -> None:
        self._ends.pop(request_id, None)
        self._decided.pop(request_id, None)

    def decided(self) -> list[str]:
        """Ids of requests with at least m counted branches, some of whose branches may still run."""
        return list(self._decided)

    def beaten(self, branches: Iterable[Sequence]) -> list[Sequence]:
        """The branches in ``branches``, unfinished ones of one request, that can no longer be among the first m."""
        branches = list(branches)
        last = self._decided[branches[0].request.id]
        return [seq for seq in branches if (seq.num_output + 1, seq.branch) > last]
