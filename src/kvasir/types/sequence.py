"""One branch of a request as the engine runs it. Needs no torch."""

from __future__ import annotations

import enum
import hashlib
from typing import Any, Literal

from kvasir.types.request import Request

FinishReason = Literal["stop", "length", "cancelled", "error"]
# Bits of a row's variant that hold the slot of its adapter. Those above hold the slot of its set of hooks.
HOOK_SHIFT = 16
# Chains of guests (``Span``) by node of a draft; -1: the last known token.
Guests = dict[int, tuple[tuple[int, ...], ...]]


def branch_stream(parent: int, branch: int) -> int:
    """The noise stream of branch ``branch`` > 0 forked from stream ``parent``: a hash, so that streams never meet."""
    path = parent.to_bytes(8, "little") + branch.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(path, digest_size=8, person=b"kvasir-branch").digest(), "little")


class Status(enum.Enum):
    WAITING = "waiting"  # in the queue, holds no pages
    BLOCKED = "blocked"  # waits for something outside the scheduler, and holds up nobody
    RUNNING = "running"  # holds pages and a seat
    FINISHED = "finished"  # holds nothing


class Sequence:
    """One branch of a request as the engine runs it. Everything here can be rebuilt from the request.

    Invariants: ``num_computed <= len(tokens)``. RUNNING holds a seat. FINISHED and WAITING hold no page or seat.
    """

    # fmt: off
    __slots__ = (
        "request", "branch", "stream", "tokens", "num_prompt", "num_computed", "num_ahead", "num_drawn", "draft",
        "draft_parents", "num_forced", "guests", "tables", "num_sent", "page_keys", "seat", "open_seat", "stop_ids",
        "max_output", "status", "blocked_until", "num_cached", "num_preempted", "num_skipped", "parent",
        "finish_reason", "state", "first_scheduled", "variant", "hook", "guest_variant", "pools",
    )
    # fmt: on

    def __init__(self, request: Request, branch: int = 0) -> None:
        emitted = request.emitted[branch] if branch < len(request.emitted) else []
        self.request = request
        self.branch = branch
        self.stream = request.seed if branch == 0 else branch_stream(request.seed, branch)
        self.tokens: list[int] = [*request.prompt_ids, *emitted]  # the known tokens: prompt, then committed output
        self.num_prompt = len(request.prompt_ids)
        self.num_computed = 0  # committed positions, whose state is in the cache
        self.num_ahead = 0  # rows planned after those, in steps not resolved yet; the next span starts after them
        self.num_drawn = 0  # how many of these rows draw a token that will follow ``tokens``
        self.draft: list[int] = []  # tokens proposed for the positions after ``tokens``; the next span verifies them
        self.draft_parents: list[int] = []  # for a tree: index in ``draft`` of each parent (-1: the last known token)
        self.num_forced = 0  # leading tokens of ``draft`` that are forced: the row before each allows no other token
        self.guests: Guests = {}  # guests of the next span
        self.tables: list[list[int]] = []  # page ids by cache group; entry i holds positions [i*P, (i+1)*P); 0: dropped
        self.num_sent = 0  # leading entries of each table that the device has a copy of
        self.page_keys: list[bytes] = []  # prefix keys of the full pages of ``tokens``, filled by the prefix index
        self.seat = -1  # place in the per-sequence state of sampler and device; -1: none
        self.open_seat = -1  # the seat that has been set up for this sequence; -1: none
        self.stop_ids: frozenset[int] = frozenset(request.params.stop_token_ids)  # the engine adds the model's EOS ids
        self.max_output = request.max_tokens  # the engine bounds it by the context
        self.status = Status.WAITING
        self.blocked_until = 0.0
        self.num_cached = 0  # prompt tokens served from the prefix cache
        self.num_preempted = 0
        self.num_skipped = 0  # steps in which a later arrival was admitted past this one
        self.parent: Sequence | None = None  # fork source: this sequence starts from its prompt pages
        self.finish_reason: FinishReason | None = None
        self.state: dict[str, Any] = {}  # what techniques attach, by technique name (grammar matcher, drafter state)
        self.first_scheduled: float | None = None
        self.variant = 0  # slot of the resident adapter that computes its rows while it runs; 0: the base model
        self.hook = 0  # slot of the resident set of hooks that acts on its rows while it runs; 0: none
        self.guest_variant = 0  # slot of the one that computes the guests of the next span
        self.pools = request.pooling is not None  # wants one vector of its prompt, and draws nothing

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_unshared(self) -> int:
        """Known tokens that no parent computes: all of them, or for a fork the prompt's last and the output."""
        return len(self.tokens) if self.parent is None else len(self.tokens) - self.num_prompt + 1

    def drop_draft(self) -> None:
        """Forget the draft and the guests, so that the next span verifies nothing."""
        self.draft, self.draft_parents, self.num_forced = [], [], 0
        self.guests, self.guest_variant = {}, 0

    @property
    def variant_from(self) -> int:
        """The first position that the request's adapter computes."""
        variant = self.request.variant
        return 0 if variant is None else variant.start

    @property
    def hook_from(self) -> int:
        """The first position that the request's set of hooks acts on."""
        hook = self.request.hook
        return 0 if hook is None else hook.start

    def variant_at(self, position: int) -> int:
        """The resident variant of the row at ``position``, as `StepBatch.variants` has it."""
        adapter = self.variant if position >= self.variant_from else 0
        return adapter | (self.hook << HOOK_SHIFT if position >= self.hook_from else 0)

    def kv_variant(self, end: int) -> str:
        """The content keys of the adapter and the hooks that changed keys and values of positions before ``end``; "":
        none did."""
        return self.request.kv_variant(end)

    @property
    def num_guests(self) -> int:
        """Number of guest rows in the next span."""
        return sum(len(chain) for chains in self.guests.values() for chain in chains)

    @property
    def num_look_ahead(self) -> int:
        """Number of rows in the next span after that of the last known token: drafts and guests."""
        return len(self.draft) + (self.num_guests if self.guests else 0)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    def __repr__(self) -> str:
        return f"Sequence({self.request.id}/{self.branch}, {self.status.value}, {self.num_computed}/{len(self.tokens)})"
