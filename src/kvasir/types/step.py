"""A step: the spans that the scheduler plans, the batch that the device runs, and the result of each span.

Shape suffixes: T rows, S sequences (spans of this step), M rows whose logits are wanted, N pages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from kvasir.types.event import TokenLogprob
from kvasir.types.sequence import Sequence, Status

if TYPE_CHECKING:
    import torch

Want = Literal["sample", "score", "pool", "guess"]
Commit = Literal["all", "walk"]
# A token that a guest row guesses, and its probability there.
Guess = tuple[int, float]


@dataclass(frozen=True, slots=True)
class Guessing:
    """Guesses that a drafter wants of its guests: ``count`` tokens of each row. ``coupled``: under the noise of the
    draw that will verify them, the drawn token first (`kvasir.kernels.guess`); else the likeliest at the row's
    temperature, without noise."""

    count: int = 1
    coupled: bool = True


@dataclass(frozen=True, slots=True)
class CacheRow:
    """A token's place in a layer's pages: ``heads`` keys of ``key_dim`` elements and as many values of
    ``value_dim``.

    ``latent``: the first elements of a key are also the value, so that only keys are stored; 0: values are stored.
    Such a row has one head and a ``value_dim`` of 0."""

    heads: int
    key_dim: int
    value_dim: int
    latent: int = 0

    @property
    def width(self) -> int:
        """Elements of a row, keys and values together."""
        return self.heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class StatePlane:
    """One array of what a recurrent layer keeps of a sequence. ``kind``: ``state`` (the recurrence's own numbers, in
    the ``state_dtype`` of their group), ``float32`` (numbers that always are), ``model`` (numbers in the model's
    dtype) or ``position`` (int64)."""

    name: str
    shape: tuple[int, ...]
    kind: Literal["state", "float32", "model", "position"]


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share a page pool because what they keep lives equally long.

    ``kind`` ``pages``: a page holds some tokens; ``rows`` has one entry for each of ``layers``; ``window``: number of
    last positions kept. ``kind`` ``state``: a page holds the states of all layers after one position; ``states`` has
    one entry for each of ``layers``, and ``state_dtype`` is the type of planes of that kind.
    """

    name: str
    layers: tuple[int, ...]
    rows: tuple[CacheRow, ...] = ()
    window: int | None = None
    kind: Literal["pages", "state"] = "pages"
    states: tuple[tuple[StatePlane, ...], ...] = ()
    state_dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        kept, other = (self.rows, self.states) if self.kind == "pages" else (self.states, self.rows)
        assert len(kept) == len(self.layers) and not other, "one row or state a layer"


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
    token, ``score`` gives the log-probability of the known next token, ``pool`` adds the row to the prompt's vector,
    ``guess`` draws for a drafter. Rows in no range give nothing.
    ``commit``: ``all`` rows, or (``walk``) of the rows that verify a draft only the accepted ones. A forced chain is a
    draft whose rows allow one token each (``Sequence.num_forced``).
    ``parents``: for trees only, the index in the span of each row's parent; -1 for the first row.
    ``seat``: the sequence's seat when the span was planned; once the sequence has another, the span is void (not
    ``valid``).
    ``landed``: the span was resolved, so ``seq`` no longer counts on it.
    ``guests``: numbers of embeddings in the drafter's table. The last ``len(guests)`` rows hold these instead of
    tokens. A guest row sees its ancestors by ``parents``, or without them all rows before it, and no other row sees it.
    It is never committed, and what it draws (``guess``) goes to the drafter alone. One chain of guests behind the last
    row of a prompt or of a chain needs no ``parents``. ``commit`` is ``walk``.
    ``states``: in a model with recurrent layers, the pages of states that the span reads and writes.
    ``stale``: a later step was launched on its state before it failed, so its sequence must start again.

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
    states: tuple[int, int] = (0, 0)
    stale: bool = False

    @property
    def varied(self) -> bool:
        """Whether a variant of the model may compute some of its rows."""
        seq = self.seq
        end = self.start + self.length - len(self.guests)
        own = (seq.variant and end > seq.variant_from) or (seq.hook and end > seq.hook_from)
        return bool(own or (self.guests and seq.guest_variant))

    @property
    def valid(self) -> bool:
        """Whether the sequence has not finished, failed or been preempted since the span was planned."""
        return self.seq.seat == self.seat and self.seq.status is Status.RUNNING

    @property
    def ends_draw(self) -> bool:
        """Whether the span gives what follows the known tokens: a token, or the vector of the whole prompt."""
        return "sample" in self.want or "pool" in self.want and self.start + self.length >= len(self.seq.tokens)

    def tokens(self) -> list[int]:
        """The tokens of all rows except the guests."""
        known, end = self.seq.tokens, self.start + self.length - len(self.guests)
        if end <= len(known):
            return known[self.start : end]
        return known[self.start :] + self.seq.draft[max(0, self.start - len(known)) : end - len(known)]


