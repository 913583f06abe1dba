"""One branch of a request as the engine runs it. Needs no torch."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal

from kvasir.types.request import Request

FinishReason = Literal["stop", "length", "cancelled", "error"]
# Bits of a row's variant that hold the slot of its adapter. Those above hold the slot of its set of hooks.
HOOK_SHIFT = 16
# Chains of guests (``Span``) by node of a draft; -1: the last known token.
Guests = dict[int, tuple[tuple[int, ...], ...]]


NEVER = 1 << 62  # a position that no sequence reaches


def branch_stream(parent: int, branch: int) -> int:
    """The noise stream of branch ``branch`` > 0 forked from stream ``parent``: a hash, so that streams never meet."""
    path = parent.to_bytes(8, "little") + branch.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(path, digest_size=8, person=b"kvasir-branch").digest(), "little")


class Status(enum.Enum):
    WAITING = "waiting"  # in the queue, holds no pages
    BLOCKED = "blocked"  # waits for something outside the scheduler, and holds up nobody
    RUNNING = "running"  # holds pages and a seat
    FINISHED = "finished"  # holds nothing


@dataclass(slots=True)
class Forgetting:
    """When a KV policy forgets tokens of a sequence. No span crosses position ``due``; when the tokens before it are
    computed, some are forgotten, and the next position is known.

    ``first_due``: where a sequence that starts again comes to. ``own_from``: the first position that it must compute
    itself, whatever the cache holds. ``whole_from``: the rest of the prompt from here on is computed in one span.
    ``drafts``: whether its spans may verify drafts. ``most``: tokens that are in the cache at once, at most.
    ``stack``: its policies (`kvasir.kv.policy`).
    ``since``: the positions computed, and the tokens that were left of them, when it forgot last. ``notes``: what the
    policies keep of it. ``seen``: by layer, the first row that was not watched yet."""

    first_due: int
    own_from: int
    whole_from: int
    drafts: bool
    most: int
    stack: Any
    due: int = 0
    since: tuple[int, int] = (0, 0)
    notes: dict[int, Any] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Nothing of the sequence is computed any more."""
        self.due, self.since, self.notes, self.seen = self.first_due, (0, 0), {}, {}


class Sequence:
    """One branch of a request as the engine runs it. Everything here can be rebuilt from the request.

    A token's *position* is its index in ``tokens``. Its *place* is where the cache keeps it, counted from the first
    slot of the sequence's pages. Both are the same until something is forgotten (``forgotten``).

    Invariants: ``num_computed <= len(tokens)``. RUNNING holds a seat. FINISHED and WAITING hold no page or seat.
    """

    # fmt: off
    __slots__ = (
        "request", "branch", "stream", "tokens", "num_prompt", "num_computed", "num_ahead", "num_drawn", "draft",
        "draft_parents", "num_forced", "guests", "tables", "num_sent", "page_keys", "seat", "open_seat", "stop_ids",
        "max_output", "status", "blocked_until", "num_cached", "num_preempted", "num_skipped", "parent",
        "finish_reason", "state", "first_scheduled", "variant", "hook", "guest_variant", "pools",
        "found", "num_returns", "forgotten", "forgetting",
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
        self.tables: list[list[int]] = []  # page ids by cache group; entry i holds places [i*P, (i+1)*P); 0: dropped
        self.forgotten: tuple[int, ...] = ()  # by cache group: tokens that were forgotten; () while there are none
        self.forgetting: Forgetting | None = None  # None: nothing is ever forgotten
        self.num_sent = 0  # leading entries of each table that the device has a copy of (forgetful: see DeviceSeats)
        self.page_keys: list[bytes] = []  # prefix keys of the full pages of ``tokens``, filled by the prefix index
        self.found: tuple[int, Any] = (0, None)  # what the prefix index found last time: (its epoch, a node)
        self.num_returns = 0  # how often the conversation that it goes on with had come back before, and with it
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

    def place(self, group: int, position: int) -> int:
        """The place of a position that is not forgotten and behind all that are, in the pages of a cache group."""
        return position - self.forgotten[group] if self.forgotten else position

    def most_places(self, group: int, num_tokens: int) -> int:
        """The most places that a cache group needs until so many tokens are computed."""
        places = self.place(group, num_tokens)
        return places if self.forgetting is None else min(places, self.forgetting.most)

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
