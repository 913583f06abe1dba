"""The nouns of the engine: requests, sequences, spans, plans, batches, events. Imports no sibling, needs no torch.

A *request* is what a user sent. It runs as one *sequence* per branch (``n`` > 1 forks). Every step the scheduler grants
each sequence a *span* of rows; a list of spans is a *plan*, and a plan packed into tensors is a *StepBatch*. There are
no phases: a prompt chunk, a decode step and a draft to verify are spans of different lengths.

Shape suffixes: T rows, S sequences (spans of this step), M rows whose logits are wanted, N pages.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch

Want = Literal["sample", "score"]
Commit = Literal["all", "walk"]
FinishReason = Literal["stop", "length", "cancelled", "error"]
U64 = (1 << 64) - 1


def branch_stream(parent: int, branch: int) -> int:
    """The noise stream of branch ``branch`` > 0 forked from stream ``parent``: a hash, so that streams never meet."""
    path = parent.to_bytes(8, "little") + branch.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(path, digest_size=8, person=b"kvasir-branch").digest(), "little")


# ---------------------------------------------------------------------------------------------------------- requests


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the output.

    ``text``: the JSON schema, regex or Lark grammar, or a JSON list of choices.
    ``after``: token ids of the end-of-reasoning mark; if not empty, the grammar starts once they have been generated.
    """

    kind: Literal["json_schema", "json_object", "regex", "choice", "lark"]
    text: str = ""
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters: the OpenAI and vLLM parameters by their usual names. Ranges are checked once, at admission.

    ``max_tokens=None`` means "up to the context length". ``temperature=0`` is greedy (lowest id wins a tie).
    ``seed=None`` draws a new stream. ``logprobs``: number of alternatives to report in addition to the sampled token.
    ``logprobs_mode``: ``raw`` (the model's distribution) or ``processed`` (after the whole pipeline).
    ``num_draft_tokens``: most tokens to draft a step (0: none). ``drafter``: the drafter to use, where several run.
    Neither changes a token in exact mode; elsewhere a tie may end differently.
    ``confidence`` k > 0: report, with every log-probability, the mean negative log-probability of the k likeliest
    tokens (Fu et al. 2025, DeepConf).
    ``score_from``: score the prompt's tokens from this position on and return them summed up as one `PromptScore`.
    ``confidence_window``: width of its windows in tokens (0: no window). ``finish_after`` m: only the first m branches
    to stop by themselves count, by tokens and not by time; a branch that can no longer be among them is cancelled.
    ``lease``: seconds to keep the pages of an ended branch for a request that goes on from it, unless others need them.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: Literal["raw", "processed"] = "raw"
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    grammar: Grammar | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    num_draft_tokens: int | None = None
    confidence: int = 0
    confidence_window: int = 0
    finish_after: int | None = None
    lease: float = 0.0
    score_from: int | None = None
    drafter: str | None = None

    def __post_init__(self) -> None:
        # As in vLLM, callers may pass lists and single strings; they are stored as tuples.
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            value = getattr(self, name)
            if not (value is None or isinstance(value, Iterable)):
                raise TypeError(f"{name} is {value!r}, expected a list")
            if value is not None or name != "allowed_token_ids":
                value = (value,) if isinstance(value, str) and value else tuple(value or ())
                object.__setattr__(self, name, value)
        if not isinstance(self.logit_bias or {}, Mapping):
            raise TypeError(f"logit_bias is {self.logit_bias!r}, expected token ids with their biases")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias or {}))


