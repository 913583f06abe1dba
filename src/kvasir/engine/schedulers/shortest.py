"""Short prompts first, but nobody long after his time: by arrival, later by ``SECONDS`` for every token of the prompt.

Where prompts wait for rows, the mean wait is least when the shortest go first, and the long ones wait for ever. Here one of n tokens
lets pass what came within n x ``SECONDS`` behind it, and nothing later: shortest job first among those who came at about the same time.
"""

from __future__ import annotations

from collections import abc

from kvasir.engine.policy import SchedulerPolicy
from kvasir.types import Sequence

SECONDS = 1e-4  # some four times what a prompt token takes an 8B model on an H200


class Shortest(SchedulerPolicy):
    def order_waiting(self, seqs: abc.Sequence[Sequence], now: float) -> list[Sequence]:
        return sorted(seqs, key=lambda seq: (seq.request.arrival + SECONDS * seq.num_prompt, seq.branch))
