"""Gather the logit rows of a step and everything each row is conditioned on, on the host, as numpy arrays.

A *row* here is a row of logits. A decode has one, a draft of k tokens k + 1, and a scored prompt one a token. Each
sampled row is conditioned on its own history: the sequence's tokens, then the draft tokens on the row's path. That is
why verification is plain sampling.

Legend: M rows, K sparse (row, id) pairs, Q reports (a row whose log-probabilities are wanted), W = ceil(V / 32) mask
words.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvasir.decoding.grammar_rows import add_mask, bitset, holds
from kvasir.decoding.penalties import History, banned_by_words
from kvasir.decoding.steering import Steering
from kvasir.kernels.sample import GREEDY_BELOW
from kvasir.types import Sequence, Span

if TYPE_CHECKING:
    from kvasir.decoding.matcher import Matcher

NUM_PARAMS = 7  # temperature, top-p, log(min-p), repetition, frequency, presence, top-k
TEMPERATURE, TOP_P, LOG_MIN_P, REPETITION, FREQUENCY, PRESENCE, TOP_K = range(NUM_PARAMS)
_NONE, _NO_VALUES, _NO_MASKS = np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros((0, 1), np.int32)


class SeatState:
    """The sampler's state of one open seat. Built from the request and the known tokens alone."""

    def __init__(self, seq: Sequence, vocab_size: int, tokenizer_size: int, eos_ids: tuple[int, ...]) -> None:
        request = seq.request
        p = self.params = request.params
        self.num_prompt = seq.num_prompt
        self.values = _values(p, tokenizer_size)
        ids = [i for i in p.logit_bias if i < tokenizer_size]
        self.bias = (np.asarray(ids, np.int64), np.asarray([p.logit_bias[i] for i in ids], np.float32)) if ids else None
        self.allowed = None if p.allowed_token_ids is None else bitset(p.allowed_token_ids, vocab_size)
        self.words = request.bad_words
        self.tail = max((len(word) - 1 for word in self.words), default=0)
        ends = {*p.stop_token_ids, *(() if p.ignore_eos else eos_ids)}
        self.min_tokens = p.min_tokens
        self.ends = sorted(i for i in ends if i < tokenizer_size)
        self.history: History | None = None
        if p.repetition_penalty != 1.0 or p.frequency_penalty or p.presence_penalty:
            self.history = History(request.prompt_ids if p.repetition_penalty != 1.0 else [], seq.output)
        self.error = ""
        self.steering = Steering(request.processors, request.prompt_ids, seq.output) if request.processors else None
        self.matcher: Matcher | None = None
        if p.grammar is not None:
            self.start_matcher(seq)
        # A step can report by itself only the drawn token's log-probability, from the model's own logits.
        self.reports = p.logprobs == 0 and p.logprobs_mode == "raw"
        self._settle()

    def _settle(self) -> None:
        """Note what the draws of this sequence need, apart from its numbers."""
        steering = self.steering
        # The allowed draws depend on the tokens before: the next row cannot be packed until the host knows them.
        self.bound = bool(self.words) or self.history is not None or self.matcher is not None
        self.plain = not self.bound and self.bias is None and self.allowed is None and steering is None
        self.bound |= steering is not None and steering.bound
        self.follows = self.bound or steering is not None  # wants to hear of committed tokens
        self.forces = self.matcher is not None or (steering is not None and steering.forces)
        # Whether anything but a grammar may rule out tokens.
        self.restricted = bool(self.words or self.min_tokens) or self.allowed is not None or steering is not None
        self.always_simple = self.simple(0)

    def drop_steering(self) -> None:
        """Forget the processors, which want nothing more."""
        self.steering = None
        self._settle()

    def simple(self, num_output: int) -> bool:
        """Whether a draw after ``num_output`` tokens needs only temperature, top-k, top-p, min-p and noise.

        Its own log-probability may be asked for."""
        return (
            self.plain
            and (self.params.logprobs is None or self.reports)
            and (num_output >= self.min_tokens or not self.ends)
        )

    def start_matcher(self, seq: Sequence) -> None:
        """Start the grammar's matcher and advance it by the sequence's output."""
        self.matcher = seq.state["grammar"].copy()
        self._advance(seq.output)

    def forced(self) -> list[int]:
        """Return the tokens that must follow the known ones, whatever the logits. The run ends before a token that may
        end the sequence and before one that the request rules out: these are left to ordinary draws."""
        if self.error:
            return []
        steering = self.steering
        run = steering.run() if steering is not None else []
        if run and self.matcher is not None:  # what the grammar forbids is left to a draw, which fails
            legal = self.matcher.try_accept(run)
            self.matcher.rollback(legal)
            run = run[:legal]
        elif self.matcher is not None:
            run = self.matcher.forced()
            if steering is not None:
                run = run[: next((i for i, token in enumerate(run) if steering.minds(run[:i], token)), len(run))]
        stop = next((i for i, token in enumerate(run) if token in self.ends or not self._allows(token)), len(run))
        return run[:stop]

    def near(self) -> bool:
        """Whether a processor may force the next token or the one after it."""
        return self.steering is not None and self.steering.near()

    def _allows(self, token: int) -> bool:
        return self.allowed is None or holds(self.allowed, token)

    def accepted(self, tokens: list[int]) -> list[int]:
        """Take committed tokens. Returns the numbers of those that a processor forced."""
        if self.history is not None:
            self.history.add(tokens)
        self._advance(tokens)
        return self.steering.commit(tokens) if self.steering is not None else []

    def _advance(self, tokens: list[int]) -> None:
        if self.matcher is not None and not self.matcher.accept(tokens):
            self.matcher.failed()  # asks the library for its reason
            self.error = f"grammar_error: {self.matcher.error or 'the output left the grammar'}"