@dataclass(slots=True)
class Plan:
    """One step as the scheduler decided it. ``copies`` run before the forward; commits wait until it is resolved.
    ``lost``: the copies for which there was no memory."""

    step: int
    spans: list[Span]
    copies: list[PageCopy] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    lost: list[PageCopy] = field(default_factory=list)

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
    ``variants`` [T] int32: the resident variant that computes each row, 0 for the base model; None: no row has one. It
    is the slot of an adapter, and above ``HOOK_SHIFT`` that of a set of hooks; where a decoder has hooks, layers get
    the former alone (``Decoder.begin``). A row's variant depends on its sequence and its input position alone; guests
    have that of their drafter. ``hooks`` [T] int32: each row's set of hooks with its open gates, as ``kernels.steer``
    reads it; None: no row has one.
    ``together``: set if each row is a span of its own here and the rows of one draft share the read of their keys. Then
    ``context`` is each row's position, ``tables`` has a line a row, and every row has ``ancestors``, in chains too.
    ``span_lengths`` [T] int64: set if each row is a span of its own here, although a draft may have several rows: the
    rows of the draft that begins with this row, 0 for its other rows, -1 for padding. Recurrences go from row to row
    of a draft.
    ``places``: by cache group, the ``context`` and ``starts`` of layers whose sequences have forgotten some tokens, so
    that fewer slots than positions stand before a span; None: no sequence has. Empty: none in any group. Layers of a
    group see the batch as ``of`` gives it.
    ``starts`` and ``lengths``: host copies of context and span lengths. ``prompts``: whether each span has several rows
    of known tokens; empty: not known, as in a captured step. ``scratch``: belongs to the attention backend,
    and to kernels that share something among layers, under types of theirs.
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
    variants: torch.Tensor | None = None
    hooks: torch.Tensor | None = None
    together: Together | None = None
    span_lengths: torch.Tensor | None = None
    prompts: list[bool] = field(default_factory=list)
    places: tuple[tuple[torch.Tensor, list[int]] | None, ...] = ()
    scratch: dict[Any, Any] = field(default_factory=dict)

    def of(self, group: int) -> StepBatch:
        """The batch as the layers of a cache group see it: ``context`` and ``starts`` count what the cache still
        has before each span."""
        if not self.places or self.places[group] is None:
            return self
        key = "places", group
        view: StepBatch | None = self.scratch.get(key)
        if view is None:
            context, starts = self.places[group]  # type: ignore[misc]
            view = self.scratch[key] = replace(self, context=context, starts=starts, places=(), scratch={})
        return view

    def views(self) -> list[StepBatch]:
        """The batch itself, and as the layers see it whose sequences have forgotten tokens."""
        return [self, *(self.of(group) for group, places in enumerate(self.places) if places is not None)]

    def only(self, rows_M: torch.Tensor) -> StepBatch:
        """The batch as layers see it that compute only these rows [M]: with their variants."""
        if self.variants is None and self.hooks is None:
            return self
        own = self.variants, self.hooks
        variants, hooks = (None if part is None else part.index_select(0, rows_M) for part in own)
        return replace(self, variants=variants, hooks=hooks, scratch={})


@dataclass(slots=True)
class SpanResult:
    """Result of one span of a step. Whatever was not asked for is None."""

    tokens: list[int] = field(default_factory=list)  # the emitted path; empty while a prompt is unfinished
    logprobs: list[TokenLogprob] | None = None
    scores: list[TokenLogprob] | None = None  # log-probability of the known token after each scored row
    pooled: bytes | None = None  # little-endian fp32: embedding or score of the whole prompt, with its last row
    error: str | None = None  # why this sequence alone fails
    path: list[int] | None = None  # if a draft was verified: the row (0-based in the span) that drew each token
    forced: int = 0  # set at the commit: how many of the kept tokens came in a forced chain
    top: list[list[int]] | None = None  # for a drafter: the likeliest tokens of each sampled row
    hidden: torch.Tensor | None = None  # for a drafter: [length, layers, E], outputs of the layers that it reads
    guesses: list[list[Guess]] | None = None  # for a drafter: by guest row, what was drawn there, then the next best


class Handle(Protocol):
    """A launched step."""

    def read(self) -> list[SpanResult]:
        """Wait for the step; return one result per span, in plan order."""