@dataclass(slots=True, kw_only=True)
class Request:
    """The durable state of one request. The engine can rebuild everything else from it, on any machine, at any time.

    ``seed``: the u64 noise stream of branch 0. ``max_tokens``: resolved against the context length. ``tenant``: salt of
    the prefix key, from the authenticated identity. ``arrival``: ``time.monotonic()`` seconds. ``bad_words``: ids.
    ``affinity``: name that requests of one problem share; some scheduler policies keep them together.
    ``piece``: number of tokens that may leave the engine together; 1 where a client reads them as they come.
    ``bare``: whether log-probabilities are wanted as plain numbers (`Event.bare`), without ranks and alternatives.
    ``epoch``: number of re-submissions. ``emitted``, ``ended``: what earlier epochs delivered, by branch.
    """

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    priority: int = 0
    arrival: float = 0.0
    tenant: str = ""
    bad_words: list[list[int]] = field(default_factory=list)
    epoch: int = 0
    emitted: list[list[int]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    affinity: str = ""
    piece: int = 1
    bare: bool = False


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
        "draft_parents", "guests", "tables", "num_sent", "page_keys", "seat", "open_seat", "stop_ids", "max_output",
        "status", "blocked_until", "num_cached", "num_preempted", "num_skipped", "parent", "finish_reason", "state",
        "first_scheduled",
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
        self.guests: dict[int, tuple[tuple[int, ...], ...]] = {}  # chains of guests (``Span``) by node of the draft
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

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_unshared(self) -> int:
        """Known tokens that no parent computes: all of them, or for a fork the prompt's last and the output."""
        return len(self.tokens) if self.parent is None else len(self.tokens) - self.num_prompt + 1

    def drop_draft(self) -> None:
        """Forget the draft and the guests, so that the next span verifies nothing."""
        self.draft, self.draft_parents, self.guests = [], [], {}

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


# ------------------------------------------------------------------------------------------------------ caches, steps


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share a page pool: same kind, shape and lifetime. ``window``: number of last positions kept."""

    name: str
    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class PageCopy:
    """A whole page to copy inside a group's pool before the step's forward (copy-on-write)."""

    group: int
    source: int
    target: int


@dataclass(slots=True)
class Span:
    """The one work item: ``length`` rows of one sequence from position ``start``.

    Row ``i`` holds token ``start + i`` of ``seq.tokens + seq.draft`` and predicts the token after it.
    ``want`` maps each kind of output to the range of rows (0-based in the span) that give it: ``sample`` draws the next
    token, ``score`` gives the log-probability of the known next token. Rows in no range give nothing.
    ``commit``: ``all`` rows, or (``walk``) of the rows that verify a draft only the accepted ones.
    ``parents``: for trees only, the index in the span of each row's parent; -1 for the first row.
    ``seat``: the sequence's seat when the span was planned; once the sequence has another, the span is void (not
    ``valid``).
    ``landed``: the span was resolved, so ``seq`` no longer counts on it.
    ``guests``: numbers of embeddings in the drafter's table. The last ``len(guests)`` rows hold these instead of
    tokens. A guest row sees its ancestors by ``parents``, no other row sees it, it is never committed and nothing is
    drawn from it. Its output goes to the drafter. A span with guests is a tree, and its ``commit`` is ``walk``.

    A span that starts after every known token has one row. An earlier step is still drawing its token, which stays on
    the device, so ``tokens()`` is empty.
    """

    seq: Sequence
    start: int
    length: int
    want: Mapping[Want, range] = field(default_factory=dict)
    commit: Commit = "all"
    parents: list[int] | None = None
    seat: int = -1
    landed: bool = False
    guests: Collection[int] = ()

    @property
    def valid(self) -> bool:
        """Whether the sequence has not finished, failed or been preempted since the span was planned."""
        return self.seq.seat == self.seat and self.seq.status is Status.RUNNING

    def tokens(self) -> list[int]:
        """The tokens of all rows except the guests."""
        known, end = self.seq.tokens, self.start + self.length
        if end <= len(known):
            return known[self.start : end]
        return known[self.start :] + self.seq.draft[max(0, self.start - len(known)) : end - len(known)]


@dataclass(slots=True)
class Plan:
    """One step as the scheduler decided it. ``copies`` run before the forward; commits wait until it is resolved."""

    step: int
    spans: list[Span]
    copies: list[PageCopy] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return sum(span.length for span in self.spans)


@dataclass(frozen=True, slots=True)
class Together:
    """The spans of a captured step that verifies drafts over static buffers; only the device knows them.

    ``place`` [T] int64: each row's index in its span. ``length`` [T] int64: rows of that span. ``most``: its upper
    bound.
    """

    place: torch.Tensor
    length: torch.Tensor
    most: int


@dataclass(slots=True)
class StepBatch:
    """A plan as tensors: an explicit argument of every forward.

    ``input_ids`` [T] int64; ``positions`` [T] int64; ``row_start`` [S+1] int32: where each span's rows start, and T.
    ``context`` [S] int32: positions in the cache before the span; row i of span s sees context[s] + i + 1 slots
    (causal).
    ``tables``: per cache group [S, W] int32 page ids, padded with page 0. ``logit_rows`` [M] int64: rows whose logits
    are wanted, in order. ``slots``: per cache group [T] int64, the slot (page * P + offset) that gets each row's K/V.
    ``ancestors`` [T, A] int64, only if a span is a tree: bit j % 64 of word j // 64 of row i says that row j of its
    span is an ancestor of row i or row i itself. Causal spans of such a step have zeros; ``starts`` and ``context``
    hold for them as usual.
    ``borrowed``: two [K] int64, rows of this batch and the seats on the device that hold the tokens for them.
    ``guests``: two [K] int64, the guest rows and the numbers of their embeddings in the drafter's table.
    ``inputs`` [K, E]: those embeddings as the first layer reads them.
    ``together``: set if each row is a span of its own here and the rows of one draft share the read of their keys. Then
    ``context`` is each row's position, ``tables`` has a line a row, and every row has ``ancestors``, in chains too.
    ``starts`` and ``lengths``: host copies of context and span lengths. ``scratch``: belongs to the attention backend.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    row_start: torch.Tensor
    context: torch.Tensor
    tables: tuple[torch.Tensor, ...]
    slots: tuple[torch.Tensor, ...]
    logit_rows: torch.Tensor
    starts: list[int]
    lengths: list[int]
    ancestors: torch.Tensor | None = None
    borrowed: tuple[torch.Tensor, torch.Tensor] | None = None
    guests: tuple[torch.Tensor, torch.Tensor] | None = None
    inputs: torch.Tensor | None = None
    together: Together | None = None
    scratch: dict[Any, Any] = field(default_factory=dict)


