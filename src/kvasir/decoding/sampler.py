"""From logits to tokens: batched over rows, each row by its own request's parameters.

The order of the pipeline is fixed (a change of it changes what users get):

1. logit bias
2. allowed ids, banned ids (the last tokens of bad words)
3. EOS and stop ids, until ``min_tokens``
4. penalties: repetition (prompt and output), then frequency and presence (output)
5. grammar
6. temperature
7. top-k, 8. top-p (over what top-k left), 9. min-p (relative to the most likely token)
10. Gumbel noise keyed by (stream, position of the predicting row, token id); 11. argmax, the lowest id on a tie

Greedy rows (temperature below 1e-5) skip 6-10. Ids at or above ``tokenizer_size`` do not exist here. ``raw``
log-probabilities are of the logits as they came; ``processed`` ones are of the distribution after 9 (after 5 when greedy).

A row that holds NaN, +Inf or nothing but -Inf, or of which the request allows no token, fails its own sequence and no other.

Legend: M rows, S sampled rows, R rows with temperature, Q reports, K sparse (row, id) pairs, V vocabulary, W mask words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch

from kvasir.decoding import max_accept
from kvasir.decoding.filters import keep_top, largest
from kvasir.decoding.penalties import penalise
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
from kvasir.kernels.noise import gumbel
from kvasir.kernels.report import report_rows
from kvasir.kernels.sample import sample_rows
from kvasir.types import Sequence, Span, SpanResult, TokenLogprob

SLICE_BYTES = 64 << 20  # of fp32 logits at a time; scratch is a few times that
NUMERIC_ERROR = "internal_numeric_error: the model's output holds NaN or infinity, or rules out every token"
MASKED_ERROR = "no_token_allowed: the request's constraints leave no token to choose from"
INF = float("inf")
NEG_INF = -INF


class StepOutput(IntEnum):
    """What a step over static buffers puts out by itself: hidden states, and this pipeline does the rest; draws; or draws with the
    log-probability, rank and confidence of each."""

    HIDDEN = 0
    DRAWS = 1
    REPORTS = 2


@dataclass(slots=True)
class _Reports:
    """Of one slice, on the device: ``found`` fp32 [3, Q], log-probability, rank and confidence of the token; [Q, A] alternatives (A the
    most asked for)."""

    found: torch.Tensor
    top_logprobs: torch.Tensor
    top_ids: torch.Tensor


class Sampler:
    """Per-sequence sampling state (one entry per ``Sequence.seat``) and the pipeline. Reads nothing back from the device."""

    def __init__(
        self, vocab_size: int, tokenizer_size: int, max_seqs: int, device: torch.device | str, eos_ids: tuple[int, ...]
    ) -> None:
        self.vocab_size = vocab_size
        self.tokenizer_size = tokenizer_size
        self.device = torch.device(device)
        self.eos_ids = tuple(eos_ids)
        self.max_seqs = max_seqs
        self._states: list[SeatState | None] = [None] * max_seqs
        self.num_bound = 0  # open rows whose draws depend on the tokens before
        self._num_odd = 0  # open rows that are not always simple
        self._num_reporting = 0  # open rows that ask for the drawn token's log-probability and no more
        self.num_top = (
            0  # likeliest tokens of every row that the steps to come report, by the logits as the model gave them
        )
        self.by_blocks = False  # whether drafts may have been drawn to be verified by blocks
        self.kept: list[torch.Tensor] | None = (
            None  # where it is a list, what drawn rows were drawn from is added: [S, V] log-weights
        )

    # ------------------------------------------------------------------------------------------------ per-sequence state

    def open(self, seq: Sequence) -> None:
        """Set up seat ``seq.seat`` from the request and ``seq.tokens``: the same at the start, after preemption, and after a
        replay. With a grammar, ``seq.state["grammar"]`` holds its compiled matcher, at the start; it is copied."""
        if self._states[seq.seat] is not None:
            self.close(seq.seat)
        state = self._states[seq.seat] = SeatState(seq, self.vocab_size, self.tokenizer_size, self.eos_ids)
        self.num_bound += state.bound
        self._num_odd += not state.always_simple
        self._num_reporting += state.reports

    def close(self, seat: int) -> None:
        """Free a seat for another sequence."""
        state = self._states[seat]
        self.num_bound -= state.bound
        self._num_odd -= not state.always_simple
        self._num_reporting -= state.reports
        self._states[seat] = None

    def numbers(self, seat: int) -> tuple[float, int, float, float, int]:
        """Temperature (0: greedy), top-k, top-p, min-p and the k of the confidence of an open seat (off: the tokenizer's size, 1, 0, 0)."""
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
        """What a step of these decodes must put out: where they need nothing but the numbers of their rows, the device draws by itself."""
        states = self._states
        if (
            self.num_top
            or self.kept is not None
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

    def accepted(self, seq: Sequence, tokens: Many[int]) -> None:
        """``tokens`` were committed: counts and the grammar of the row move on."""
        state = self._states[seq.seat]
        assert state is not None, f"{seq} is not open"
        if state.bound:
            state.accepted(list(tokens))

    # ---------------------------------------------------------------------------------------------------------- one step

    def pack(self, spans: list[Span]) -> SampleBatch:
        """Host side: what each logit row is conditioned on, in the order of ``StepBatch.logit_rows``."""
        return Packer(self._states, self.vocab_size).pack(spans)

    def sample(self, logits: torch.Tensor | Callable[[int, int], torch.Tensor], batch: SampleBatch) -> SampleOutput:
        """``logits``: [M, V] fp32 of the packed rows, left as they are, or a function (first, stop) that computes rows
        ``first`` .. ``stop``: it is called slice by slice, so that a long scored prompt never needs [M, V] at once."""
        step = max(1, SLICE_BYTES // (4 * self.vocab_size))
        draws, reports, tops = [], [], []
        blocks = max_accept.blocks(batch) if self.by_blocks else []
        for first in range(0, batch.num_rows, step):
            stop = min(first + step, batch.num_rows)
            part = logits[first:stop] if isinstance(logits, torch.Tensor) else logits(first, stop)
            assert part.shape == (stop - first, self.vocab_size), f"logits {tuple(part.shape)} for rows {first}:{stop}"
            whole = [
                (b, b.first - first) for b in blocks if first <= b.first and b.first + len(b.drafts) < stop
            ]  # others are walked
            drawn, found = self._slice(part.float(), batch.rows.cut(first, stop), whole)
            draws.append(drawn)
            reports.append(found)
            if self.num_top:
                tops.append(
                    to_host(part[:, : self.tokenizer_size].topk(min(self.num_top, self.tokenizer_size)).indices)
                )
        return (
            SampleOutput(batch, torch.cat(draws, 1) if len(draws) != 1 else draws[0], reports, tops)
            if draws
            else SampleOutput(batch, None, [])
        )

    def _slice(
        self, logits_MV: torch.Tensor, rows: Rows, blocks: Many[tuple[max_accept.Block, int]] = ()
    ) -> tuple[torch.Tensor, _Reports | None]:
        """Returns the draws [3, M] fp32 (token id, largest logit, largest allowed logit) and the reports of the slice."""
        whole, padded = len(rows.sampled) == np.count_nonzero(rows.sampled), self.tokenizer_size < self.vocab_size
        raw = logits_MV[:, : self.tokenizer_size] if padded else logits_MV
        if (
            self.device.type == "cuda"
            and whole
            and not rows.reports[3].any()
            and not rows.constrained
            and not blocks
            and self.kept is None
        ):
            drawn = self._draw_plain(logits_MV, rows)
            return drawn, self._report(raw, raw, drawn[0].long(), rows) if len(rows.reports[0]) else None
        if whole:
            tokens, best, final_SV = self._draw(raw, rows)
        else:
            tokens = torch.zeros(len(raw), dtype=torch.int64, device=raw.device)
            best, final_SV = torch.zeros_like(tokens, dtype=torch.float32), raw
            if rows.sampled.any():
                at = self._send(np.flatnonzero(rows.sampled))
                tokens[at], best[at], final_SV = self._draw(raw[at], rows.drawn())
        if self.kept is not None and rows.sampled.any():
            self.kept.append(final_SV)
        if blocks:
            place = np.cumsum(rows.sampled) - 1  # among the sampled rows
            drawn_S = tokens if whole else tokens[at]
            max_accept.accept([b for b, _ in blocks], place[[first for _, first in blocks]], final_SV, drawn_S)
            if not whole:
                tokens[at] = drawn_S
        # Where all is allowed, the two are the same. Both pass NaN on.
        largest = best if whole and not padded and final_SV is raw else logits_MV.amax(-1)
        found = self._report(raw, final_SV, tokens, rows) if len(rows.reports[0]) else None
        return torch.stack([tokens.float(), largest, best]), found  # ids below 2^24 are exact in fp32

    def _draw_plain(self, logits_MV: torch.Tensor, rows: Rows) -> torch.Tensor:
        """The draws of rows that need nothing but stages 6-11, by the same function as steps that draw on the device."""
        values = rows.values
        numbers = np.empty(
            (3, -(-len(values) // 4) * 4), np.float32
        )  # of 16 bytes: kernels are compiled anew for pointers aligned otherwise
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

    def _draw(self, raw_SV: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens [S] int64, the largest allowed logit [S], and the processed log-weights [S, V]."""
        x_SV = self._constrain(raw_SV, rows)
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

    def _constrain(self, raw_SV: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Stages 1-5; the input itself when no row asks for any. -inf absorbs what follows, so all masks may come last."""
        if not rows.constrained:
            return raw_SV
        x_SV = raw_SV.clone(memory_format=torch.contiguous_format)
        if len(rows.bias[0]):
            row, ids, value = map(self._send, rows.bias)
            x_SV[row, ids] += value
        if len(rows.banned[0]):
            row, ids = map(self._send, rows.banned)
            x_SV[row, ids] = x_SV.new_full((), NEG_INF)  # a Python number would be copied over, and waited for
        if len(rows.counted[0]):
            row, ids, counts = map(self._send, rows.counted)
            strength_S3 = self._send(rows.values[:, [REPETITION, FREQUENCY, PRESENCE]].astype(np.float32))
            penalise(x_SV, row, ids, counts, strength_S3[row])
        if len(rows.masks[0]):
            row, words_KW = map(self._send, rows.masks)
            bits = (words_KW[:, :, None] >> torch.arange(32, device=x_SV.device, dtype=torch.int32)) & 1
            allowed_KV = bits.view(len(row), -1)[:, : self.tokenizer_size] != 0
            x_SV[row] = x_SV[row].masked_fill(~allowed_KV, NEG_INF)
        return x_SV

    def _filter(self, y_RV: torch.Tensor, values: np.ndarray) -> None:
        """Stages 7-9 in place. ``y_RV``: log-weights whose row maximum is 0."""
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
            drawn = np.cumsum(rows.sampled) - 1  # place among the sampled rows
            q = np.flatnonzero(processed)
            x_QV[self._send(q)] = final_SV[self._send(drawn[row[q]])]
        token_Q = torch.where(known_Q < 0, tokens_M[row_Q], known_Q)
        found = report_rows(x_QV, token_Q, self._send(sure.astype(np.int32)), self.tokenizer_size)
        shown = min(int(alternatives.max()), self.tokenizer_size)
        if not shown:
            return _Reports(found, found[0, :, None][:, :0], token_Q[:, None][:, :0])
        top_logprobs, top_ids = largest(torch.log_softmax(x_QV, -1), shown)
        return _Reports(
            found, torch.where(top_ids == token_Q[:, None], found[0, :, None], top_logprobs), top_ids
        )  # the token's own is one number

    def _send(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)


class SampleOutput:
    """What a step drew. ``draws`` [3, M] stay on the device; what ``read`` needs is on its way to the host from the start, so
    that reading waits for this step and not for those launched after it."""

    def __init__(
        self,
        batch: SampleBatch,
        draws: torch.Tensor | None,
        reports: list[_Reports | None],
        tops: list[torch.Tensor] = (),
    ) -> None:
        self._batch = batch
        self._tops = tops
        self.draws = draws
        self._host_draws = None if draws is None else to_host(draws)
        self._reports = [
            _Reports(*map(to_host, (r.found, r.top_logprobs, r.top_ids))) for r in reports if r is not None
        ]
        self._done = torch.cuda.Event() if draws is not None and draws.is_cuda else None
        if self._done is not None:
            self._done.record()

    def read(self) -> list[SpanResult]:
        """Wait for the device; one result per span, in plan order. Spans that wanted nothing have an empty one."""
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
        if errors:  # what the model allows and the request forbids is the request's
            forbidding = {*batch.rows.banned[0].tolist(), *batch.rows.masks[0].tolist()}
            errors |= {m: MASKED_ERROR for m in errors if m in forbidding and NEG_INF < largest[m] < INF}
        for m, message in batch.errors.items():
            errors[m] = message
        drawn, scored = self._read_reports()
        tops = [row for part in self._tops for row in part.tolist()]
        results = []
        for span, wanted, first, row_tokens in zip(batch.spans, batch.wanted, batch.first, batch.row_tokens):
            if not wanted:
                results.append(SpanResult())
                continue
            rows = {i: first + n for n, i in enumerate(wanted)}
            results.append(resolve_span(span, row_tokens, rows, tokens, errors, drawn, scored))
            if tops and row_tokens:
                results[-1].top = [tops[rows[i]] for i in span.want.get("sample", ())]
        return results

    def _read_reports(self) -> tuple[dict[int, TokenLogprob], dict[int, TokenLogprob]]:
        """By logit row: reports of sampled tokens, and of known ones (without the token of the former, set by the walk)."""
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
    """A copy of a device tensor in pinned memory, complete once what was launched so far is; a host tensor itself."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def resolve_span(
    span: Span,
    row_tokens: list[int],
    rows: Mapping[int, int] | Many[int],
    tokens: list[int],
    errors: dict[int, str],
    drawn: dict[int, TokenLogprob],
    scored: dict[int, TokenLogprob],
) -> SpanResult:
    """One span's result. ``row_tokens``: its tokens, if it verifies a draft; ``rows``: row in the span -> logit row."""
    result = SpanResult()
    score, sample = span.want.get("score", range(0)), span.want.get("sample", range(0))
    for i in score:
        if rows[i] in errors:
            return SpanResult(error=errors[rows[i]])
    if score:
        result.scores = [scored[rows[i]] for i in score]
    path = _walk(span, row_tokens, sample, rows, tokens)
    good = next((n for n, i in enumerate(path) if rows[i] in errors), len(path))
    if sample and not good:
        return SpanResult(error=errors[rows[path[0]]])
    # An error further down the path is left for the step that starts there, as without a draft.
    result.tokens = [tokens[rows[i]] for i in path[:good]]
    if row_tokens:
        result.path = path[:good]
    if drawn and path and rows[path[0]] in drawn:
        result.logprobs = [drawn[rows[i]] for i in path[:good]]
        for token, entry in zip(result.tokens, result.logprobs):
            entry.id = token
    return result


def _walk(
    span: Span, row_tokens: list[int], sample: range, rows: Mapping[int, int] | Many[int], tokens: list[int]
) -> list[int]:
    """The rows of the span whose draws are emitted: from the first sampled row on, as long as the draft holds what was drawn."""
    if not sample:
        return []
    if len(sample) == 1:
        return [sample[0]]
    children: dict[tuple[int, int], int] = {}
    for i in sample[1:]:
        children.setdefault((span.parents[i] if span.parents else i - 1, row_tokens[i]), i)
    path, i = [], sample[0]
    while True:
        path.append(i)
        if (i, tokens[rows[i]]) not in children:
            return path
        i = children[i, tokens[rows[i]]]
