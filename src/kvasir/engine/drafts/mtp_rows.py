"""The served model's MTP layer as a drafter's model: its keys and values lie in the model's own pages.

Row i joins the hidden state of row i and the token after it, and its keys stand in slot i, at position i. They need no
attention, so those of committed rows are two products a row. They lie in the cache group of the model's layers that
attend. Prefix hits, forks, preemption and lower tiers therefore carry them like all others, and a row that has been
computed once is never missing.

The last row of a page depends on the first token of the next page. A sequence whose prefix hit ends there and goes on
with another token sees one row of another text. It changes what is drafted, never what is accepted.

Drafted rows go to the slots after the last committed one. The next rows that are committed overwrite them before
anything reads them.

Legend: T rows, R rows of a piece, B sequences, D drafted tokens of each, S seats, E model dim, V vocabulary, W pages.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch

from kvasir.engine.pages.pages import PageManager
from kvasir.engine.ways.batch import Packer
from kvasir.engine.ways.runner import Runner
from kvasir.speculation import heads
from kvasir.speculation.drafter import Ask
from kvasir.speculation.tree import DraftTree
from kvasir.types import PageCopy, Sequence, Span, StepBatch, Want

SEEN = "further_token"  # in ``Sequence.state``: the seat that holds its last state, and the position after that row
Path = tuple[int, ...]  # the tokens of a node and of all nodes above it


@dataclass(slots=True)
class _Piece:
    """Committed rows that wait for their keys: outputs of the last layer [R, E], the token after each row, its position
    and its slot, and the seat of the sequence."""

    hidden: torch.Tensor
    numbers: np.ndarray  # [3, R]: token, position, slot
    seat: int


class _Rows(Span):
    """A span of the MTP layer: ``ids`` are the tokens that its rows join."""

    __slots__ = ("ids",)
    ids: list[int]

    def tokens(self) -> list[int]:
        return self.ids

    @property
    def varied(self) -> bool:
        return False  # the layer is the base model's


class MTPRows:
    """Implementation of ``drafter.MTPModel``, usable once it is bound."""

    def bind(self, served: Runner, pages: PageManager, max_model_len: int) -> None:
        """Take the served model, which was loaded with its MTP layer, and its pages."""
        model = self._model = served.model
        self._layer, self._backend, self._pool, self._pages = model.mtp, served.backend, served.pool, pages
        self._cache = served.pool.layer(model.mtp.index)
        self._max_model_len, self._device = max_model_len, served.device
        parts = served.parts.packer
        self._packer = Packer(parts.page_slots, parts.num_groups, served.device, parts.states)
        self._size, self._num_groups = parts.page_slots, parts.num_groups
        # By seat: the state behind the model's final norm of the last committed row.
        self._last_SE = torch.zeros(
            served.sampler.max_seqs, model.spec.hidden_size, device=served.device, dtype=model.place.dtype
        )
        self._pieces: list[_Piece] = []
        self._states_TE = self._last_SE  # of the rows of the last level of trees
        self._rows_of: dict[Sequence, dict[Path, int]] = {}  # where they are

    @property
    def num_bytes(self) -> int:
        return self._last_SE.nbytes

    # --------------------------------------------------------------------------------------------------- committed rows

    def keep(self, seq: Sequence, hidden_RE: torch.Tensor, start: int) -> None:
        """Take the last layer's outputs of committed rows from position ``start`` on. ``settle`` computes their keys
        before the sequence's pages may go to others."""
        ids = seq.tokens[start + 1 : start + 1 + len(hidden_RE)]
        if not ids:
            return
        position = np.arange(start, start + len(ids))
        first = start // self._size
        pages = np.array(seq.tables[self._cache.group][first : position[-1] // self._size + 1])
        slot = pages[position // self._size - first] * self._size + position % self._size
        self._pieces.append(_Piece(hidden_RE[: len(ids)], np.stack([ids, position, slot]), seq.seat))
        seq.state[SEEN] = seq.seat, start + len(ids)

    @torch.inference_mode()
    def settle(self) -> None:
        """Compute keys and values of all rows that wait, and note the last state of each sequence."""
        pieces, self._pieces = self._pieces, []
        if not pieces:
            return
        ends = np.cumsum([piece.numbers.shape[1] for piece in pieces]) - 1
        last = {piece.seat: end for piece, end in zip(pieces, ends)}
        sent = heads.send(np.concatenate([piece.numbers for piece in pieces], 1), self._device)
        ends_2S = heads.send(np.array([[*last], [*last.values()]]), self._device)
        ids_T, position_T, slot_T = sent
        hidden_TE = self._model.norm(torch.cat([piece.hidden for piece in pieces]))
        self._last_SE[ends_2S[0]] = hidden_TE[ends_2S[1]]
        batch = self._batch(position_T, slot_T)
        x_TE = self._layer.enter(self._layer.embed(self._model, ids_T), hidden_TE)
        self._layer.keep(x_TE, self._cache, self._backend, batch)

    def close(self, seq: Sequence) -> None:
        seq.state.pop(SEEN, None)
        self._rows_of.pop(seq, None)

    # ----------------------------------------------------------------------------------------------------------- chains

    def draw(self, asks: Many[Ask]) -> list[tuple[list[int], list[float]]]:
        """Draw up to ``max_depth`` tokens after the known ones of each sequence, each with the model's noise at its
        place. Returns tokens and their chances; none for a sequence whose last row was not seen."""
        ready: list[tuple[Ask, int]] = []
        for ask in asks:
            depth = min(ask.max_depth, ask.max_nodes, self._max_model_len - len(ask.seq.tokens))
            if depth > 0 and self._seen(ask.seq):
                ready.append((ask, depth if depth == 1 or self._room(ask.seq, depth - 1, len(asks)) else 1))
        if not ready:
            return [([], []) for _ in asks]
        ready.sort(key=lambda pair: -pair[1])  # those that draw more are a step's first rows
        found = dict(zip((ask.seq for ask, _ in ready), self._chains(ready)))
        return [found.get(ask.seq, ([], [])) for ask in asks]

    @torch.inference_mode()
    def _chains(self, ready: list[tuple[Ask, int]]) -> list[tuple[list[int], list[float]]]:
        """Chains of these lengths, longest first."""
        seqs, lengths = [ask.seq for ask, _ in ready], np.array([depth for _, depth in ready])
        start = np.array([len(seq.tokens) - 2 for seq in seqs])
        tables_BW = self._tables(seqs, start + lengths)
        depth, rows = int(lengths[0]), np.arange(len(seqs))
        # Rows of a sequence that draws no more are cut off below, so their slots may be any.
        place_DB = np.minimum(start + np.arange(depth)[:, None], (tables_BW.shape[1] * self._size) - 1)
        slot_DB = tables_BW[rows, place_DB // self._size].astype(np.int64) * self._size + place_DB % self._size
        known = np.array([[seq.seat for seq in seqs], start, [seq.tokens[-1] for seq in seqs]])
        sent = heads.send(np.concatenate([known, heads.Draws.numbers(seqs), slot_DB]), self._device)
        tables, hot = heads.send(tables_BW, self._device), heads.hot(seqs)
        state_BE, ids_B, found = self._last_SE[sent[0]], sent[2], []
        for d in range(depth):
            count = int((lengths > d).sum())
            position_B = sent[1, :count] + d
            batch = self._batch(position_B, sent[5 + d, :count], tables[:count], [int(s) + d for s in start[:count]])
            self._backend.plan(batch)
            x_BE = self._layer.enter(self._layer.embed(self._model, ids_B[:count]), state_BE[:count])
            state_BE = self._layer.forward(x_BE, self._cache, self._backend, batch)
            logits_BNV = self._layer.logits(self._model, state_BE)[:, None]
            draws = heads.Draws.of(sent[3:5, :count], hot)
            log_B, ids_B = heads.guess(logits_BNV, draws, position_B[:, None] + 1)[:, 0].max(-1)
            found.append(torch.stack([ids_B.float(), log_B]))  # ids below 2^24 are exact
        return _by_sequence(torch.cat(found, 1).cpu().numpy(), lengths)

    # ------------------------------------------------------------------------------------------------------------ trees

    @torch.inference_mode()
    def expand(self, asks: Many[Ask], trees: Many[DraftTree], first: Many[int]) -> list[torch.Tensor | None]:
        """Return the log-weights [R, V] of what follows the nodes of each tree from ``first`` on, as
        ``drafter.ChainModel.expand`` does. None for a sequence that cannot be drafted for.

        A level is one step over the whole tree so far: its rows see each other in the slots behind the text, and each
        joins its token and the state that the row of its parent had in the level before."""
        spans: list[_Rows | None] = []
        sources: list[int] = []
        rows_of: dict[Sequence, dict[Path, int]] = {}
        for ask, tree, node in zip(asks, trees, first):
            seq, before = ask.seq, self._rows_of.get(ask.seq, {})
            if node < 0:
                fits = len(seq.tokens) + ask.max_depth <= self._max_model_len
                if not (fits and self._seen(seq) and self._room(seq, ask.max_nodes, len(asks))):
                    spans.append(None)
                    continue
            paths = _paths(tree)
            parents = [-1, *(1 + parent for parent in tree.parents)]
            wanted: dict[Want, range] = {"sample": range(1 + node, 1 + len(tree))}
            span = _Rows(seq, len(seq.tokens) - 2, 1 + len(tree), wanted, "walk")
            span.ids, span.parents = [seq.tokens[-1], *tree.tokens], parents if len(tree) else None
            rows_of[seq] = {path: len(sources) + i for i, path in enumerate([(), *paths])}
            # The first row's state is behind those of the level before.
            sources += [len(self._states_TE) + seq.seat, *(before[path[:-1]] for path in paths)]
            spans.append(span)
        going = [span for span in spans if span is not None]
        self._rows_of |= rows_of
        rows = self._level(going, sources) if going else iter(())
        return [None if span is None else next(rows) for span in spans]

    def _level(self, spans: list[_Rows], sources: list[int]):
        """Run a level; yields the log-weights of each span's wanted rows. ``sources``: the row of each row's state
        among those of the level before and the last committed ones."""
        batch = self._packer.pack([*spans])
        self._backend.plan(batch)
        every_TE = torch.cat([self._states_TE, self._last_SE])
        hidden_TE = every_TE[heads.send(np.array(sources), self._device)]
        x_TE = self._layer.enter(self._layer.embed(self._model, batch.input_ids), hidden_TE)
        self._states_TE = self._layer.forward(x_TE, self._cache, self._backend, batch)
        log_MV = self._layer.logits(self._model, self._states_TE[batch.logit_rows]).float()
        scale = np.array([t if (t := span.seq.request.params.temperature) >= 1e-5 else 1.0 for span in spans])
        counts = [len(span.want["sample"]) for span in spans]
        log_MV /= heads.send(np.repeat(scale, counts), self._device)[:, None]
        yield from log_MV.split(counts)

    # ------------------------------------------------------------------------------------------------------------ pages

    def _seen(self, seq: Sequence) -> bool:
        """Whether the row before the last known token was seen, in the seat that the sequence has."""
        return seq.num_computed == len(seq.tokens) - 1 and seq.state.get(SEEN) == (seq.seat, len(seq.tokens) - 1)

    def _room(self, seq: Sequence, count: int, num_asks: int) -> bool:
        """Make room for ``count`` rows after the last committed one. A draft takes no page that a running sequence may
        need."""
        last = len(seq.tokens) - 1
        if -(-(last + count) // self._size) > len(seq.tables[0]) and self._pages.num_free < 2 * num_asks:
            return False
        copies: list[PageCopy] = []
        if not self._pages.grow(seq, last + count, copies, states=False):
            return False
        if copies:
            self._pool.copy(copies)
        return True

    def _tables(self, seqs: list[Sequence], ends: np.ndarray) -> np.ndarray:
        """The pages [B, W] int32 of each sequence up to position ``ends``."""
        counts = -(-ends // self._size)
        tables_BW = np.zeros((len(seqs), counts.max()), np.int32)
        for row, seq, count in zip(tables_BW, seqs, counts):
            row[:count] = seq.tables[self._cache.group][:count]
        return tables_BW

    def _batch(
        self,
        position_T: torch.Tensor,
        slot_T: torch.Tensor,
        tables_TW: torch.Tensor | None = None,
        starts: Many[int] = (),
    ) -> StepBatch:
        """Rows that are spans of their own. ``tables_TW`` None: they attend to nothing."""
        count = len(position_T)
        rows = torch.arange(count + 1, device=self._device, dtype=torch.int32)
        tables = rows[:0].view(0, 0) if tables_TW is None else tables_TW
        return StepBatch(
            input_ids=position_T,
            positions=position_T,
            row_start=rows,
            context=position_T.int(),
            tables=(tables,) * self._num_groups,
            slots=(slot_T,) * self._num_groups,
            logit_rows=rows[:count].long(),
            starts=[*starts],
            lengths=[1] * count,
            prompts=[False] * count,
        )


def _paths(tree: DraftTree) -> list[Path]:
    """The path of each node."""
    paths: list[Path] = []
    for token, parent in zip(tree.tokens, tree.parents):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def _by_sequence(found_2T: np.ndarray, lengths: np.ndarray) -> list[tuple[list[int], list[float]]]:
    """Tokens and chances of each sequence, from rows that lie depth by depth. A chain ends where no number came."""
    chains: list[tuple[list[int], list[float]]] = [([], []) for _ in lengths]
    ended = np.zeros(len(lengths), bool)
    at = 0
    for d in range(int(lengths[0])):
        count = int((lengths > d).sum())
        ids, log = found_2T[0, at : at + count], found_2T[1, at : at + count]
        ended[:count] |= ~np.isfinite(log)
        for b in np.flatnonzero(~ended[:count]):
            chains[b][0].append(int(ids[b]))
            chains[b][1].append(min(1.0, float(np.exp(log[b]))))
        at += count
    return chains
