"""The nouns of the engine: requests, sequences, spans, plans, batches, events. Imports no sibling, needs no torch.

A *request* is what a user sent. It runs as one *sequence* per branch (``n`` > 1 forks). Every step the scheduler
grants each sequence a *span* of rows. A list of spans is a *plan*; packed into tensors it is a *StepBatch*. There are
no phases: a prompt chunk, a decode step and a draft to verify are spans of different length.

Shape suffixes: T rows, S sequences (spans of this step), M rows whose logits are wanted, N pages.
"""

from __future__ import annotations

import enum
import functools
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
    key = parent.to_bytes(8, "little") + branch.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8, person=b"kvasir-branch").digest(), "little")


# ---------------------------------------------------------------------------------------------------------- requests


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the output. ``text``: the JSON schema, regex, Lark grammar, or a JSON list of choices.
    ``after``: token ids of the end-of-reasoning mark; when not empty, the grammar starts only once they were generated.
    """

    kind: Literal["json_schema", "json_object", "regex", "choice", "lark"]
    text: str = ""
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample: the OpenAI and vLLM parameters by their usual names. Ranges are checked once, at admission.

    ``max_tokens=None`` means "up to the context length". ``temperature=0`` is greedy (the lowest id wins a tie).
    ``seed=None`` draws a fresh stream. ``logprobs``: number of alternatives to report with the sampled token.
    ``logprobs_mode``: ``raw`` (the model's distribution) or ``processed`` (after the whole pipeline).
    ``num_draft_tokens``: the most draft tokens a step, where a drafter runs (0: none). ``drafter``: the drafter to use,
    where several run. Neither changes a token in exact mode; elsewhere a tie may end differently.
    ``confidence`` k > 0: every log-probability comes with the mean negative log-probability of the k likeliest tokens
    (Fu et al. 2025, DeepConf). ``score_from``: the prompt's tokens from this place on are scored and summed up in one
    `PromptScore`, with windows of ``confidence_window`` tokens (0: none). ``finish_after`` m: only the first m of the
    ``n`` branches to end by themselves count, measured in tokens and not in time; a branch that can no longer be among
    them is cancelled. ``lease``: seconds for which the pages of an ended branch are kept for a request that continues
    it, unless others need them."""

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
        put = functools.partial(
            object.__setattr__, self
        )  # frozen; callers write lists and single strings, as with vLLM
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            value = getattr(self, name)
            if not (value is None or isinstance(value, Iterable)):
                raise TypeError(f"{name} is {value!r}, expected a list")
            if value is not None or name != "allowed_token_ids":
                put(name, (value,) if isinstance(value, str) and value else tuple(value or ()))
        if not isinstance(self.logit_bias or {}, Mapping):
            raise TypeError(f"logit_bias is {self.logit_bias!r}, expected token ids with their biases")
        put("logit_bias", dict(self.logit_bias or {}))


@dataclass(slots=True, kw_only=True)
class Request:
    """The durable state of one request: everything else can be rebuilt from it, on any machine, at any time.

    ``seed``: the u64 noise stream of branch 0. ``max_tokens``: resolved against the context length. ``tenant``: salt of
    the prefix key, from the authenticated identity. ``arrival``: ``time.monotonic()`` seconds.
    ``bad_words``: token ids.
    ``affinity``: requests with the same value belong together (calls of one problem); some schedulers use it.
    ``piece``: number of tokens that may leave the engine together; 1 where somebody reads along. ``bare``: report
    log-probabilities as plain numbers (`Event.bare`), without ranks and alternatives. ``epoch`` counts re-submissions;
    ``emitted`` and ``ended`` hold what earlier epochs delivered, by branch."""

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
    BLOCKED = "blocked"  # waits for something outside the scheduler; skipped, never in the way
    RUNNING = "running"  # holds pages and a seat
    FINISHED = "finished"  # holds nothing