@dataclass(slots=True)
class TokenLogprob:
    """Natural log-probability of one token."""

    id: int
    logprob: float
    rank: int  # 1: most likely
    top: list[tuple[int, float]] = field(default_factory=list)  # the most likely alternatives: (id, log-probability)
    confidence: float | None = None  # mean negative log-probability of the k likeliest tokens (None: not asked for)


@dataclass(slots=True)
class BareLogprobs:
    """Log-probabilities and confidences (empty: not asked for) of several tokens, as plain numbers: these cross between
    processes at a fraction of the cost of one `TokenLogprob` a token."""

    logprobs: list[float]
    confidences: list[float]


@dataclass(slots=True)
class PromptScore:
    """Summary of the scored end of a prompt."""

    logprob: float  # sum of the log-probabilities
    tokens: int  # number of scored tokens
    confidence: float | None = None  # their mean confidence (None: not asked for)
    lowest: float | None = None  # the lowest mean confidence of a window (None: not asked for)


@dataclass(slots=True)
class SpanResult:
    """Result of one span of a step. Whatever was not asked for is None."""

    tokens: list[int] = field(default_factory=list)  # the emitted path; empty while a prompt is unfinished
    logprobs: list[TokenLogprob] | None = None
    scores: list[TokenLogprob] | None = None  # log-probability of the known token after each scored row
    error: str | None = None  # why this sequence alone fails
    path: list[int] | None = None  # if a draft was verified: the row (0-based in the span) that drew each token
    top: list[list[int]] | None = None  # for a drafter: the likeliest tokens of each sampled row
    hidden: torch.Tensor | None = None  # for a drafter: [length, layers, E], outputs of the layers that it reads
    guests: torch.Tensor | None = None  # [guests, E], outputs of the guest rows before the final norm


