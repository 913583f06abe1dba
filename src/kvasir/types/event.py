"""Output of the engine: log-probabilities, events, facts about the model, and counters. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from kvasir.types.pooling import Pooling
from kvasir.types.sequence import FinishReason


@dataclass(slots=True)
class TokenLogprob:
    """Natural log-probability of one token."""

    id: int
    logprob: float
    rank: int  # 1: most likely
    top: list[tuple[int, float]] = field(default_factory=list)  # the most likely alternatives: (id, log-probability)
    confidence: float | None = None  # mean negative log-probability of the k likeliest tokens (None: not asked for)
    # Name of the drafter whose draft held this token (None: it was drawn without a draft). How a token came about is
    # not part of what it is: with and without drafts the entries are equal.
    drafter: str | None = field(default=None, compare=False)


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


@dataclass(slots=True, kw_only=True)
class Event:
    """News of one branch from the engine to the front end.

    Events may be sent again: ``index`` is the place of the first token in the branch's output and ``epoch`` that of the
    submission, so a reader can drop what it has seen.
    ``kind``: ``accepted`` (admitted to the queue; no tokens), ``tokens`` (new output; the last such event has
    ``finish_reason``) or ``error`` (ends the whole request; see ``status``, ``param`` and ``message``).
    ``queued``: seconds from arrival to the first granted rows; only on the first ``tokens`` event of branch 0.
    ``bare``: replaces ``logprobs`` for requests with ``Request.bare``. ``pooled``: the embedding or score of a request
    with ``Request.pooling``, as little-endian fp32, with its only ``tokens`` event.
    ``forced``: places in the branch's output of those tokens that nobody drew: a processor or a grammar's chain forced
    them.
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
    pooled: bytes | None = None
    num_cached: int = 0
    forced: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    status: int = 0
    param: str | None = None
    code: str | None = None
    message: str = ""
    retry_after: float | None = None
    queued: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInfo:
    """An adapter that is served under a name of its own. ``path``: its folder; ``key``: digest of its content, as in
    ``Variant``; ``rank``: the largest of its matrices; ``base``: the base model that its config names."""

    name: str
    path: str
    key: str
    rank: int
    base: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HookInfo:
    """A set of hooks that is served. ``path``: its folder; ``key``: digest of its content, as in ``Variant``;
    ``answers``: it acts from the last row of the prompt on, not on the whole prompt; ``changes_kv``: as in ``Variant``;
    ``parts``: a line about each hook."""

    name: str
    path: str
    key: str
    answers: bool = False
    changes_kv: bool = True
    parts: tuple[str, ...] = ()


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
    # Backends that were chosen by timing, by the name of their setting. A second timing might choose others, which have
    # other bits, so a restarted process keeps them, and replicas take those of the first.
    timed: dict[str, str] = field(default_factory=dict)
    priorities: bool = False  # whether the scheduler looks at the priorities of requests
    adapters: dict[str, AdapterInfo] = field(default_factory=dict)  # by name
    hooks: dict[str, HookInfo] = field(default_factory=dict)  # by name
    max_queued_requests: int = 0  # most branches that may wait at once (0: no bound)
    max_queued_tokens: int = 0  # most prompt tokens that may wait at once (0: no bound)
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    packaged: bool = False  # one of the small models that are part of the package
    weights: str = ""  # hex digest of the weights' content; only replicas compute it
    prefix_root: bytes = b""  # root of the keys of a shared prefix index; empty: none is shared
    page_slots: int = 0  # tokens of a page of that index
    pooling: Pooling | None = None  # set for a model that embeds or scores and draws no tokens
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The work that a replica has at hand. ``queued_tokens``: uncached prompt tokens still to compute. ``prompt_rate``:
    prompt tokens a second in steps that also carry the present decodes; None: not known yet. ``decodes``: sequences
    past their prompts."""

    queued_tokens: int = 0
    prompt_rate: float | None = None
    decodes: int = 0


@dataclass(slots=True, kw_only=True)
class LearnStats:
    """Counters of a drafter that learns while serving. ``version``: the weights that are served. ``kl_by_depth``: the
    trainer's recent mean of KL(model || drafter), in nats. ``traced``, ``dropped``: tokens that went to the trainer,
    and that were recorded and lost. ``learned_tokens``: those that it has learned from, in ``steps`` optimizer steps.
    ``swaps``: times that served weights were replaced. ``candidates``, ``accepted``, ``rollbacks``: versions that came,
    that passed, and that were refused or taken back. ``busy_share``: the trainer's; ``slice_rows``, ``slice_ms``: rows
    and milliseconds of its last slice. ``ended``: why nothing more is learned."""

    version: int = 0
    kl_by_depth: list[float] = field(default_factory=list)
    traced: int = 0
    dropped: int = 0
    learned_tokens: int = 0
    steps: int = 0
    swaps: int = 0
    candidates: int = 0
    accepted: int = 0
    rollbacks: int = 0
    busy_share: float = 0.0
    slice_rows: int = 0
    slice_ms: float = 0.0
    ended: str = ""


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
    forced_tokens: int = 0  # generated tokens that the request's own grammar forced and that came in chains
    cached_tokens: int = 0
    prefix_queries: int = 0  # prompt tokens looked up in the prefix index; ``cached_tokens`` of them were found
    preemptions: int = 0
    forgotten_tokens: int = 0  # tokens that a KV policy took out of the cache
    tiers: dict[str, dict[str, float]] = field(default_factory=dict)  # counters by tier, the device among them
    tier_bytes: dict[str, int] = field(default_factory=dict)  # size of each tier below the device
    tier_used: dict[str, int] = field(default_factory=dict)  # bytes of it that hold pages
    failed: dict[str, int] = field(default_factory=dict)
    restarts: int = 0  # restarts of the engine process, counted by its client
    quarantined: int = 0  # requests that the client failed because the engine process kept dying on them
    by_replica: dict[int, EngineStats] = field(default_factory=dict)  # the client of several replicas fills it
    queued_seconds: float | None = None  # time to compute the queued prompts, over all replicas; None: not known
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
    draft_saved_seconds: float | None = None  # estimate (engine/drafts/draft_savings.py); negative: lost; None: unknown
    draft_gain: float | None = None  # predicted tokens a second with drafts over those without; None: not predicted yet
    learning: LearnStats | None = None  # None: nothing is learned
    startup: dict[str, float] = field(default_factory=dict)  # by phase; "fill" (the weights) overlaps other phases
    weight_bytes: int = 0  # bytes of weights read and copied at the start
    step_time_error: dict[str, float] = field(default_factory=dict)  # recent mean relative error; eager, graph