class Sequence:
    """One branch of a request as the engine runs it. Everything here can be rebuilt from the request.

    Invariants: ``num_computed <= len(tokens)``; RUNNING holds a seat; FINISHED and WAITING hold no page and no seat."""

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
        self.tokens: list[int] = [*request.prompt_ids, *emitted]  # known: prompt, then committed output
        self.num_prompt = len(request.prompt_ids)
        self.num_computed = 0  # positions whose state is in the cache and committed
        self.num_ahead = 0  # rows planned after those, in steps not resolved yet; the next span starts behind them
        self.num_drawn = 0  # how many of these rows draw a token that will follow ``tokens``
        self.draft: list[int] = []  # tokens proposed for the positions after ``tokens``, verified by the next span
        self.draft_parents: list[
            int
        ] = []  # of a draft tree: each token's parent in ``draft``; -1: the last known token
        self.guests: dict[int, tuple[tuple[int, ...], ...]] = {}  # chains of guest rows (see `Span`) by draft node
        self.tables: list[list[int]] = []  # page ids by cache group: [i] holds positions [i*P, (i+1)*P); 0: dropped
        self.num_sent = 0  # leading entries of each table that the device's copy for its seat holds
        self.page_keys: list[bytes] = []  # prefix keys of the full pages of ``tokens``, filled by the prefix index
        self.seat = -1  # place of the sequence in the per-sequence state of sampler and device; -1: none
        self.open_seat = -1  # the seat that was set up for this sequence
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
        """Number of known tokens that its parent does not compute; a branch adds its output and the prompt's last."""
        return len(self.tokens) if self.parent is None else len(self.tokens) - self.num_prompt + 1

    def drop_draft(self) -> None:
        """Drop the draft and the guests: the next span verifies nothing."""
        self.draft, self.draft_parents, self.guests = [], [], {}

    @property
    def num_guests(self) -> int:  # guest rows of the next span
        return sum(len(chain) for chains in self.guests.values() for chain in chains)

    @property
    def num_look_ahead(self) -> int:
        """Number of rows of the next span behind that of the last known token: drafts and guests."""
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
    """Layers that share a page pool: same kind, shape and lifetime. ``window``: keep only that many last positions."""

    name: str
    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy a whole page inside a group's pool before the step's forward (copy-on-write)."""

    group: int
    source: int
    target: int


@dataclass(slots=True)
class Span:
    """``length`` rows of one sequence from position ``start``: the one work item.

    Row ``i`` holds token ``start + i`` of ``seq.tokens + seq.draft`` and predicts the token after it.
    ``want`` maps a kind to the range of rows (0-based in the span) that want it; rows in no range want nothing:
    ``sample`` draws the next token, ``score`` gives the log-probability of the known next token.
    ``commit``: ``all`` rows, or for a span that verifies a draft the rows on the accepted ``walk``.
    ``parents`` is set for trees only: index in the span of each row's parent, -1 for the first row.
    ``seat``: the sequence's seat when the span was planned. A span whose sequence has lost it is void (``valid``).
    ``landed``: the span was resolved, so ``seq`` no longer counts on it.
    ``guests``: numbers of the embeddings in the drafter's table that the last ``len(guests)`` rows hold in place of
    tokens. A guest sees its ancestors by ``parents``, no other row sees it, its slot is never committed, nothing is
    drawn from it, and its output goes to the drafter. A span with guests is a tree, and its commit is ``walk``.

    A span that starts behind every known token has one row. Its token is still being drawn by an earlier step: it is on
    the device, and ``tokens()`` is empty."""

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
        """Whether the sequence still runs as it did when this was planned: not finished, failed or preempted since."""
        return self.seq.seat == self.seat and self.seq.status is Status.RUNNING

    def tokens(self) -> list[int]:
        """Return the tokens of its rows, guests excepted."""
        known, end = self.seq.tokens, self.start + self.length
        if end <= len(known):
            return known[self.start : end]
        return known[self.start :] + self.seq.draft[max(0, self.start - len(known)) : end - len(known)]


@dataclass(slots=True)
class Plan:
    """One step as the scheduler decided it. ``copies`` run before the forward. Nothing is committed until resolve."""

    step: int
    spans: list[Span]
    copies: list[PageCopy] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return sum(span.length for span in self.spans)


@dataclass(frozen=True, slots=True)
class Together:
    """The spans of a step that verifies drafts over static buffers. Only the device knows them, so that the step can be
    captured.

    ``place`` [T] int64: each row's place in its span; ``length`` [T] int64: number of rows of that span; ``most``: the
    most rows of any span."""

    place: torch.Tensor
    length: torch.Tensor
    most: int


@dataclass(slots=True)
class StepBatch:
    """A plan as tensors: an explicit argument of every forward (no globals).

    input_ids [T] int64; positions [T] int64; row_start [S+1] int32 (span s is rows row_start[s]:row_start[s+1]);
    context [S] int32: positions in the cache before the span: row i of span s sees context[s] + i + 1 slots (causal);
    tables: per cache group [S, W] int32 page ids, padded with page 0; slots: per cache group [T] int64 = page * P +
    offset, where this row's K/V is written; logit_rows [M] int64: rows whose logits are wanted, in row order.
    ``ancestors`` [T, A] int64, only when a span is a tree: bit j % 64 of word j // 64 of row i says that row j of its
    span is an ancestor of row i or row i itself (all zeros for causal spans: read ``starts`` and ``context``).
    ``borrowed``: two [K] int64: rows of this batch, and the seats on the device that hold the tokens for them.
    ``guests``: two [K] int64: rows that hold no token, and the numbers of their embeddings in the drafter's table.
    ``inputs`` [K, E]: those embeddings, as the first layer reads them.
    ``together``: rows that share the read of their keys although each is a span here: ``context`` is where each stands
    in the cache, ``tables`` are per row, and every row has ``ancestors``, rows of chains too.
    ``starts``/``lengths`` are the host's copies of context and span lengths; ``scratch`` belongs to the attention
    backend."""

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
    """Log-probability (natural) of one token, its rank (1: most likely), and the most likely alternatives.
    ``confidence``: mean negative log-probability of the k likeliest tokens, where the request asks for it."""

    id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = field(default_factory=list)
    confidence: float | None = None


@dataclass(slots=True)
class BareLogprobs:
    """Log-probabilities and confidences (empty: not asked for) of several tokens, without ranks and alternatives.
    Plain numbers cross between processes at a fraction of the cost of a `TokenLogprob` for each token."""

    logprobs: list[float]
    confidences: list[float]


@dataclass(slots=True)
class PromptScore:
    """Sum of the log-probabilities over the scored end of a prompt, and the number of tokens scored.
    ``confidence``: the mean; ``lowest``: the lowest mean of any window (None: not asked for)."""

    logprob: float
    tokens: int
    confidence: float | None = None
    lowest: float | None = None


@dataclass(slots=True)
class SpanResult:
    """What a step found for one span.

    ``tokens``: the emitted path, empty while a prompt is unfinished. ``error``: this sequence alone fails. ``scores``:
    log-probability of the known token after each scored row. For a span that verifies a draft, ``path``: the row
    (0-based in the span) that each token was drawn from. Where a drafter asks for them, ``top``: the likeliest tokens
    of each sampled row; ``hidden`` [length, layers, E]: outputs of the layers it reads; ``guests`` [guests, E]: outputs
    of the guest rows before the final norm."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    scores: list[TokenLogprob] | None = None
    error: str | None = None
    path: list[int] | None = None
    top: list[list[int]] | None = None
    hidden: torch.Tensor | None = None
    guests: torch.Tensor | None = None


