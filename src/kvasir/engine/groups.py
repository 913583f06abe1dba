"""First m of n: the branches of a request of which only the first m count (``SamplingParams.finish_after``).

First in tokens, then by number, never in time: a branch that waited longer may still be shorter. So a running branch is
beaten only when its next token would put it behind the m-th, and it is cancelled in the step that shows this. What
counts is a branch that ended by itself ("stop").
"""

from __future__ import annotations

from collections.abc import Iterable

from kvasir.types import Sequence


class Groups:
    """Ends of branches by request, for requests with ``finish_after``."""

    def __init__(self) -> None:
        self._ends: dict[str, list[tuple[int, int]]] = {}  # (tokens, branch) of those that count
        self._decided: dict[str, tuple[int, int]] = {}  # the m-th of them, once there are so many

    def ended(self, seq: Sequence) -> None:
        """Record that a branch has ended; ``finish_reason`` says how."""
        if seq.finish_reason == "stop":
            self._add(seq)

    def replayed(self, seq: Sequence, eos_ids: frozenset[int]) -> None:
        """Record a branch that ended before the engine was restarted; its last token tells how."""
        ends = seq.stop_ids if seq.request.params.ignore_eos else seq.stop_ids | eos_ids
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

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._ends.pop(request_id, None)
        self._decided.pop(request_id, None)

    def decided(self) -> list[str]:
        """Return requests whose first m are known. Branches of them may still run."""
        return list(self._decided)

    def beaten(self, branches: Iterable[Sequence]) -> list[Sequence]:
        """Return those of one request's unfinished branches that can no longer be among the first m."""
        branches = list(branches)
        last = self._decided[branches[0].request.id]
        return [seq for seq in branches if (seq.num_output + 1, seq.branch) > last]