def _values(p: Any, tokenizer_size: int) -> np.ndarray:
    """Return the numbers of a request, in the order of the constants above, as float64 (exact for fp32 and for ids)."""
    greedy = p.temperature < GREEDY_BELOW
    top_k = p.top_k if 0 < p.top_k < tokenizer_size else tokenizer_size
    # Rounded to fp32, as the device has them.
    top_p, min_p = float(np.float32(p.top_p)), float(np.float32(p.min_p))
    return np.array(
        [
            0.0 if greedy else p.temperature,
            top_p if top_p < 1.0 else np.inf,
            np.log(min_p) if min_p > 0 else -np.inf,
            p.repetition_penalty,
            p.frequency_penalty,
            p.presence_penalty,
            top_k,
        ]
    )


# ---------------------------------------------------------------------------------------------------------- one batch


@dataclass(slots=True)
class Rows:
    """Rows of one slice of logits. Sparse parts are tuples of arrays; the first array is the row, in ascending
    order."""

    sampled: np.ndarray  # [M] bool
    values: np.ndarray  # [M, NUM_PARAMS] float64; zeros where not sampled
    streams: np.ndarray  # [M] int64 (the bits of a u64)
    positions: np.ndarray  # [M] int64
    bias: tuple[np.ndarray, ...]  # row, id, value
    banned: tuple[np.ndarray, ...]  # row, id
    steered: tuple[np.ndarray, ...]  # row, id, value, seat, token of the seat that makes the value void (-1: none)
    replaced: tuple[np.ndarray, ...]  # row, id, the id that takes its place (-1: none)
    counted: tuple[np.ndarray, ...]  # row, id, output count
    forced: tuple[np.ndarray, ...]  # row, the only id that it allows
    masks: tuple[np.ndarray, ...]  # row, [K, W] int32
    # row, known id or -1 for the sampled one, number of alternatives, 1 if processed, k of the confidence
    reports: tuple[np.ndarray, ...]

    @property
    def constrained(self) -> bool:
        """Whether any row has conditions in addition to the numbers of its request."""
        return any(len(part[0]) for part in self._conditions)

    @property
    def _conditions(self) -> tuple[tuple[np.ndarray, ...], ...]:
        return self.bias, self.banned, self.steered, self.replaced, self.counted, self.forced, self.masks

    def cut(self, first: int, stop: int) -> Rows:
        """Return rows ``first`` .. ``stop``, numbered from 0."""
        if first == 0 and stop == len(self.sampled):
            return self
        sparse = []
        for arrays in (*self._conditions, self.reports):
            low, high = np.searchsorted(arrays[0], [first, stop])
            sparse.append((arrays[0][low:high] - first, *(a[low:high] for a in arrays[1:])))
        return Rows(
            self.sampled[first:stop],
            self.values[first:stop],
            self.streams[first:stop],
            self.positions[first:stop],
            *sparse,
        )

    def drawn(self) -> Rows:
        """Return the sampled rows, numbered from 0. Only they have conditions; the reports are those of all rows."""
        place = np.cumsum(self.sampled) - 1
        conditions = [(place[part[0]], *part[1:]) for part in self._conditions]
        keep = self.sampled
        return Rows(keep[keep], self.values[keep], self.streams[keep], self.positions[keep], *conditions, self.reports)