class Handle(Protocol):
    """A launched step."""

    def read(self) -> list[SpanResult]:
        """Wait for the step; return one result per span, in plan order."""


# ------------------------------------------------------------------------------------------------------------- events


@dataclass(slots=True, kw_only=True)
class Event:
    """News of one branch from the engine to the front end.

    Events may be sent again: ``index`` is the place of the first token in the branch's output and ``epoch`` that of the
    submission, so a reader can drop what it has seen.
    ``kind``: ``accepted`` (admitted to the queue; no tokens), ``tokens`` (new output; the last such event has
    ``finish_reason``) or ``error`` (ends the whole request; see ``status``, ``param`` and ``message``).
    ``queued``: seconds from arrival to the first granted rows; only on the first ``tokens`` event of branch 0.
    ``bare``: replaces ``logprobs`` for requests with ``Request.bare``.
    """

    kind: Literal["accepted", "tokens", "error"]
    request_id: str
    epoch: int = 0
    branch: int = 0
    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    bare: BareLogprobs | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    score: PromptScore | None = None
    num_cached: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    status: int = 0
    param: str | None = None
    code: str | None = None
    message: str = ""
    retry_after: float | None = None
    queued: float | None = None


@dataclass(slots=True, kw_only=True)
class ModelInfo:
    """Facts about a loaded model that front ends need."""

    name: str
    max_model_len: int
    vocab_size: int  # width of the logits
    tokenizer_size: int  # ids at or above it exist in the matrix only and are never sampled
    eos_ids: tuple[int, ...] = ()
    kv_capacity_tokens: int = 0
    drafters: tuple[str, ...] = ()
    timed_attention: str = ""  # the attention backend that was chosen by timing; a restarted process keeps it
    priorities: bool = False  # whether the scheduler looks at the priorities of requests
    max_queued_requests: int = 0  # most branches that may wait at once (0: no bound)
    max_queued_tokens: int = 0  # most prompt tokens that may wait at once (0: no bound)
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """A snapshot for health and metrics. Times are in seconds; counters count from the start of the process."""

    step: int = 0
    time: float = 0.0
    num_waiting: int = 0
    num_blocked: int = 0
    num_running: int = 0
    num_pages: int = 0
    num_free_pages: int = 0
    num_cached_pages: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    forwards: int = 0  # spans in which the generated tokens were drawn: one a token without drafts
    cached_tokens: int = 0
    prefix_queries: int = 0  # prompt tokens looked up in the prefix index; ``cached_tokens`` of them were found
    preemptions: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    restarts: int = 0  # restarts of the engine process, counted by its client
    quarantined: int = 0  # requests that the client failed because the engine process kept dying on them
    step_seconds: float = 0.0
    step_rows: int = 0
    busy_seconds: float = 0.0  # time in steps; where two steps overlap, it counts once
    draft_steps: int = 0  # steps in which drafts were asked for
    drafts: int = 0  # drafts (trees and chains) that were verified
    drafted_tokens: int = 0  # tokens in those drafts
    drafted_by: dict[str, list[int]] = field(default_factory=dict)  # [drafted, accepted] tokens by drafter
    accepted_tokens: int = 0  # drafted tokens that were accepted; each verification emits one token more
    accepted_by_depth: list[list[int]] = field(default_factory=list)  # [tried, accepted]; tried: parent accepted
    drafted_by_depth: dict[str, list[list[int]]] = field(default_factory=dict)  # the same for each drafter
    draft_saved_seconds: float | None = None  # estimate (engine/draft_savings.py); negative: lost; None: unknown
    startup: dict[str, float] = field(default_factory=dict)  # by phase; "fill" (the weights) overlaps other phases
    weight_bytes: int = 0  # bytes of weights read and copied at the start
    step_time_error: dict[str, float] = field(default_factory=dict)  # recent mean relative error; eager, graph
