"""Turn the next rows of a sequence into a span, and collect spans into a step."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from kvasir.engine.pages.pages import PageManager
from kvasir.types import Guests, PageCopy, Sequence, Span, Want
from kvasir.types.sequence import NEVER

ROW_TILE = 128  # a GPU's matmuls cost the same for every row of a tile
ONE_SAMPLE: dict[Want, range] = {"sample": range(1)}


@dataclass(frozen=True, slots=True)
class Tail:
    """Guests behind the last row of a prompt, so that its first decode verifies already. ``variant`` computes them;
    ``names`` are those of the drafter that a request may ask for."""

    guests: tuple[int, ...] = ()
    variant: int = 0
    names: Collection[str] = ()

    def fits(self, seq: Sequence, length: int, left: int, max_model_len: int) -> bool:
        """Whether the next ``length`` rows of a sequence may have them: they end its prompt, ``left`` rows hold both,
        the sequence draws more than a token, and its last rows lie in the context."""
        params = seq.request.params
        return (
            bool(self.guests)
            and length == rows_left(seq)
            and length + len(self.guests) <= left
            and not seq.pools
            and seq.forgetting is None
            and params.num_draft_tokens != 0
            and params.drafter in (None, *self.names)
            and len(seq.tokens) + len(self.guests) <= max_model_len
            and len(seq.tokens) + 1 < min(max_model_len, seq.num_prompt + seq.max_output)
        )


NO_TAIL = Tail()


@dataclass(slots=True)
class Step:
    """A plan in the making. ``left``: rows of the budget that are still free."""

    now: float
    left: int
    spans: dict[Sequence, Span] = field(default_factory=dict)
    copies: list[PageCopy] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    def add(self, seq: Sequence, length: int) -> None:
        span = self.spans[seq] = next_span(seq, length)
        self.left -= span.length

    def remove(self, seq: Sequence) -> None:
        if span := self.spans.pop(seq, None):
            self.left += span.length


def needed_from(seq: Sequence) -> int | None:
    """Return the first prompt row that no cache can stand in for, or None: its log-probability is wanted and not known
    yet, or its hidden state goes into a mean. (The row that is pooled last is always computed.)"""
    if seq.pools:
        return None if seq.request.pooling.rows == "last" else 0
    params = seq.request.params
    first = params.score_from if params.prompt_logprobs is None else 1
    if first is None or seq.branch:
        return None
    scored = seq.state.get("num_scored", first - 1)  # a token is scored by the row before it
    return scored if scored < seq.num_prompt - 1 else None


def computed_from(seq: Sequence) -> int | None:
    """Return the first row that no cache can stand in for, or None: as ``needed_from`` says, or because a KV policy
    watches its attention, or has forgotten tokens by then."""
    needed = needed_from(seq)
    if seq.forgetting is None:
        return needed
    return seq.forgetting.own_from if needed is None else min(needed, seq.forgetting.own_from)


def must_forget(seq: Sequence) -> bool:
    """Whether a KV policy forgets tokens of a sequence before its next row."""
    return seq.forgetting is not None and seq.num_computed + seq.num_ahead >= seq.forgetting.due


def rows_until_stop(seq: Sequence, start: int) -> int:
    """Number of rows from position ``start`` on that one span may have, where a KV policy forgets tokens."""
    stops = seq.forgetting.due, seq.forgetting.whole_from
    return min(stop for stop in (*stops, NEVER) if stop > start) - start


def least_rows(seq: Sequence, start: int) -> int:
    """Number of rows from position ``start`` on that must be computed in one span."""
    if seq.forgetting is None or not seq.forgetting.whole_from <= start < seq.num_prompt:
        return 1
    return seq.num_prompt - start


def next_span(seq: Sequence, length: int) -> Span:
    """Return a span of the next ``length`` rows of a sequence and its guests. Rows from the last known token on are
    sampled."""
    start = seq.num_computed + seq.num_ahead
    first = len(seq.tokens) + seq.num_drawn - 1 - start  # the row of the last token, known or being drawn
    if seq.pools:
        rows = seq.request.pooling.rows_of(start, start + length, seq.num_prompt)
        return Span(seq, start, length, {"pool": range(rows.start - start, rows.stop - start)}, seat=seq.seat)
    if length == 1 and not first and not seq.guests:
        return Span(seq, start, 1, want=ONE_SAMPLE, seat=seq.seat)
    want: dict[Want, range] = {}
    unscored = needed_from(seq) if start < seq.num_prompt - 1 else None
    if unscored is not None and start + length > unscored:
        want["score"] = range(max(0, unscored - start), min(length, seq.num_prompt - 1 - start))
    if length > first:
        want["sample"] = range(first, length)
    if length <= first + 1 and not seq.guests:
        return Span(seq, start, length, want=want, seat=seq.seat)
    parents = None
    if seq.draft_parents and len(seq.draft_parents) == length - first - 1:  # a tree: each row's parent in the span
        parents = [*range(-1, first), *(first + 1 + p for p in seq.draft_parents)]
    guests = [guest for chains in seq.guests.values() for chain in chains for guest in chain]
    if guests:
        want["guess"] = range(length, length + len(guests))
        if parents is not None or not ends_in_one_chain(seq.guests, length - first - 2):
            parents = parents or list(range(-1, length - 1))
            for node, chains in seq.guests.items():
                for chain in chains:
                    parents += [first + 1 + node, *range(len(parents), len(parents) + len(chain) - 1)]
    return Span(seq, start, length + len(guests), want, "walk", parents, seat=seq.seat, guests=guests)


def ends_in_one_chain(guests: Guests, last: int) -> bool:
    """Whether all guests are one chain behind node ``last`` (-1: the anchor), so that a chain of drafts with them is
    one chain of rows."""
    return len(guests) == 1 and len(guests.get(last, ())) == 1


def rows_left(seq: Sequence) -> int:
    """Number of rows until the next token, the draft not counted: one for a decode, more for a prompt."""
    return len(seq.tokens) + seq.num_drawn - seq.num_computed - seq.num_ahead


def trim_draft(seq: Sequence, spare: int, max_model_len: int) -> None:
    """Drop a draft that exceeds the ``spare`` rows or the sequence's last position, and guests that do not fit. A
    forced chain is cut instead: its rest is forced again in the next step."""
    limit = min(max_model_len, seq.num_prompt + seq.request.max_tokens) - 1
    most = min(spare, limit - len(seq.tokens))
    if seq.forgetting is not None:
        most, seq.guests = min(most, seq.forgetting.due - len(seq.tokens)) if seq.forgetting.drafts else 0, {}
    if len(seq.draft) > most:
        kept = seq.draft[: min(most, seq.num_forced)] if most > 0 else []
        seq.drop_draft()
        seq.draft, seq.num_forced = kept, len(kept)
    elif seq.guests and seq.num_look_ahead > min(spare, max_model_len - len(seq.tokens)):
        seq.guests = {}


def room_to_start(seq: Sequence, page_slots: int) -> int:
    """Number of tokens that must fit at admission: the known ones and a page more, or all there will ever be if fewer.
    The last token is never computed."""
    needed = max(seq.num_tokens, min(seq.num_tokens + page_slots, seq.num_prompt + seq.request.max_tokens - 1))
    return needed if seq.forgetting is None else min(needed, seq.forgetting.most)


def page_aligned(start: int, length: int, page_slots: int) -> int:
    """Length of the longest span of at most ``length`` rows that ends at the end of a page; 0: there is none."""
    return max(0, (start + length) // page_slots * page_slots - start)


def chunk(seq: Sequence, left: int, most: int | None, pages: PageManager) -> int:
    """Number of rows of its prompt that a sequence gets of ``left``, and of ``most`` that a span may have. The chunk
    ends where a KV policy or a snapshot asks for it, and at the end of a page when more follows."""
    start, needed = seq.num_computed + seq.num_ahead, rows_left(seq)
    if seq.forgetting is not None:
        needed = min(needed, rows_until_stop(seq, start))
        if (least := least_rows(seq, start)) > 1:
            return least if least <= left else 0
    length = min(needed, left, most or left)
    if (cut := pages.cut(seq, start, length)) < length:
        return cut
    if length < needed:
        length = page_aligned(start, length, pages.page_slots) or length
    return max(0, length)


def round_down(step: Step, budget: int, page_slots: int) -> None:
    """Cut the last chunk of a step that mixes decodes and prompts, so that it ends with a whole row tile."""
    extra = (budget - step.left) % ROW_TILE
    if budget % ROW_TILE or not extra:
        return
    chunks = [seq for seq, span in step.spans.items() if span.start + span.length < seq.num_tokens]
    if not chunks or len(chunks) == len(step.spans):
        return
    seq = chunks[-1]
    if length := page_aligned(step.spans[seq].start, step.spans[seq].length - extra, page_slots):
        step.remove(seq)
        step.add(seq, length)