class Handle(Protocol):
    """A launched step."""

    def read(self) -> list[SpanResult]:
        """Wait for it; one result per span, in plan order."""


# ------------------------------------------------------------------------------------------------------------- events


@dataclass(slots=True, kw_only=True)
class Event:
    """What the engine tells the front end about one branch. Safe to resend: ``index`` is the place of the first token
    in the branch's output and ``epoch`` that of the submission, so a reader drops what it has seen.

    ``kind``: ``accepted`` (admitted to the queue; no tokens), ``tokens`` (new output; the last has ``finish_reason``),
    ``error`` (terminal for the whole request: ``status``, ``param``, ``message``). ``queued``: seconds from arrival to
    the first grant of rows, on the first ``tokens`` event of branch 0. ``bare`` replaces ``logprobs`` for requests that
    ask for no more."""

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
    """What front ends need to know of a loaded model. ``vocab_size`` is the width of the logits; ids at or above
    ``tokenizer_size`` exist in the matrix only and are never sampled."""

    name: str
    max_model_len: int
    vocab_size: int
    tokenizer_size: int
    eos_ids: tuple[int, ...] = ()
    kv_capacity_tokens: int = 0
    drafters: tuple[str, ...] = ()  # names
    timed_attention: str = ""  # attention backend chosen by timing; a restarted process keeps it
    priorities: bool = False  # whether the scheduler uses ``Request.priority``
    max_queued_requests: int = 0  # branches that may wait at once; 0: no bound
    max_queued_tokens: int = 0  # prompt tokens that may wait at once; 0: no bound
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """A snapshot for health and metrics. Times in seconds; counters since the process started."""

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
    forwards: int = 0  # forwards of single sequences that drew these tokens: one per token without drafts
    cached_tokens: int = 0
    prefix_queries: int = 0  # prompt tokens looked up in the prefix index, of which cached_tokens were found
    preemptions: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    restarts: int = 0  # restarts of the engine process, counted by its client
    quarantined: int = 0  # requests given up because they kept ending that process
    step_seconds: float = 0.0
    step_rows: int = 0
    busy_seconds: float = 0.0  # wall time of all steps; where two overlap, every second counts once
    draft_steps: int = 0  # steps in which drafts were asked for
    drafts: int = 0  # draft trees verified
    drafted_tokens: int = 0
    drafted_by: dict[str, list[int]] = field(default_factory=dict)  # by drafter: tokens drafted, accepted
    accepted_tokens: int = 0  # drafted tokens that were right; each verification emits one more
    accepted_by_depth: list[list[int]] = field(default_factory=list)  # [tried, accepted]; tried: its parent was right
    drafted_by_depth: dict[str, list[list[int]]] = field(default_factory=dict)  # the same, by drafter
    draft_saved_seconds: float | None = None  # estimated (engine/draft_savings.py); below 0: lost; None: not known yet
    startup: dict[str, float] = field(default_factory=dict)  # seconds by phase; "fill", of the weights, overlaps others
    weight_bytes: int = 0  # read and copied at the start
    step_time_error: dict[str, float] = field(default_factory=dict)  # mean relative error by kind of step: eager, graph
