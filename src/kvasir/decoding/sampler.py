"""Draw tokens from logits: batched over rows, each row by its own request's parameters.

The order of the pipeline is fixed, since another order would change what users get:

1. logit bias
2. allowed ids, banned ids (the last tokens of bad words)
3. EOS and stop ids, until ``min_tokens``; 3b. logit processors
4. penalties: repetition (prompt and output), then frequency and presence (output)
5. forced tokens (rows that allow one token each), grammar
6. temperature
7. top-k, 8. top-p (over what top-k left), 9. min-p (relative to the most likely token)
10. Gumbel noise keyed by (stream, position of the predicting row, token id); 11. argmax, the lowest id on a tie

Greedy rows (temperature below 1e-5) skip 6-10. Ids at or above ``tokenizer_size`` do not exist here. ``raw``
log-probabilities come from the model's logits; ``processed`` ones from the distribution after 9 (after 5 when greedy).

A row with NaN, +Inf or only -Inf, or without an allowed token, fails its own sequence and no other.

Legend: M rows, S sampled rows, R rows with temperature, Q reports, K sparse (row, id) pairs, V vocabulary, W mask
words.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch

from kvasir.decoding import max_accept, multi_round
from kvasir.decoding.filters import keep_top, largest
from kvasir.decoding.guesses import deal, guess, listed, within
from kvasir.decoding.penalties import penalise, replace
from kvasir.decoding.rows import (
    FREQUENCY,
    LOG_MIN_P,
    PRESENCE,
    REPETITION,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    Packer,
    Rows,
    SampleBatch,
    SeatState,
)
from kvasir.decoding.walk import resolve_span
from kvasir.kernels.mask_rows import mask_rows
from kvasir.kernels.noise import gumbel
from kvasir.kernels.report import report_rows
from kvasir.kernels.sample import sample_rows
from kvasir.types import Guessing, Sequence, Span, SpanResult, TokenLogprob

SLICE_BYTES = 64 << 20  # most bytes of fp32 logits handled at a time; scratch memory is a few times that
NUMERIC_ERROR = "internal_numeric_error: the model's output holds NaN or infinity, or rules out every token"
MASKED_ERROR = "no_token_allowed: the request's constraints leave no token to choose from"
NO_ROWS = np.zeros(0, np.int64)
INF = float("inf")
NEG_INF = -INF


class StepOutput(IntEnum):
    """Outputs that a step over static buffers computes by itself.

    HIDDEN: hidden states, and this pipeline does the rest. DRAWS: drawn tokens. REPORTS: drawn tokens with the
    log-probability, rank and confidence of each."""

    HIDDEN = 0
    DRAWS = 1
    REPORTS = 2


@dataclass(slots=True)
class _Reports:
    """Reports of one slice, on the device.

    ``found`` fp32 [3, Q]: log-probability, rank and confidence of the token; ``top_*`` [Q, A]: alternatives, where A is
    the largest number that a row asks for."""

    found: torch.Tensor
    top_logprobs: torch.Tensor
    top_ids: torch.Tensor


class Sampler:
    """The sampling state of each seat (``Sequence.seat``), and the pipeline. Reads nothing back from the device."""

    def __init__(
        self, vocab_size: int, tokenizer_size: int, max_seqs: int, device: torch.device | str, eos_ids: tuple[int, ...]
    ) -> None:
        self.vocab_size = vocab_size
        self.tokenizer_size = tokenizer_size
        self.device = torch.device(device)
        self.fused = self.device.type == "cuda"  # whether stages 6-11 are one function, which pays on a GPU
        self.eos_ids = tuple(eos_ids)
        self.max_seqs = max_seqs
        self._states: list[SeatState | None] = [None] * max_seqs
        self.num_bound = 0  # open seats whose draws depend on the tokens before
        self.num_following = 0  # open seats that must hear of committed tokens
        self.num_forcing = 0  # open seats whose requests may force tokens
        self._near: set[int] = set()  # open seats whose processors may force the next token or the one after it
        self.in_flight: torch.Tensor | None = None  # [seats] on the device: the token that each seat drew last
        self._num_odd = 0  # open seats that are not always simple
        self._num_reporting = 0  # open seats that ask for the drawn token's log-probability and no more
        self.guessing = Guessing()  # what the drafter wants of rows that hold guests
        self.num_top = 0  # number of most likely tokens, by the model's logits, that steps report for every row
        self.by_blocks = False  # whether drafts may have been drawn for verification by blocks
        self.kept: list[torch.Tensor] | None = None  # a list collects the [S, V] log-weights of all draws

    # ----------------------------------------------------------------------------------------------- per-sequence state

    def open(self, seq: Sequence) -> None:
        """Set up ``seq.seat`` from the request and ``seq.tokens``, in the same way at the start, after preemption and
        on replay.

        With a grammar, ``seq.state["grammar"]`` holds its compiled matcher in the initial state; a copy is used."""
        if self._states[seq.seat] is not None:
            self.close(seq.seat)
        state = self._states[seq.seat] = SeatState(seq, self.vocab_size, self.tokenizer_size, self.eos_ids)
        self._count(state, 1)
        if state.near():
            self._near.add(seq.seat)

    def close(self, seat: int) -> None:
        """Forget the sequence of this seat."""
        self._count(self._states[seat], -1)
        self._near.discard(seat)
        self._states[seat] = None

    def _count(self, state: SeatState, sign: int) -> None:
        self.num_bound += sign * state.bound
        self.num_following += sign * state.follows
        self.num_forcing += sign * state.forces
        self._num_odd += sign * (not state.always_simple)
        self._num_reporting += sign * state.reports

    def numbers(self, seat: int) -> tuple[float, int, float, float, int]:
        """Temperature (0: greedy), top-k, top-p, min-p and k of the confidence of an open seat.

        Parameters that are off have the values tokenizer size, 1, 0 and 0."""
        state = self._states[seat]
        values, top_p = state.values, state.values[TOP_P]
        return (
            values[TEMPERATURE],
            int(values[TOP_K]),
            top_p if top_p < INF else 1.0,
            state.params.min_p,
            state.params.confidence,
        )

    def output(self, spans: list[Span]) -> StepOutput:
        """Return what a step of these decodes must put out: draws, where the seats' numbers suffice for them."""
        states = self._states
        if (
            self.num_top
            or self.kept is not None
            or not within(self.guessing)
            and any(span.guests for span in spans)
            or self.by_blocks
            and any(max_accept.drawn(span) is not None for span in spans)
        ):
            return StepOutput.HIDDEN
        if self._num_odd and not all(states[span.seat].simple(span.start + 1 - span.seq.num_prompt) for span in spans):
            return StepOutput.HIDDEN
        return (
            StepOutput.REPORTS
            if self._num_reporting and any(states[span.seat].reports for span in spans)
            else StepOutput.DRAWS
        )

    def forced(self, seq: Sequence) -> list[int]:
        """Return the tokens that must follow the known ones of a sequence, whatever the logits: they can be verified as
        one chain whose rows allow one token each."""
        state = self._states[seq.seat]
        return state.forced() if state is not None and state.forces else []

    @property
    def forcing_soon(self) -> bool:
        """Whether a processor of some sequence may force the next token or the one after it."""
        return bool(self._near)

    def accepted(self, seq: Sequence, tokens: Many[int]) -> Many[int]:
        """Advance a sequence by committed ``tokens``. Returns the numbers of those that a processor forced."""
        state = self._states[seq.seat]
        assert state is not None, f"{seq} is not open"
        forced = state.accepted(list(tokens)) if state.follows else []
        if state.steering is not None:
            if state.steering.over():
                self._count(state, -1)
                state.drop_steering()
                self._count(state, 1)
            (self._near.add if state.near() else self._near.discard)(seq.seat)
        return forced

    # --------------------------------------------------------------------------------------------------------- one step

    def pack(self, spans: list[Span]) -> SampleBatch:
        """Gather, on the host, what each logit row is conditioned on, in the order of ``StepBatch.logit_rows``."""
        return Packer(self._states, self.vocab_size).pack(spans)

    def sample(self, logits: torch.Tensor | Callable[[int, int], torch.Tensor], batch: SampleBatch) -> SampleOutput:
        """Draw a token for each sampled row, and report what the rows ask for.

        ``logits``: [M, V] fp32 of the packed rows, which are not changed, or a function (first, stop) that computes
        rows ``first`` .. ``stop``. It is called slice by slice, so that a long scored prompt never needs [M, V] at
        once."""
        step = max(1, SLICE_BYTES // (4 * self.vocab_size))
        draws, reports, tops, guesses = [], [], [], []
        blocks = max_accept.blocks(batch) if self.by_blocks else []
        for first in range(0, batch.num_rows, step):
            stop = min(first + step, batch.num_rows)
            part = logits[first:stop] if isinstance(logits, torch.Tensor) else logits(first, stop)
            assert part.shape == (stop - first, self.vocab_size), f"logits {tuple(part.shape)} for rows {first}:{stop}"
            # Blocks that a slice cuts in two are walked instead.
            whole = [(b, b.first - first) for b in blocks if first <= b.first and b.first + len(b.drafts) < stop]
            low, high = np.searchsorted(batch.guests, [first, stop])
            guests = batch.guests[low:high] - first
            wide = part.float()
            drawn, found, guessed = self._slice(wide, batch.rows.cut(first, stop), whole, guests, own=wide is not part)
            draws.append(drawn)
            reports.append(found)
            if guessed is not None:
                guesses.append(to_host(guessed))
            if self.num_top:
                tops.append(
                    to_host(part[:, : self.tokenizer_size].topk(min(self.num_top, self.tokenizer_size)).indices)
                )
        return (
            SampleOutput(batch, torch.cat(draws, 1) if len(draws) != 1 else draws[0], reports, tops, guesses)
            if draws
            else SampleOutput(batch, None, [])
        )

    def _slice(
        self,
        logits_MV: torch.Tensor,
        rows: Rows,
        blocks: Many[tuple[max_accept.Block, int]] = (),
        guests: np.ndarray = NO_ROWS,
        own: bool = False,
    ) -> tuple[torch.Tensor, _Reports | None, torch.Tensor | None]:
        """Return the draws [3, M] fp32 (token id, largest logit, largest allowed logit) and the reports of a slice, and
        the guesses of its rows ``guests``. ``own``: nobody else needs the logits, so they may be written over."""
        whole, padded = len(rows.sampled) == np.count_nonzero(rows.sampled), self.tokenizer_size < self.vocab_size
        raw = logits_MV[:, : self.tokenizer_size] if padded else logits_MV
        if self.fused and whole and not rows.reports[3].any() and not blocks and self.kept is None:
            largest_M = logits_MV.amax(-1) if rows.constrained else None  # a model's NaN must not hide behind a mask
            x_MV = self._constrain(logits_MV, rows, in_place=own and not len(rows.reports[0]))
            drawn = self._draw_plain(x_MV, rows)
            if largest_M is not None:
                drawn[1] = largest_M
            found = self._report(raw, raw, drawn[0].long(), rows) if len(rows.reports[0]) else None
            return drawn, found, self._guess(x_MV, drawn[0], rows, guests)
        guessed = None
        if whole:
            x_SV = self._constrain(raw, rows)
            tokens, best, final_SV = self._draw(x_SV, rows)
            guessed = self._guess(x_SV, tokens, rows, guests)
        else:
            tokens = torch.zeros(len(raw), dtype=torch.int64, device=raw.device)
            best, final_SV = torch.zeros_like(tokens, dtype=torch.float32), raw
            if rows.sampled.any():
                at, own = self._send(np.flatnonzero(rows.sampled)), rows.drawn()
                x_SV = self._constrain(raw[at], own)
                tokens_S, best[at], final_SV = self._draw(x_SV, own)
                guessed = self._guess(x_SV, tokens_S, own, (np.cumsum(rows.sampled) - 1)[guests])
                tokens[at] = tokens_S
        if self.kept is not None and rows.sampled.any():
            self.kept.append(final_SV)
        if blocks:
            place = np.cumsum(rows.sampled) - 1  # index among the sampled rows
            drawn_S = tokens if whole else tokens[at]
            multi_round.accept([b for b, _ in blocks], place[[first for _, first in blocks]], final_SV, drawn_S)
            if not whole:
                tokens[at] = drawn_S
        # Where all tokens are allowed, the two maxima are the same. Both propagate NaN.
        largest = best if whole and not padded and final_SV is raw else logits_MV.amax(-1)
        found = self._report(raw, final_SV, tokens, rows) if len(rows.reports[0]) else None
        return torch.stack([tokens.float(), largest, best]), found, guessed  # ids below 2^24 are exact in fp32

    def _guess(self, x_SV: torch.Tensor, tokens_S: torch.Tensor, rows: Rows, at: np.ndarray) -> torch.Tensor | None:
        return guess(x_SV[:, : self.tokenizer_size], tokens_S, rows, at, self.guessing, self._send) if len(at) else None

    def _draw_plain(self, logits_MV: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Draw rows that need only stages 6-11 now, with the function that steps on the device use."""
        values = rows.values
        # Padded to 16 bytes: kernels would be compiled again for pointers of another alignment.
        numbers = np.empty((3, -(-len(values) // 4) * 4), np.float32)
        numbers[:, : len(values)] = (
            values[:, TEMPERATURE],
            np.minimum(values[:, TOP_P], 1.0),
            np.exp(values[:, LOG_MIN_P]),
        )
        temperature, top_p, min_p = self._send(numbers)[:, : len(values)]
        top_k = self._send(values[:, TOP_K].astype(np.int32))
        return sample_rows(
            logits_MV,
            temperature,
            top_k,
            top_p,
            min_p,
            self._send(rows.streams),
            self._send(rows.positions),
            self.tokenizer_size,
        )

    def _draw(self, x_SV: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return tokens [S] int64, the largest allowed logit [S], and the processed log-weights [S, V], of constrained
        logits ``x``."""
        best_S, tokens_S = x_SV.max(-1)
        hot = rows.values[:, TEMPERATURE].nonzero()[0]
        if not len(hot):
            return tokens_S, best_S, x_SV
        whole = len(hot) == len(x_SV)
        at = slice(None) if whole else self._send(hot)
        values = rows.values[hot]
        # Measured from the maximum, so that fp32 resolves the likely tokens at any temperature.
        y_RV = (x_SV[at] - best_S[at, None]).div_(self._send(values[:, TEMPERATURE, None].astype(np.float32)))
        self._filter(y_RV, values)
        final_SV = y_RV if whole else x_SV.index_copy(0, at, y_RV)
        noise_RV = gumbel(self._send(rows.streams[hot]), self._send(rows.positions[hot]), self.tokenizer_size)
        tokens_S[at] = noise_RV.add_(y_RV).argmax(-1)
        return tokens_S, best_S, final_SV

    def _constrain(self, raw_SV: torch.Tensor, rows: Rows, in_place: bool = False) -> torch.Tensor:
        """Apply stages 1-5. Returns the input itself with ``in_place``, and when no row asks for any. All masks may
        come last, since -inf stays -inf."""
        if not rows.constrained:
            return raw_SV
        x_SV = raw_SV if in_place else raw_SV.clone(memory_format=torch.contiguous_format)
        if len(rows.bias[0]):
            row, ids, value = map(self._send, rows.bias)
            x_SV[row, ids] += value
        if len(rows.banned[0]):
            row, ids = map(self._send, rows.banned)
            x_SV[row, ids] = x_SV.new_full((), NEG_INF)  # a Python number would be copied to the device synchronously
        if len(rows.steered[0]):
            row, ids, value, seat, end = map(self._send, rows.steered)
            if (rows.steered[4] >= 0).any():  # void where the token just drawn, which the host has not read, ends it
                value = value * (self.in_flight[seat] != end)
            x_SV.index_put_((row, ids), value, accumulate=True)
        if len(rows.replaced[0]):
            row, ids, other = map(self._send, rows.replaced)
            replace(x_SV, row, ids, other)
        if len(rows.counted[0]):
            row, ids, counts = map(self._send, rows.counted)
            strength_S3 = self._send(rows.values[:, [REPETITION, FREQUENCY, PRESENCE]].astype(np.float32))
            penalise(x_SV, row, ids, counts, strength_S3[row])
        if len(rows.forced[0]):
            row, ids = map(self._send, rows.forced)
            kept = x_SV[row, ids]
            x_SV.index_fill_(0, row, NEG_INF)
            x_SV[row, ids] = kept
        if len(rows.masks[0]):
            mask_rows(x_SV, *map(self._send, rows.masks))
        return x_SV

    def _filter(self, y_RV: torch.Tensor, values: np.ndarray) -> None:
        """Apply stages 7-9 in place. ``y_RV``: log-weights whose row maximum is 0."""
        narrow = np.flatnonzero((values[:, TOP_K] < self.tokenizer_size) | np.isfinite(values[:, TOP_P]))
        if len(narrow):
            at = slice(None) if len(narrow) == len(y_RV) else self._send(narrow)
            top_k = values[narrow, TOP_K].astype(np.int64)
            keep = keep_top(y_RV[at], self._send(top_k), self._send(values[narrow, TOP_P]), int(top_k.max()))
            y_RV[at] = y_RV[at].masked_fill(~keep, NEG_INF)
        if np.isfinite(values[:, LOG_MIN_P]).any():
            y_RV.masked_fill_(y_RV < self._send(values[:, LOG_MIN_P, None].astype(np.float32)), NEG_INF)

    def _report(self, raw_MV: torch.Tensor, final_SV: torch.Tensor, tokens_M: torch.Tensor, rows: Rows) -> _Reports:
        row, known, alternatives, processed, sure = rows.reports
        row_Q, known_Q = self._send(row), self._send(known)
        x_QV = (
            raw_MV if len(row) == len(raw_MV) and not processed.any() and (np.diff(row) == 1).all() else raw_MV[row_Q]
        )
        if processed.any():
            drawn = np.cumsum(rows.sampled) - 1  # index among the sampled rows
            q = np.flatnonzero(processed)
            x_QV[self._send(q)] = final_SV[self._send(drawn[row[q]])]
        token_Q = torch.where(known_Q < 0, tokens_M[row_Q], known_Q)
        found = report_rows(x_QV, token_Q, self._send(sure.astype(np.int32)), self.tokenizer_size)
        shown = min(int(alternatives.max()), self.tokenizer_size)
        if not shown:
            return _Reports(found, found[0, :, None][:, :0], token_Q[:, None][:, :0])
        top_logprobs, top_ids = largest(torch.log_softmax(x_QV, -1), shown)
        # The token's own log-probability is the same number in both places.
        return _Reports(found, torch.where(top_ids == token_Q[:, None], found[0, :, None], top_logprobs), top_ids)

    def _send(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)


class SampleOutput:
    """The draws of a step. ``draws`` [3, M] stay on the device.

    The copy to the host starts at once, so ``read`` waits for this step and not for those launched after it."""

    def __init__(
        self,
        batch: SampleBatch,
        draws: torch.Tensor | None,
        reports: list[_Reports | None],
        tops: list[torch.Tensor] = (),
        guesses: list[torch.Tensor] = (),
    ) -> None:
        self._batch = batch
        self._tops, self._guesses = tops, guesses
        self.draws = draws
        self._host_draws = None if draws is None else to_host(draws)
        self._reports = [
            _Reports(*map(to_host, (r.found, r.top_logprobs, r.top_ids))) for r in reports if r is not None
        ]
        self._done = torch.cuda.Event() if draws is not None and draws.is_cuda else None
        if self._done is not None:
            self._done.record()

    def read(self) -> list[SpanResult]:
        """Wait for the device. Returns one result a span, in plan order; spans that wanted nothing get an empty one."""
        batch = self._batch
        if self._done is not None:
            self._done.synchronize()
        ids, largest, best = ([], [], []) if self._host_draws is None else self._host_draws.tolist()
        tokens = list(map(int, ids))
        errors = {
            m: NUMERIC_ERROR
            for m, values in enumerate(zip(largest, best))
            if not (NEG_INF < values[0] < INF and values[1] > NEG_INF)
        }
        if errors:  # rows whose allowed tokens the request itself rules out are the request's fault
            rows = batch.rows
            parts = (rows.banned, rows.steered, rows.replaced, rows.forced, rows.masks)
            forbidding = {m for part in parts for m in part[0].tolist()}
            errors |= {m: MASKED_ERROR for m in errors if m in forbidding and NEG_INF < largest[m] < INF}
        for m, message in batch.errors.items():
            errors[m] = message
        drawn, scored = self._read_reports()
        tops = [row for part in self._tops for row in part.tolist()]
        guesses = deal(batch.spans, [row for part in self._guesses for row in listed(part.numpy())])
        results = []
        for span, wanted, first, row_tokens in zip(batch.spans, batch.wanted, batch.first, batch.row_tokens):
            if not wanted:
                results.append(SpanResult())
                continue
            rows = {i: first + n for n, i in enumerate(wanted)}
            results.append(resolve_span(span, row_tokens, rows, tokens, errors, drawn, scored))
            if tops and row_tokens:
                results[-1].top = [tops[rows[i]] for i in span.want.get("sample", ())]
            if span.guests and results[-1].error is None:
                results[-1].guesses = guesses[len(results) - 1]
        return results

    def _read_reports(self) -> tuple[dict[int, TokenLogprob], dict[int, TokenLogprob]]:
        """Return the reports by logit row: of sampled tokens, whose ids the walk fills in, and of known tokens."""
        found = self._reports
        drawn: dict[int, TokenLogprob] = {}
        scored: dict[int, TokenLogprob] = {}
        if not found:
            return drawn, scored
        row, known, alternatives, _, sure = (a.tolist() for a in self._batch.rows.reports)
        logprobs, ranks, confidences = torch.cat([r.found for r in found], 1).tolist()
        tops = [pair for r in found for pair in zip(r.top_ids.tolist(), r.top_logprobs.tolist())]
        for m, token, count, k, logprob, rank, confidence, (ids, values) in zip(
            row, known, alternatives, sure, logprobs, ranks, confidences, tops
        ):
            top = [(i, v) for i, v in zip(ids[:count], values[:count]) if v > NEG_INF]
            (drawn if token < 0 else scored)[m] = TokenLogprob(
                token, logprob, int(rank), top, confidence if k else None
            )
        return drawn, scored


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in pinned memory, complete when all work launched so far is. Host tensors are returned as they
    are."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
