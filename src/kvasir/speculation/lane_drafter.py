"""Drafters of a few layers that keep keys of their own for committed rows, in lanes.

Keys of committed rows depend on the row's own hidden states and the token after it, not on attention, so they are
computed in any order and at any time. They lie in *lanes*: rings of the last ``window`` positions of a sequence, each
key with its position, behind the first ``kept`` positions of the text, which stay. A row that was never seen (a cached
prefix, steps without drafting) is therefore only missing, and a further branch of a request takes over what the first
one saw. A sequence that finds no free lane is not drafted for until there is one.

Where decode steps are CUDA graphs or tapes, drafting is captured, too, for every number of sequences and of slots that
comes back, and so are the keys of the rows of a step.

Legend: B sequences, S slots, R rows, L tapped layers, E dim of the head, F dim of the served model, G KV heads of all
layers, D head dim.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvasir.errors import ConfigError
from kvasir.logs import log
from kvasir.speculation import heads
from kvasir.speculation.drafter import Ask, Capture, Drafter, ServedModel
from kvasir.speculation.tree import DraftTree
from kvasir.types import Sequence

LEAST = 64  # smallest number of slots that are read; larger ones are powers of two
EAGER_STEPS = 2  # runs of a shape before it is captured, in which its kernels are compiled
# Pieces of rows that wait for their keys. While drafting rests, they are computed beside plain steps, whose host has
# time: left to the next drafted step, they would make it look dear, and drafting not worth its while.
MOST_WAITING = 64
CAPTURED_ROWS = 256  # most committed rows whose keys are computed by a replay; more are a prompt's


@dataclass(slots=True, eq=False)
class _Lane:
    """The keys of a sequence. ``end``: position after the last row that was handed over."""

    index: int
    request: str
    end: int = 0


@dataclass(slots=True)
class _Shape:
    """The static buffers of one shape of work, and its replay once there is one."""

    given: torch.Tensor
    found: torch.Tensor | None = None
    replay: Callable[[], None] | None = None
    uses: int = 0


@dataclass(slots=True)
class _Piece:
    """Committed rows that wait for their keys: hidden states [R, layers, E] from ``start`` on, and the token after
    each."""

    lane: _Lane
    start: int
    hidden: torch.Tensor
    tokens: list[int]


class LaneDrafter(Drafter):
    """Base class. Its ``Config`` has ``max_depth`` (0: as trained), ``width`` (1: chains), ``window`` (0: a default)
    and ``lanes``."""

    place = "same_device"
    topology = "tree"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for name, low in (("max_depth", 0), ("width", 1), ("window", LEAST if self.config.window else 0), ("lanes", 1)):
            if getattr(self.config, name) < low:
                raise ConfigError(f"{self.name}:{name}={getattr(self.config, name)}: at least {low}")
        self._lanes: dict[Sequence, _Lane] = {}
        self._free = list(range(self.config.lanes))[::-1]
        self._queue: list[_Piece] = []
        self._num_waiting = 0  # rows in it
        self._deepest = 0

    def _begin(self, model: ServedModel, capture: Capture | None, shape: Any, window: int, kept: int) -> None:
        """Take the memory of the lanes. ``shape``: ``dim`` of states, ``layers`` (tapped), ``depth``, ``kv_heads`` of
        all layers together and ``head_dim``."""
        self._capture, self._model, self.hidden_layers = capture, model, shape.layers
        self._shapes: dict[tuple[int, ...], _Shape] = {}
        self._host_noise = model.place.device.type == "cpu"  # which no tape sees
        self._depth = self.config.max_depth or shape.depth
        self._window, self._kept = window, kept
        self._device, dtype = model.place.device, model.place.dtype
        size = (self.config.lanes + 1, window)  # the last lane is nobody's: padding rows write there
        self._k, self._v = (
            torch.zeros(size[0], shape.kv_heads, window, shape.head_dim, device=self._device, dtype=dtype)
            for _ in range(2)
        )
        self._positions = torch.full(size, -1, device=self._device)
        self._states = torch.zeros(size[0], shape.dim, device=self._device, dtype=dtype)  # last row of each lane
        rows = CAPTURED_ROWS, len(shape.layers), model.spec.hidden_size
        self._hidden = torch.zeros(rows, device=self._device, dtype=dtype)  # those that replays read

    def _lane_bytes(self, model: ServedModel, shape: Any, window: int, copies: int) -> int:
        """Number of bytes that ``_begin`` takes, and of ``copies`` further copies of all keys and values."""
        slot = 2 * shape.kv_heads * shape.head_dim * model.place.dtype.itemsize * (1 + copies) + 8
        lanes, rows = self.config.lanes + 1, CAPTURED_ROWS * len(shape.layers)
        states = lanes * shape.dim + rows * model.spec.hidden_size
        return lanes * window * slot + states * model.place.dtype.itemsize

    # --------------------------------------------------------------------------------------------------- committed rows

    def ingest(self, seq: Sequence, hidden: torch.Tensor, start: int) -> None:
        lane = self._lanes.get(seq) or self._new_lane(seq, start)
        if lane is None:
            return
        lane.end = start + len(hidden)
        first = max(start, lane.end - self._window + self._kept)
        spans = [(first, lane.end)] if first < lane.end else []
        if start < min(first, self._kept):  # the ring leaves these out, and they have places of their own
            spans.insert(0, (start, min(first, self._kept)))
        for begin, end in spans:
            if self._num_waiting + end - begin > self._window - self._kept:  # a batch must not write a slot twice
                self._flush()
            self._num_waiting += end - begin
            self._queue.append(
                _Piece(lane, begin, hidden[begin - start : end - start], seq.tokens[begin + 1 : end + 1])
            )
        if len(self._queue) >= MOST_WAITING:
            self._flush()

    def close(self, seq: Sequence) -> None:
        lane = self._lanes.pop(seq, None)
        if lane is not None:
            self._queue = [piece for piece in self._queue if piece.lane is not lane]
            self._num_waiting = sum(len(piece.tokens) for piece in self._queue)
            self._free.append(lane.index)

    @torch.inference_mode()
    def _new_lane(self, seq: Sequence, start: int) -> _Lane | None:
        """Give the sequence a lane, with a copy of the keys of another branch of its request. None when all are
        taken."""
        lane = None
        if self._free:
            donor = (
                next((other for other in self._lanes.values() if other.request == seq.request.id), None)
                if seq.branch and start
                else None
            )
            lane = self._lanes[seq] = _Lane(self._free.pop(), seq.request.id)
            self._positions[lane.index] = -1
            if donor is not None:
                self._flush()
                for plane in (self._k, self._v, self._positions):
                    plane[lane.index] = plane[donor.index]
                mine = self._positions[lane.index]
                mine.masked_fill_(mine >= start, -1)
        return lane

    @torch.inference_mode()
    def _flush(self) -> None:
        """Compute the keys and values of the waiting rows."""
        queue, self._queue, count, self._num_waiting = self._queue, [], self._num_waiting, 0
        if not queue:
            return
        nobody = self.config.lanes
        size = padded_rows(count) if self._capture is not None and count <= CAPTURED_ROWS else count
        lanes, positions, tokens = [], [], []
        last: dict[int, int] = {}
        for piece in queue:  # once a sequence and step: no call that is not needed
            length = len(piece.tokens)
            lanes += [piece.lane.index] * length
            positions += range(piece.start, piece.start + length)
            tokens += piece.tokens
            last[piece.lane.index] = len(lanes) - 1
        # Each row has its lane, position and token, and a lane again where it is the last row of that lane.
        rows_4R = np.zeros((4, size), np.int64)
        rows_4R[:3, :count] = lanes, positions, tokens
        rows_4R[0, count:], rows_4R[3] = nobody, nobody
        rows_4R[3, [*last.values()]] = [*last]
        hidden = [piece.hidden for piece in queue]
        if size > CAPTURED_ROWS or self._capture is None:
            self._remember(heads.send(rows_4R, self._device), torch.cat(hidden))
            return
        shape = self._shape((size,), rows_4R)
        torch.cat(hidden, out=self._hidden[:count])
        self._run(shape, lambda: self._remember(shape.given, self._hidden[:size]))

    @abstractmethod
    def _rows(
        self, taps_RLF: torch.Tensor, token_R: torch.Tensor, position_R: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """States [R, E] of committed rows (None: drafts need none), and their keys and values [R, G, D], from the
        outputs of the tapped layers, the token after each row and its position."""

    @abstractmethod
    def _expand(self, given_5B: torch.Tensor, slots: int, depth: int, hot: bool) -> torch.Tensor:
        """Return all nodes seen [4, B, nodes]: token, place of the parent (-1: the anchor), log estimate, and the sum
        of log estimates from the anchor. Does not wait for the device.

        ``given_5B``: lane, root position, anchor token, temperature and noise stream of each sequence; ``slots``: how
        many of a lane hold keys; ``hot``: whether any sequence draws with noise."""

    def _remember(self, rows_4R: torch.Tensor, hidden_RLF: torch.Tensor) -> None:
        """Write keys, values and positions of these rows to their lanes, and the states of the last ones."""
        lane_R, position_R, token_R, owner_R = rows_4R
        kept = self._kept
        state_RE, k_RGD, v_RGD = self._rows(hidden_RLF, token_R, position_R)
        slot_R = torch.where(position_R < kept, position_R, kept + (position_R - kept) % (self._window - kept))
        for plane, x_RGD in ((self._k, k_RGD), (self._v, v_RGD)):
            plane.transpose(1, 2)[lane_R, slot_R] = x_RGD
        self._positions[lane_R, slot_R] = position_R
        if state_RE is not None:
            self._states[owner_R] = state_RE

    def _roots(self, lane_B: torch.Tensor, root_B: torch.Tensor, slots: int) -> tuple[torch.Tensor, ...]:
        """Keys and values [B, G, S, D] of the lanes, and which of them [B, S] a draft after position ``root`` sees."""
        seen_BS = self._positions[:, :slots][lane_B]
        near_BS = seen_BS > root_B[:, None] - self._window + self._kept
        sees_BS = (seen_BS >= 0) & (near_BS | (seen_BS < self._kept))
        return self._k[:, :, :slots][lane_B], self._v[:, :, :slots][lane_B], sees_BS

    # ------------------------------------------------------------------------------------------------------- capturing

    def _shape(self, key: tuple[int, ...], given: np.ndarray) -> _Shape:
        """The shape of this key, with ``given`` in its buffer."""
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = _Shape(torch.zeros(given.shape, dtype=torch.int64, device=self._device))
        heads.send_to(given, shape.given)
        return shape

    def _run(self, shape: _Shape, work: Callable[[], None]) -> None:
        """Run ``work`` on the buffers of a shape; by a replay once the shape has come back."""
        shape.uses += 1
        if shape.replay is None and shape.uses > EAGER_STEPS:
            try:
                shape.replay = self._capture(work)
            except Exception as error:  # drafting works without a replay
                self._capture = None
                log.warning("drafting is not captured any more (%s: %s)", type(error).__name__, error)
        (shape.replay or work)()

    # --------------------------------------------------------------------------------------------------------- drafting

    def propose(self, asks: list[Ask]) -> list[DraftTree]:
        self._flush()
        trees = [DraftTree() for _ in asks]
        ready = []
        for i, ask in enumerate(asks):
            lane = self._lanes.get(ask.seq)
            if lane is not None and lane.end == len(ask.seq.tokens) - 1:  # the row before the anchor was seen
                ready.append((i, ask, lane))
        if ready:
            deepest = max(ask.max_depth for _, ask, _ in ready)
            self._deepest = max(self._deepest, deepest)  # one depth for all steps: fewer shapes to capture
            depth = min(self._depth, deepest if self._capture is None else self._deepest)
            found = self._draft([ask.seq for _, ask, _ in ready], [lane for *_, lane in ready], depth).numpy()
            for (i, *_), tree in zip(ready, _best(found, [ask for _, ask, _ in ready], self.config.width == 1)):
                trees[i] = tree
        return trees

    @torch.inference_mode()
    def _draft(self, seqs: list[Sequence], lanes: list[_Lane], depth: int) -> torch.Tensor:
        """Run `_expand` for these sequences and return the result on the host; replays it once a shape has come
        back."""
        known = np.array(
            [[lane.index for lane in lanes], [lane.end - 1 for lane in lanes], [seq.tokens[-1] for seq in seqs]]
        )
        given = np.concatenate([known, heads.Draws.numbers(seqs)])
        slots = min(self._window, 1 << (max(LEAST, *(lane.end for lane in lanes)) - 1).bit_length())
        hot, count = heads.hot(seqs), len(seqs)
        if self._capture is None or hot and self._host_noise:
            return self._expand(heads.send(given, self._device), slots, depth, hot).cpu()
        size = 1 << (count - 1).bit_length()
        padded = np.repeat(given[:, :1], size, 1)  # padding repeats the first sequence
        padded[:, :count] = given
        shape = self._shape((size, slots, depth, hot), padded)

        def work() -> None:
            found = self._expand(shape.given, slots, depth, hot)
            if shape.found is None:
                shape.found = torch.empty_like(found)
            shape.found.copy_(found)

        self._run(shape, work)
        return shape.found[:, :count].cpu()

    def state_bytes(self) -> int:
        return sum(x.nbytes for x in (self._k, self._v, self._positions, self._states, self._hidden))


def padded_rows(count: int) -> int:
    """The number of rows that ``count`` committed rows are padded to."""
    return next(size for size in (*range(8, 65, 8), *range(96, CAPTURED_ROWS + 1, 32)) if size >= count)


def _best(found_4BN: np.ndarray, asks: list[Ask], chains: bool) -> list[DraftTree]:
    """The nodes of largest joint probability, by sequence. A parent's is never less than its child's, and it stands
    before it. ``found``: as from ``LaneDrafter._expand``; ``chains``: each node follows the one before it."""
    tokens_BN, parents_BN = found_4BN[:2].astype(np.int64).tolist()  # below 2^24, exact in fp32
    est_BN = np.exp(found_4BN[2].astype(np.float64)).tolist()
    trees = []
    if chains:
        for ask, tokens, est in zip(asks, tokens_BN, est_BN):
            places = range(min(ask.max_nodes, ask.max_depth, len(tokens)))
            size = len(places)
            trees.append(DraftTree(tokens[:size], [i - 1 for i in places], est[:size], [*places]))
        return trees
    orders = np.argsort(-found_4BN[3], 1, kind="stable").tolist()
    for ask, tokens, parents, est, order in zip(asks, tokens_BN, parents_BN, est_BN, orders):
        tree, at = DraftTree(), {-1: -1}
        for i in order:
            parent = at.get(parents[i])
            if len(tree) == ask.max_nodes:
                break
            if parent is not None and (tree.depths[parent] + 1 if parent >= 0 else 0) < ask.max_depth:
                at[i] = tree.add(parent, tokens[i], est[i])
        trees.append(tree.keep(range(len(tree))))
    return trees
