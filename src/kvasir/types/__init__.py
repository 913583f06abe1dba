"""The nouns of the engine: requests, sequences, spans, plans, batches, events. They import no other room.

A *request* is what a user sent. It runs as one *sequence* per branch (``n`` > 1 forks). Every step the scheduler grants
each sequence a *span* of rows; a list of spans is a *plan*, and a plan packed into tensors is a *StepBatch*. There are
no phases: a prompt chunk, a decode step and a draft to verify are spans of different lengths.
"""

from __future__ import annotations

from kvasir.types.event import (
    AdapterInfo,
    BareLogprobs,
    EngineStats,
    Event,
    HookInfo,
    LearnStats,
    Load,
    ModelInfo,
    PromptScore,
    TokenLogprob,
)
from kvasir.types.pooling import (
    PairTemplate,
    Pooling,
    PoolingParams,
    PoolRows,
)
from kvasir.types.request import (
    U64,
    Grammar,
    ProcessorParams,
    Request,
    SamplingParams,
    Thinking,
    Variant,
)
from kvasir.types.sequence import (
    HOOK_SHIFT,
    FinishReason,
    Guests,
    Sequence,
    Status,
    branch_stream,
)
from kvasir.types.step import (
    CacheGroup,
    CacheRow,
    Commit,
    Guess,
    Guessing,
    Handle,
    PageCopy,
    Plan,
    Span,
    SpanResult,
    StatePlane,
    StepBatch,
    Together,
    Want,
)

__all__ = [
    "AdapterInfo",
    "BareLogprobs",
    "CacheGroup",
    "CacheRow",
    "StatePlane",
    "Commit",
    "EngineStats",
    "Event",
    "FinishReason",
    "Grammar",
    "HOOK_SHIFT",
    "Guess",
    "Guessing",
    "Guests",
    "Handle",
    "HookInfo",
    "LearnStats",
    "Load",
    "ModelInfo",
    "PageCopy",
    "PairTemplate",
    "Plan",
    "PoolRows",
    "Pooling",
    "PoolingParams",
    "ProcessorParams",
    "PromptScore",
    "Request",
    "SamplingParams",
    "Sequence",
    "Span",
    "SpanResult",
    "Status",
    "StepBatch",
    "Thinking",
    "Together",
    "TokenLogprob",
    "U64",
    "Variant",
    "Want",
    "branch_stream",
]