@dataclass(slots=True)
class SampleBatch:
    """A plan as the sampler sees it.

    ``first[s]``: logit row of the first wanted row of span s; ``wanted[s]``: its wanted rows (0-based in the span,
    ascending); ``errors``: rows that fail whatever the logits are; ``row_tokens[s]``: the tokens of a span that
    verifies a draft (empty for others), since the sequence may have lost its draft by the time this is read."""

    spans: list[Span]
    wanted: list[range | list[int]]
    first: list[int]
    rows: Rows
    errors: dict[int, str]
    row_tokens: list[list[int]]
    guests: np.ndarray  # [G] int64: rows that hold guests, ascending

    @property
    def num_rows(self) -> int:
        return len(self.rows.sampled)


@dataclass(slots=True)
class Packer:
    """Collects rows span by span, in the order of ``StepBatch.logit_rows``."""

    states: list[SeatState | None]
    vocab_size: int
    count: int = 0
    sampled: list[bool] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    bias: list[tuple] = field(default_factory=list)
    banned: list[tuple[int, int]] = field(default_factory=list)
    held: list[tuple[int, int]] = field(default_factory=list)  # banned by ``min_tokens``
    steered: list[tuple] = field(default_factory=list)
    replaced: list[tuple[int, int, int]] = field(default_factory=list)
    counted: list[tuple] = field(default_factory=list)
    forced: list[tuple[int, int]] = field(default_factory=list)
    masks: list[tuple[int, np.ndarray]] = field(default_factory=list)
    reports: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    guests: list[int] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    pushed: dict[int, tuple[int, str]] = field(default_factory=dict)  # row: token that a processor forces, its name
    # Rows under a grammar whose masks are computed together: row, state, draft tokens before the row.
    under_grammar: list[tuple[int, Sequence, SeatState, list[int]]] = field(default_factory=list)

    def pack(self, spans: list[Span]) -> SampleBatch:
        wanted, first, row_tokens = [], [], []
        for span in spans:
            first.append(self.count)
            wanted.append(self._span(span))
            row_tokens.append(span.tokens() if span.commit == "walk" else [])
        if self.under_grammar:
            self._masks_together()
        guests = np.array(self.guests, np.int64)
        return SampleBatch(spans, wanted, first, self._rows(), self.errors, row_tokens, guests)

    def _span(self, span: Span) -> range | list[int]:
        sample, score = span.want.get("sample", range(0)), span.want.get("score", range(0))
        if not sample and not score:
            return range(0)
        if not score or not sample:
            wanted: range | list[int] = sample or score
        else:
            wanted = sorted({*sample, *score})
        guess = span.want.get("guess", range(0))
        if span.seq.seat < 0:  # it has ended since the step was launched: its rows are there, and nobody reads them
            self._plain_rows(span, np.zeros(NUM_PARAMS), wanted, sample)
            self._plain_rows(span, np.zeros(NUM_PARAMS), guess, guess)
            self.guests += range(self.count - len(guess), self.count)
            return range(0)
        state = self.states[span.seq.seat]
        assert state is not None, f"{span.seq} is not open"
        first = self.count
        self._plain_rows(span, state.values, wanted, sample)
        last = self.count
        if score:
            self._score(span, state, wanted, score, first)
        if sample:
            rows = range(first, last) if not score else [first + m for m, i in enumerate(wanted) if i in sample]
            self._conditions(span, state, sample, rows)
            if score and state.params.logprobs is not None:
                self.reports[:] = sorted(self.reports)
        if guess:
            self._plain_rows(span, state.values, guess, guess)
            self._guests(state, range(last, self.count))
            return [*wanted, *guess]
        return wanted

    def _guests(self, state: SeatState, rows: range) -> None:
        """Add the conditions of guest rows: those of the request that do not depend on tokens before."""
        self.guests += rows
        if state.bias is not None:
            self.bias += [(m, *state.bias) for m in rows]
        if state.allowed is not None:
            self.masks += [(m, state.allowed) for m in rows]

    def _plain_rows(self, span: Span, values: np.ndarray, wanted: range | list[int], sample: range) -> None:
        depth = _depths(span.parents) if span.parents else range(span.length)
        nothing = np.zeros(NUM_PARAMS)
        stream = span.seq.stream
        for i in wanted:
            drawn = i in sample
            self.sampled.append(drawn)
            self.values.append(values if drawn else nothing)
            self.streams.append(stream)
            self.positions.append(span.start + depth[i])
        self.count += len(wanted)

    def _score(self, span: Span, state: SeatState, wanted: range | list[int], score: range, first: int) -> None:
        """Ask for the log-probability of the known token after each scored row."""
        seq, alternatives = span.seq, state.params.prompt_logprobs or 0
        for m, i in enumerate(wanted, first):
            if i in score:
                at = span.start + i + 1
                known = seq.tokens[at] if at < len(seq.tokens) else seq.draft[at - len(seq.tokens)]
                self.reports.append((m, known, alternatives, 0, state.params.confidence))

    def _conditions(self, span: Span, state: SeatState, sample: range, rows: range | list[int]) -> None:
        """Add the conditions that depend on the rows' own history."""
        params = state.params
        if params.logprobs is not None:
            processed = int(params.logprobs_mode == "processed")
            self.reports.extend((m, -1, params.logprobs, processed, params.confidence) for m in rows)
        if state.error:
            self.errors.update(dict.fromkeys(rows, state.error))
            return
        free = slice(span.seq.num_forced, None)
        self.forced.extend(zip(rows, span.seq.draft[: span.seq.num_forced]))  # the rows before forced tokens
        # Number of output tokens before the first sampled row; some may still be in flight.
        num_output = span.start + sample.start + 1 - state.num_prompt
        if state.plain and num_output >= state.min_tokens:
            return
        paths = _paths(span, sample)
        for m, path in zip(rows, paths):
            if num_output + len(path) < state.min_tokens:
                self.held.extend((m, i) for i in state.ends)
            if state.bias is not None:
                self.bias.append((m, *state.bias))
            if state.steering is not None:
                self._steer(span, state.steering, m, num_output + len(path), path)
            if state.history is not None:
                self.counted.append((m, *state.history.after(path)))
            if state.words:
                known = span.seq.tokens[max(state.num_prompt, span.seq.num_tokens - state.tail) :] + path
                self.banned.extend((m, i) for i in banned_by_words(state.words, known))
        if state.matcher is not None:
            free_rows, free_paths = rows[free], paths[free]
            if len(free_rows) == 1:
                self.under_grammar.append((free_rows[0], span.seq, state, free_paths[0]))
            else:
                self._grammar_masks(span.seq, state, free_paths, free_rows)
        elif state.allowed is not None:
            self.masks.extend((m, state.allowed) for m in rows[free])

    def _steer(self, span: Span, steering: Steering, m: int, index: int, path: list[int]) -> None:
        """Add what the processors want of row ``m``, which predicts output token ``index``."""
        in_flight = index > span.seq.num_output + len(path)  # at most one token: steps behind drafts are not launched
        assert not (in_flight and steering.bound), "a processor that reads tokens was not given them"
        for ids, values, end in steering.bias(index, path, in_flight):
            self.steered.append((m, ids, values, span.seat, end))
        if (pair := steering.instead(path)) is not None:
            self.replaced.append((m, *pair))
        if (pushed := steering.force(path)) is not None:
            self.pushed[m] = pushed
            if len(path) >= span.seq.num_forced:  # the rows before a chain's tokens have them already
                self.forced.append((m, pushed[0]))

    def _masks_together(self) -> None:
        """Add the masks of all rows that are the only free one of their span. See ``_grammar_masks``."""
        from kvasir.decoding.matcher import fill_all  # loads the library, which most processes never need

        steps = [state.matcher.try_accept(path) for _, _, state, path in self.under_grammar]
        there = [row for row, count in zip(self.under_grammar, steps) if count == len(row[3])]
        bits = np.empty((len(there), -(-self.vocab_size // 32)), np.int32)
        good = fill_all([state.matcher for _, _, state, _ in there], bits)
        for (m, _, state, _), mask, filled in zip(there, bits, good):
            if filled:
                add_mask(self, m, mask, state)
        for (m, seq, state, path), count in zip(self.under_grammar, steps):
            if state.matcher.failed():
                self.errors[m] = f"grammar_error: {state.matcher.error}"
                if path:
                    state.start_matcher(seq)
            else:
                state.matcher.rollback(count)
        self.masks.sort(key=lambda entry: entry[0])

    def _grammar_masks(self, seq: Sequence, state: SeatState, paths: list[list[int]], rows: range | list[int]) -> None:
        """Add one mask a row, walking the matcher along each path and back.

        A row whose path leaves the grammar gets no mask: its parent's draw obeys the parent's mask, so the walk never
        reaches the row. Where the library gives up after a draft token, which may never be drawn, the walk ends, not
        the request."""
        matcher = state.matcher
        at: list[int] = []  # draft tokens that the matcher has consumed
        for n, (m, path) in enumerate(zip(rows, paths)):
            shared = next((i for i, (a, b) in enumerate(zip(at, path)) if a != b), min(len(at), len(path)))
            matcher.rollback(len(at) - shared)
            at = path[: shared + matcher.try_accept(path[shared:])]
            bits = np.empty(-(-self.vocab_size // 32), np.int32)
            if len(at) == len(path) and matcher.fill(bits):
                add_mask(self, m, bits, state)
            if matcher.failed():
                self.errors.update(dict.fromkeys(rows[n:], f"grammar_error: {matcher.error}"))
                if path:
                    state.start_matcher(seq)
                return
        matcher.rollback(len(at))

    def _steered(self) -> tuple[np.ndarray, ...]:
        """Flatten the biases of processors to arrays of row, id, value, seat and end by pair."""
        if not self.steered:
            return _NONE, _NONE, _NO_VALUES, _NONE, _NONE
        rows, ids, values, seats, ends = zip(*self.steered)
        sizes = [len(part) for part in ids]
        if all(isinstance(value, float) for value in values):
            flat = np.repeat(np.array(values, np.float32), sizes)
        else:
            flat = np.concatenate([np.broadcast_to(np.float32(v), n) for v, n in zip(values, sizes)])
        row, seat, end = np.repeat(np.array([rows, seats, ends], np.int64), sizes, axis=1)
        return row, np.concatenate(ids), flat, seat, end

    def _rows(self) -> Rows:
        banned, forced = (
            tuple(np.array(pairs, np.int64).T) if pairs else (_NONE, _NONE)
            for pairs in (sorted({*self.banned, *self.held}), self.forced)
        )
        masks = (
            (np.array([m for m, _ in self.masks], np.int64), np.stack([bits for _, bits in self.masks]))
            if self.masks
            else (_NONE, _NO_MASKS)
        )
        reports = tuple(np.array(self.reports, np.int64).T) if self.reports else (_NONE,) * 5
        return Rows(
            np.array(self.sampled, bool),
            np.array(self.values).reshape(-1, NUM_PARAMS),
            np.array(self.streams, np.uint64).view(np.int64),
            np.array(self.positions, np.int64),
            _ragged(self.bias),
            banned,
            self._steered(),
            tuple(np.array(self.replaced, np.int64).T) if self.replaced else (_NONE,) * 3,
            _ragged(self.counted),
            forced,
            masks,
            reports,
        )


def _ragged(parts: list[tuple]) -> tuple[np.ndarray, ...]:
    """Flatten [(row, ids, values)] to arrays of row, id and value (fp32) by pair."""
    if not parts:
        return _NONE, _NONE, _NO_VALUES
    rows = np.repeat(np.array([m for m, _, _ in parts], np.int64), [len(ids) for _, ids, _ in parts])
    return (
        rows,
        np.concatenate([ids for _, ids, _ in parts]),
        np.concatenate([v for _, _, v in parts]).astype(np.float32),
    )


def _depths(parents: list[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def _paths(span: Span, sample: range) -> list[list[int]]:
    """Return, for each sampled row, the draft tokens up to and including its own; [] for the row of the last known
    token."""
    known = span.seq.num_tokens - span.start  # rows of the span that hold known tokens
    assert sample.start >= known - 1, "a row before the last known token has nothing to sample"
    if not span.parents:
        return [span.seq.draft[: i + 1 - known] for i in sample]
    tokens = span.tokens()
    paths: list[list[int]] = []
    for i, parent in enumerate(span.parents[: len(tokens)]):  # guests are never sampled
        paths.append([] if i < known else [*paths[parent], tokens[i]])
    return [paths[i] for i in sample]
