"""Forgetting: between two steps, sequences that have come to a due position keep what their KV policy keeps.

The positions are known ahead (`kvasir.kv.policy`), and no span crosses them, so nothing of such a sequence is in flight
when its turn comes. The policy chooses on the device; the host knows how many tokens stay, and waits for nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from kvasir.engine.pages.forgotten import forget, to_keep
from kvasir.engine.pages.page_pool import pages_for
from kvasir.engine.pages.pages import PageManager
from kvasir.engine.part import LiveRequests, Part
from kvasir.engine.schedule.scheduler import Scheduler
from kvasir.engine.ways.runner import Runner
from kvasir.errors import ConfigError
from kvasir.kv.policy import KVPolicy, Memory, Stack
from kvasir.types import EngineStats, Request, Sequence, Span, SpanResult, Status


def stack_of(stack: Stack | None, request: Request, max_rows: int) -> Stack | None:
    """The policies that a request runs under; None: nothing is forgotten of it. ``max_rows``: rows of a step. Raises
    ConfigError for a ``kv_policy`` that asks for what there is not."""
    text = request.params.kv_policy
    if text is None or text == "off":
        return stack if text is None else None
    if stack is None:
        raise ConfigError(
            f"kv_policy={text}: this server forgets nothing. Start it with --kv-policy, or leave this out"
        )
    return stack.changed(text, max_rows)


class Forgetter(Part):
    """Runs a stack of KV policies. ``num_forgotten`` counts tokens since the start."""

    def __init__(self, stack: Stack, pages: PageManager, scheduler: Scheduler, runner: Runner) -> None:
        self._stack, self._pages, self._scheduler, self._runner = stack, pages, scheduler, runner
        self._due: list[Sequence] = []  # they have come to a due position
        self.num_forgotten = 0
        # Windows drop what leaves them anyway, and recurrent layers keep no tokens.
        self._groups = [pool.group for pool in pages.pools if pool.window is None]

    @classmethod
    def of(cls, stack: Stack | None, *parts: Any) -> Forgetter | None:
        """The part that runs this stack; None: there is nothing to run."""
        return None if stack is None else cls(stack, *parts)

    def queued(self, seq: Sequence) -> None:
        """Say when a new sequence forgets."""
        stack = stack_of(self._stack, seq.request, self._scheduler.max_rows)
        if stack is not None:
            seq.forgetting = stack.plan(seq.num_prompt, seq.num_prompt + seq.request.max_tokens - 1)

    def committed(self, span: Span, result: SpanResult, ends: bool) -> None:
        plan = span.seq.forgetting
        if plan is not None and not ends and span.seq.num_computed >= plan.due:
            assert span.seq.num_computed == plan.due, (span, "crosses a due position", plan.due)
            self._due.append(span.seq)

    def before_plan(self, requests: LiveRequests) -> None:
        due, self._due = self._due, []
        for seq in due:
            plan = seq.forgetting
            if seq.status is Status.RUNNING and seq.num_computed == plan.due and not self._forget(seq):
                requests.close_seat(seq)
                self._scheduler.room.restart(seq)  # others use its pages, and there are no free ones to move to

    def ended(self, seq: Sequence, reason: str) -> None:
        self._due = [other for other in self._due if other is not seq]

    def fill_stats(self, stats: EngineStats) -> None:
        stats.forgotten_tokens = self.num_forgotten

    @torch.inference_mode()
    def _forget(self, seq: Sequence) -> bool:
        """Forget what is due of a sequence. False: there was no room."""
        plan, pages = seq.forgetting, self._pages
        policy = plan.stack.at(seq.num_prompt, plan)
        length, before = plan.since
        count = before + seq.num_computed - length
        left = policy.left(seq.num_prompt, seq.num_computed, count)
        if left < count:
            for group, (lefts, kept) in self._kept(policy, seq, left).items():
                targets = to_keep(pages, seq, group, lefts)
                if targets is None:
                    return False
                for layer, places_GC in kept.items():
                    self._runner.pool.move_kept(layer, seq.tables[group], places_GC, targets)
                self.num_forgotten += seq.place(group, seq.num_computed) - lefts
                forget(pages, seq, group, lefts, targets, self._scheduler.in_flight())
            self._runner.seats.forgot(seq)
        plan.since = seq.num_computed, left
        plan.due = plan.stack.next_due(seq.num_prompt, *plan.since)
        return True

    def _kept(self, policy: KVPolicy, seq: Sequence, left: int) -> dict[int, tuple[int, dict[int, torch.Tensor]]]:
        """The number of tokens that stay in each group, and the places in each of its layers."""
        memories = [memory for group in self._groups for memory in self._memories(seq, group)]
        lefts = policy.allot(memories, left)
        found: dict[int, tuple[int, dict[int, torch.Tensor]]] = {}
        for memory, count in zip(memories, lefts):
            places = policy.keep(memory, count)
            assert places.shape[1] == count, f"{policy.name} keeps {places.shape[1]} tokens instead of {count}"
            known = found.setdefault(memory.cache.group, (count, {}))
            assert known[0] == count, "layers of a group keep the same number of tokens"
            known[1][memory.layer] = places
        return found

    def _memories(self, seq: Sequence, group: int) -> list[Memory]:
        count, pool = seq.place(group, seq.num_computed), self._runner.pool
        table = torch.tensor(seq.tables[group][: pages_for(count, self._pages.page_slots)], dtype=torch.int64)
        table = self._runner.parts.packer.send(table)
        facts = seq.num_prompt, seq.num_computed, seq.stream, seq.forgetting.notes
        return [Memory(layer, pool.layer(layer), table, count, *facts) for layer in pool.groups[group].layers]
