"""The static buffers of decode steps: what a step starts from and what it puts out, on the device, and the host memory
it crosses in.

Page tables, sampling parameters and last tokens lie on the device already (``device_seats.py``). A step sends two
numbers for each row (``draft_words`` where drafts are verified), and what has changed in the seats since.

Legend: B rows of a bucket, T rows of a step, K changed words, E model dim.
"""

from __future__ import annotations

from itertools import cycle

import numpy as np
import torch

from kvasir.engine.ways.device_seats import ROW_WORDS, UNKNOWN, DeviceSeats, draft_words
from kvasir.types import Span

PLAIN_WORDS = 3  # int64 words of a row where no keys are shared: seat, position, and with drafts the token


class DecodeBuffers:
    """Buffers for up to ``max_rows`` rows. ``wide`` says whether spans with drafts may share keys or have guests, which
    takes ``ROW_WORDS`` words a row. ``num_guesses``: guesses of each guest, two numbers each."""

    def __init__(
        self,
        seats: DeviceSeats,
        max_rows: int,
        wide: bool,
        hidden_size: int,
        dtype: torch.dtype,
        num_guesses: int = 0,
    ) -> None:
        self._seats, device = seats, seats.words.device
        self.device, self.num_guesses = device, num_guesses
        self._num_words = ROW_WORDS if wide else PLAIN_WORDS
        self._inbox = torch.zeros(self._num_words * max_rows, dtype=torch.int64, device=device)
        self.row_start = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self.logit_rows = torch.arange(max_rows, dtype=torch.int64, device=device)
        self.hidden = torch.zeros(max_rows, hidden_size, dtype=dtype, device=device)
        # Draws [3, B], then reports [3, B], then guesses [2 * num_guesses, B].
        numbers = 6 + 2 * num_guesses
        self.draws = torch.zeros(numbers * max_rows, dtype=torch.float32, device=device)
        self.starts: list[int] = []  # the host's copy of the rows' positions
        self.places: list[list[int]] = []  # by cache group, their places; empty where nothing is ever forgotten
        # Two stages take turns: a stage is written again only after the step that used it was read.
        self._stages = cycle([Stage(max_rows, self._num_words, device, numbers) for _ in range(2)])

    def words(self, size: int) -> torch.Tensor:
        """The inbox of a bucket of ``size`` rows [words, B]: seats and positions; with drafts their tokens (-1: the
        seat's) behind them, or all of ``draft_words``."""
        return self._inbox[: self._num_words * size].view(-1, size)

    def send_decodes(self, spans: list[Span], size: int) -> Stage:
        """Bring the seats and positions of decodes to the device, padded to ``size`` rows. Returns the host memory in
        use."""
        stage, count, starts = next(self._stages), len(spans), [span.start for span in spans]
        seats_S, starts_S = stage.inbox[:count], stage.inbox[size : size + count]
        seats_S[:], starts_S[:] = [span.seat for span in spans], starts
        stage.inbox[count:size], stage.inbox[size + count : 2 * size] = self._seats.padding, 0
        self._send(stage, spans, seats_S, starts_S, 2 * size)
        self._seats.drawn(seats_S, starts_S + 1)
        self.starts = starts + [0] * (size - count)
        self._place(spans, size)
        return stage

    def send_drafts(self, spans: list[Span], size: int) -> tuple[Stage, np.ndarray]:
        """The same with a row for each draft behind its sequence's own, and the drafts' tokens. Returns the host memory
        in use and the ``draft_words`` [``ROW_WORDS``, T] of the spans."""
        stage, count = next(self._stages), sum(span.length for span in spans)
        words = np.empty((ROW_WORDS, size), np.int64)
        draft_words(spans, self._seats.padding, words)
        sent = self._num_words
        stage.inbox[: sent * size] = words[:sent].reshape(-1)
        own = words[:, :count]
        seats, starts = own[:2, own[4] == 0]
        self._seats.drawn(seats, starts)  # as good as drawn for this step: the tokens come along
        self._send(stage, spans, seats, starts, sent * size)
        self._seats.drawn(seats, UNKNOWN)  # which of its draws a seat goes on from is known when they are read
        self.starts = words[1].tolist()
        self._place(spans, size)
        return stage, own

    def pad(self, size: int) -> None:
        """Fill the inbox with a step of padding rows alone."""
        words = np.empty((ROW_WORDS, size), np.int64)
        draft_words([], self._seats.padding, words)
        self._inbox[: self._num_words * size].copy_(torch.from_numpy(words[: self._num_words].reshape(-1)))
        self.starts = [0] * size
        self._place([], size)

    def _place(self, spans: list[Span], size: int) -> None:
        """Derive the places of the rows from their positions."""
        if (forgotten := self._seats.kept.forgotten) is not None:
            lost = [span.seq.forgotten for span in spans for _ in range(span.length)]
            lost += [()] * (size - len(lost))
            self.places = [
                [start - (each[group] if each else 0) for start, each in zip(self.starts, lost)]
                for group in range(len(forgotten))
            ]

    def _send(self, stage: Stage, spans: list[Span], seats_S: np.ndarray, starts_S: np.ndarray, num_words: int) -> None:
        places, content = self._seats.changes(spans, seats_S, starts_S)
        self._inbox[:num_words].copy_(stage.inbox_tensor[:num_words], non_blocking=True)
        if places:
            at, words = stage.changes(places, content, self.device)
            self._seats.words.index_copy_(0, at, words)


class Stage:
    """Pinned host memory of one step: what goes to the device, and the ``numbers`` a row that come back."""

    def __init__(self, max_rows: int, words: int, device: torch.device, numbers: int = 6) -> None:
        pinned = device.type == "cuda"
        self._pinned = pinned
        self.inbox_tensor = torch.zeros(words * max_rows, dtype=torch.int64, pin_memory=pinned)
        self.inbox = self.inbox_tensor.numpy()
        self._draws = torch.zeros(numbers * max_rows, dtype=torch.float32, pin_memory=pinned)
        self._draws_array = self._draws.numpy()
        self._done = torch.cuda.Event() if pinned else None
        self._changes = torch.zeros(0, dtype=torch.int64)

    def changes(self, places: list[int], content: list[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Places int64 [K] and their content int32 [K] on the device, in one copy."""
        count = len(places)
        size = count + (count + 1) // 2  # two words of content fit into one of a place
        if len(self._changes) < size:
            self._changes = torch.zeros(max(256, 2 * size), dtype=torch.int64, pin_memory=self._pinned)
        self._changes.numpy()[:count] = places
        self._changes.view(torch.int32).numpy()[2 * count : 3 * count] = content
        there = self._changes[:size].to(device, non_blocking=True)
        return there[:count], there.view(torch.int32)[2 * count : 3 * count]

    def take(self, draws: torch.Tensor) -> None:
        """Start to fetch the draws of the step launched last."""
        self._draws[: len(draws)].copy_(draws, non_blocking=True)
        if self._done is not None:
            self._done.record()

    def read(self, size: int) -> np.ndarray:
        """Wait for the draws [3, size]."""
        if self._done is not None:
            self._done.synchronize()
        return self._draws_array[: 3 * size].reshape(3, size)

    def reports(self, size: int) -> np.ndarray:
        """The reports [3, size] of a step that reports, after ``read``."""
        return self._draws_array[3 * size : 6 * size].reshape(3, size)

    def guesses(self, size: int, count: int) -> np.ndarray:
        """The guesses [2 count, size] of a step with guests, after ``read``."""
        return self._draws_array[6 * size : (6 + 2 * count) * size].reshape(2 * count, size)
