"""Device state of running sequences, so that a decode step sends two numbers for each row.

A seat (``Sequence.seat``) holds a sequence's last drawn token, the numbers of its sampling parameters, its adapter and
its hooks with the positions from which they act, and its page tables. All seats lie in one flat int32 tensor, so that
any number of changes is one copy to the device and one scatter. The device writes the token itself, step by step: the
next step may be launched before the host has read it.

The last seat is for padding rows and belongs to no sequence. Its token is what was drawn for it last, it is greedy, and
its tables hold the dummy page.

Legend: R seats (the padding seat included), B rows of a step, S sequences, W pages in the longest table.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Many

import numpy as np
import torch

from kvasir.engine.ways.batch import row_variants, tree_ancestors, tree_positions
from kvasir.kernels.decode_rows import Kept
from kvasir.types import HOOK_SHIFT, Sequence, Span

# Where the sections of the flat tensor begin, in units of R words. A stream takes two words of a seat. Behind the
# tables stands, where sequences may forget, how many tokens each has forgotten in each group.
TOKEN, TEMPERATURE, TOP_K, TOP_P, MIN_P, STREAM, SURE = 0, 1, 2, 3, 4, 5, 7
VARIANT, VARIANT_FROM, HOOK, HOOK_FROM, TABLES = 8, 9, 10, 11, 12
# Position of a seat whose token the device does not have.
UNKNOWN = -1
# Words that a row takes in a step of drafts which share their keys: see ``draft_words``.
ROW_WORDS = 9
# Ancestor bits of a chain's rows, by place in the span.
CHAIN = np.array([(2 << i) - 1 - (i == 63) * (1 << 64) for i in range(64)], np.int64)


def draft_words(spans: list[Span], padding: int, words: np.ndarray) -> None:
    """Fill ``words``, int64 [``ROW_WORDS``, B], with what rows that verify drafts start from.

    The words of a row are: its sequence's seat; its place in the cache; its token (-1: the seat's); its position; its
    place in the span; the span's length; its ancestor bits; its guest (-1: none); its variant. Every padding row is a
    span of its own, with seat ``padding``."""
    heads: list[tuple[int, int, int, int]] = []  # seat, start, length, and first row in the step
    tokens: list[int] = []
    trees: list[tuple[Span, int]] = []
    hosts: list[tuple[Span, int]] = []  # spans with guests, and the row after their last
    varied: list[tuple[Span, int]] = []
    for span in spans:  # once a sequence and step: no call that is not needed
        seq, start, length, first = span.seq, span.start, span.length, len(tokens)
        heads.append((span.seat, start, length, first))
        tokens.append(seq.tokens[start] if start < len(seq.tokens) else -1)
        if span.varied:
            varied.append((span, first))
        if length > 1:
            tokens += seq.draft
            if span.guests:
                tokens += [-1] * len(span.guests)  # no draw equals this
                hosts.append((span, first + length))
            if span.parents:
                trees.append((span, first))
    count = len(tokens)
    own = words[:, :count]
    if heads:
        heads_4S = np.array(heads, np.int64).T
        own[0], own[1], own[5], own[4] = np.repeat(heads_4S, heads_4S[2], axis=1)
        own[4] = np.arange(count) - own[4]
        own[1] += own[4]
        own[2] = tokens
    # Chains that are longer than CHAIN run row by row, where nobody asks for ancestors.
    own[3], own[6], own[7], own[8] = own[1], CHAIN.take(own[4], mode="clip"), -1, 0
    for span, first in trees:
        end = first + span.length
        own[3, first:end], own[6, first:end] = tree_positions(span), 0
        tree_ancestors(span.parents, own[6, first:end, None])
    for span, end in hosts:
        own[7, end - len(span.guests) : end] = span.guests
    for span, first in varied:
        row_variants(span, own[8, first : first + span.length])
    words[:, count:] = np.array([padding, 0, -1, 0, 0, 1, 1, -1, 0])[:, None]


class DeviceSeats:
    """Seats for ``max_seqs`` sequences with up to ``max_pages`` pages in each group's table. ``states``: the groups, by
    number and behind all others, whose pages hold states. Their tables begin with the page that a short span reads and
    writes; nothing else in them counts. ``forgets``: whether sequences may forget tokens."""

    def __init__(
        self,
        max_seqs: int,
        max_pages: int,
        num_groups: int,
        device: torch.device | str,
        states: Collection[int] = (),
        forgets: bool = False,
    ) -> None:
        if states:
            max_pages = max(max_pages, 2)  # kernels read the page that a longer span would write
        self.count = count = max_seqs + 1
        self.padding = max_seqs
        counts = num_groups if forgets else 0
        size = count * (TABLES + num_groups * max_pages + counts)
        self.words = torch.zeros(size, dtype=torch.int32, device=device)

        def section(at: int, size: int = 1) -> torch.Tensor:
            return self.words[count * at : count * (at + size)]

        self.token = section(TOKEN)
        self.temperature, self.top_p, self.min_p = (
            section(at).view(torch.float32) for at in (TEMPERATURE, TOP_P, MIN_P)
        )
        self.top_k = section(TOP_K)
        self.sure = section(SURE)  # the k of the confidence that is asked for; 0: none
        self.stream = section(STREAM, 2).view(count, 2)  # low and high word: a gathered pair is an int64
        self._variant, self._variant_from = section(VARIANT), section(VARIANT_FROM)
        self._hook, self._hook_from = section(HOOK), section(HOOK_FROM)
        self.hooks = False  # whether any sequence can have hooks
        bases = [count * (TABLES + g * max_pages) for g in range(num_groups)]
        self._bases = bases[: num_groups - len(states)]
        self._state_bases = bases[len(self._bases) :]
        self._state = np.full(count, UNKNOWN, np.int64)  # by seat: the page of states that the device knows
        self.kept = Kept(
            self.token,
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.stream,
            section(TABLES, num_groups * max_pages).view(num_groups, count, max_pages),
            section(TABLES + num_groups * max_pages, counts).view(counts, count) if forgets else None,
        )
        self._counts = [count * (TABLES + num_groups * max_pages + g) for g in range(counts)]
        self.tables = tuple(self.kept.tables)
        self._host_words = self.words.numpy() if self.words.device.type == "cpu" else None
        self._max_pages = max_pages
        self._position = np.full(count, UNKNOWN, np.int64)  # by seat: of the token that the device has
        # By seat: the sequence, and the places and content of its numbers in ``words``.
        self._open: dict[int, tuple[Sequence, list[int], list[int]]] = {}
        self.varied: set[int] = set()  # open seats of sequences that have a variant
        self._unsent: set[int] = set()  # open seats whose numbers the device does not have

    def open(self, seq: Sequence, temperature: float, top_k: int, top_p: float, min_p: float, sure: int) -> None:
        """Give ``seq`` its seat. A ``temperature`` of 0 is greedy. Values that switch a number off: ``top_k`` the
        vocabulary, ``top_p`` 1, ``min_p`` 0, ``sure`` (the k of the confidence) 0."""
        seat = seq.seat
        numbers = np.array([temperature, top_p, min_p], np.float32).view(np.int32).tolist()
        stream = np.array([seq.stream], np.uint64).view(np.int32).tolist()
        at = [self.count * part + seat for part in (TEMPERATURE, TOP_P, MIN_P, TOP_K, SURE)]
        at += [self.count * STREAM + 2 * seat, self.count * STREAM + 2 * seat + 1]
        at += [self.count * part + seat for part in (VARIANT, VARIANT_FROM, HOOK, HOOK_FROM)]
        variants = [seq.variant, seq.variant_from, seq.hook << HOOK_SHIFT, seq.hook_from]
        self._open[seat] = seq, at, [*numbers, top_k, sure, *stream, *variants]
        if self._counts:
            self._note_forgotten(seq)
        self._unsent.add(seat)
        if seq.variant or seq.hook:
            self.varied.add(seat)
        self._position[seat] = UNKNOWN
        seq.num_sent = 0

    def forgot(self, seq: Sequence) -> None:
        """Note that a sequence with a seat has forgotten tokens, so that its pages hold others than before."""
        if self._open.get(seq.seat, (None,))[0] is seq:
            seat, at, content = self._open[seq.seat]
            del at[len(at) - len(self._counts) :], content[len(content) - len(self._counts) :]
            self._note_forgotten(seq)
            self._unsent.add(seq.seat)
            seq.num_sent = 0

    def _note_forgotten(self, seq: Sequence) -> None:
        _, at, content = self._open[seq.seat]
        at += [base + seq.seat for base in self._counts]
        content += seq.forgotten or [0] * len(self._counts)

    def variants(self, seats_B: torch.Tensor, positions_B: torch.Tensor) -> torch.Tensor:
        """The variants int32 [B] of the rows of these seats at these positions."""
        acts_B = positions_B >= self._variant_from.index_select(0, seats_B)
        found_B = self._variant.index_select(0, seats_B) * acts_B
        if self.hooks:
            acts_B = positions_B >= self._hook_from.index_select(0, seats_B)
            found_B = found_B + self._hook.index_select(0, seats_B) * acts_B
        return found_B

    def close(self, seat: int) -> None:
        """Free a seat for another sequence."""
        del self._open[seat]
        self.varied.discard(seat)
        self._unsent.discard(seat)

    def drawn(self, seats: Many[int] | np.ndarray, positions: Many[int] | np.ndarray | int) -> None:
        """Note that the launched step leaves the tokens of these positions in ``token``."""
        self._position[seats] = positions

    def forget(self) -> None:
        """Send everything again: a launch failed, so nothing on the device can be trusted."""
        self._position[:] = UNKNOWN
        self._state[:] = UNKNOWN
        self._unsent.update(self._open)
        for seq, _, _ in self._open.values():
            seq.num_sent = 0

    def changes(
        self, spans: list[Span], seats: Many[int] | np.ndarray, starts: Many[int] | np.ndarray
    ) -> tuple[list[int], list[int]]:
        """Changes that the device does not know yet for these decodes: places in ``words`` and their new content, which
        the caller sends. That is parameters of new seats, new pages, and tokens that the device did not draw itself."""
        at: list[int] = []
        content: list[int] = []
        for seat in self._unsent:
            _, places, numbers = self._open[seat]
            at += places
            content += numbers
        self._unsent.clear()
        for i in np.flatnonzero(self._position[seats] != starts).tolist():
            span = spans[i]
            at.append(span.seat)
            content.append(span.seq.tokens[span.start])
        for span in spans:
            seq = span.seq
            if seq.num_sent < self._entries(seq):
                self._send_pages(seq, at, content)
        if self._state_bases:
            self._send_states(spans, at, content)
        return at, content

    def bring(self, spans: list[Span]) -> None:
        """Make the changes of these decodes at once and note what is drawn, where ``words`` lie in the host's own
        memory."""
        position, new = self._position, []
        for span in spans:
            if position[span.seat] != span.start or span.seq.num_sent < self._entries(span.seq):
                new.append(span)
        if new or self._unsent:
            at, content = self.changes(new, [span.seat for span in new], [span.start for span in new])
            self._host_words[at] = content
        for span in spans:
            position[span.seat] = span.start + 1

    def _send_states(self, spans: list[Span], at: list[int], content: list[int]) -> None:
        for span in spans:
            if self._state[span.seat] != span.states[0]:
                self._state[span.seat] = span.states[0]
                at += [base + span.seat * self._max_pages for base in self._state_bases]
                content += [span.states[0]] * len(self._state_bases)

    def _entries(self, seq: Sequence) -> int:
        """Number of entries that ``num_sent`` counts: those of a table, as all have the same number, or of all tables
        where some have forgotten tokens."""
        return sum(map(len, seq.tables[: len(self._bases)])) if seq.forgotten else len(seq.tables[0])

    def _send_pages(self, seq: Sequence, at: list[int], content: list[int]) -> None:
        sent = 0 if seq.forgotten else seq.num_sent
        for base, table in zip(self._bases, seq.tables):
            first = base + seq.seat * self._max_pages
            at += range(first + sent, first + len(table))
            content += table[sent:]
        seq.num_sent = self._entries(seq)
