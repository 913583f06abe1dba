"""One decoder layer over the model's fused hidden states drafts, with keys of its own; a tree by joint probability.
Exact.

EAGLE-3 (arXiv 2503.01840) with the dynamic trees of EAGLE-2 (arXiv 2406.16858): each level expands the ``width`` nodes
of largest joint probability with ``width`` children each, and the best of all nodes are proposed. A child is the token
that the model would draw at its position if its distribution were the head's: the noise is the same (coupled drafting).
``width=1`` gives chains, which run in the CUDA graphs of decode steps.

Where decode steps are CUDA graphs or tapes, drafting is captured, too, for every number of sequences and of slots that
comes back, and so are the keys of the rows of a step.

The single layer makes keys of committed rows cheap: they depend on the row's own hidden states and the token after it,
not on attention. They lie in *lanes*: rings of the last ``window`` positions of a sequence, each key with its position.
A row that was never seen (a cached prefix, steps without drafting) is therefore only missing, and a further branch of a
request takes over what the first one saw. A sequence that finds no free lane is not drafted for until there is one.

Legend: B sequences, N nodes of a level, C children a node, S slots, R rows, E model dim, H query heads, G KV heads, D
head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

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


@dataclass(frozen=True, slots=True)
class Config:
    """``model``: folder of a trained head (default: the one in the package; new: random weights, for --learn);
    ``max_depth``: deepest draft, 0: as trained; ``width``: nodes expanded a level, and children of each; ``window``:
    positions of a lane; ``lanes``: sequences at once."""

    model: str = ""
    max_depth: int = 0
    width: int = 4
    window: int = 1024
    lanes: int = 64


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


class EagleDrafter(Drafter):
    place = "same_device"
    topology = "tree"
    learns = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        for name, low in (("max_depth", 0), ("width", 1), ("window", LEAST), ("lanes", 1)):
            if getattr(self.config, name) < low:
                raise ConfigError(f"eagle:{name}={getattr(self.config, name)}: at least {low}")
        self._lanes: dict[Sequence, _Lane] = {}
        self._free = list(range(self.config.lanes))[::-1]
        self._queue: list[_Piece] = []
        self._num_waiting = 0  # rows in it
        self._deepest = 0

    @torch.inference_mode()
    def attach(self, model: ServedModel, capture: Capture | None = None) -> None:
        head = self._head = heads.load_for("eagle", self.config.model, model)
        self._capture = capture
        self._shapes: dict[tuple[int, ...], _Shape] = {}
        self._host_noise = model.place.device.type == "cpu"  # which no tape sees
        self._model, self.hidden_layers = model, head.shape.layers
        self._depth = self.config.max_depth or head.shape.depth
        self._device, dtype = model.place.device, model.place.dtype
        size = (self.config.lanes + 1, self.config.window)  # the last lane is nobody's: padding rows write there
        self._k, self._v = (
            torch.zeros(*size, head.shape.kv_heads, head.shape.head_dim, device=self._device, dtype=dtype)
            for _ in range(2)
        )
        self._positions = torch.full(size, -1, device=self._device)
        head.reserve(model.spec.max_position + self._depth)
        self._states = torch.zeros(size[0], head.shape.dim, device=self._device, dtype=dtype)  # last row of each lane
        rows = CAPTURED_ROWS, len(head.shape.layers), head.shape.dim
        self._hidden = torch.zeros(rows, device=self._device, dtype=dtype)  # those that replays read

    def device_bytes(self, model: ServedModel) -> int:
        """Number of bytes of weights and rotations, of the keys, values, positions and state of each lane, and of the
        rows that a replay reads."""
        shape, weights = heads.planned("eagle", self.config.model, model)
        slot = 2 * shape.kv_heads * shape.head_dim * model.place.dtype.itemsize + 8
        rotations = (model.spec.max_position + (self.config.max_depth or shape.depth)) * (shape.head_dim // 2) * 8
        lanes, rows = self.config.lanes + 1, CAPTURED_ROWS * len(shape.layers)
        return (
            (weights + (lanes + rows) * shape.dim) * model.place.dtype.itemsize
            + rotations
            + lanes * self.config.window * slot
        )

    # --------------------------------------------------------------------------------------------------- committed rows

    def ingest(self, seq: Sequence, hidden: torch.Tensor, start: int) -> None:
        lane = self._lanes.get(seq) or self._new_lane(seq, start)
        if lane is None:
            return
        lane.end = start + len(hidden)
        first = max(start, lane.end - self.config.window)
        if self._num_waiting + lane.end - first > self.config.window:  # a batch must not write a slot twice
            self._flush()
        self._num_waiting += lane.end - first
        self._queue.append(_Piece(lane, first, hidden[first - start :], seq.tokens[first + 1 : lane.end + 1]))
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

    def _remember(self, rows_4R: torch.Tensor, hidden_RLE: torch.Tensor) -> None:
        """Write keys, values and positions of these rows to their lanes, and the states of the last ones."""
        lane_R, position_R, token_R, owner_R = rows_4R
        state_RE = self._head.fuse(hidden_RLE)
        _, k_RGD, v_RGD = self._head.attention(self._head.mix(state_RE, self._model.embed(token_R)), position_R)
        slot_R = position_R % self.config.window
        self._k[lane_R, slot_R], self._v[lane_R, slot_R], self._positions[lane_R, slot_R] = k_RGD, v_RGD, position_R
        self._states[owner_R] = state_RE

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
        slots = min(self.config.window, 1 << (max(LEAST, *(lane.end for lane in lanes)) - 1).bit_length())
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

    def _expand(self, given_5B: torch.Tensor, slots: int, depth: int, hot: bool) -> torch.Tensor:
        """Return all nodes seen [4, B, nodes]: token, place of the parent (-1: the anchor), log estimate, and the sum
        of log estimates from the anchor. Does not wait for the device.

        ``given_5B``: lane, root position, anchor token, temperature and noise stream of each sequence."""
        head, model, width = self._head, self._model, self.config.width
        lane_B, root_B, token_B, draws = given_5B[0], given_5B[1], given_5B[2], heads.Draws.of(given_5B[3:], hot)
        batch = len(lane_B)
        k_BSGD, v_BSGD = self._k[:, :slots][lane_B], self._v[:, :slots][lane_B]
        seen_BS = self._positions[:, :slots][lane_B]
        sees_BNS = ((seen_BS >= 0) & (seen_BS > root_B[:, None] - self.config.window))[:, None]
        state_BNE, token_BN, position_BN = self._states[lane_B][:, None], token_B[:, None], root_B[:, None]
        joint_BN = torch.zeros(batch, 1, device=given_5B.device)
        place_BN = torch.full_like(token_BN, -1)  # places of this level's nodes among all nodes
        found: list[torch.Tensor] = []
        total = 0
        for d in range(depth):
            count = token_BN.shape[1]
            q_BNHD, k, v = head.attention(head.mix(state_BNE, model.embed(token_BN)), position_BN)
            if d:  # the root's keys are in the lane already
                k_BSGD, v_BSGD = torch.cat([k_BSGD, k], 1), torch.cat([v_BSGD, v], 1)
                itself = torch.eye(count, dtype=torch.bool, device=given_5B.device).expand(batch, -1, -1)
                sees_BNS = torch.cat([sees_BNS, itself], 2)
            state_BNE = head.finish(state_BNE, _attend(q_BNHD, k_BSGD, v_BSGD, sees_BNS))
            log_BNV = heads.guess(model.read_out(head.norm(state_BNE)), draws, position_BN + 1)
            log_BNC, id_BNC = log_BNV.topk(min(width, log_BNV.shape[-1]), -1) if width > 1 else log_BNV.max(-1, True)
            sum_BNC = joint_BN[..., None] + log_BNC
            columns = [id_BNC, place_BN[..., None].expand(-1, -1, id_BNC.shape[2]), log_BNC, sum_BNC]
            found.append(torch.stack([x.flatten(1).float() for x in columns]))
            if d + 1 == depth:
                break
            fanout = id_BNC.shape[2]
            position_BN = position_BN[:, :1] + 1
            if width == 1:  # there is nothing to choose from
                joint_BN, token_BN, place_BN = sum_BNC[..., 0], id_BNC[..., 0], place_BN + 1
            else:
                joint_BN, chosen = sum_BNC.flatten(1).topk(min(width, count * fanout), -1)
                token_BN, place_BN = id_BNC.flatten(1).gather(1, chosen), total + chosen
                position_BN = position_BN.expand(-1, chosen.shape[1])
                parent = chosen // fanout
                state_BNE = state_BNE.gather(1, parent[..., None].expand(-1, -1, state_BNE.shape[2]))
                sees_BNS = sees_BNS.gather(1, parent[..., None].expand(-1, -1, sees_BNS.shape[2]))
            total += count * fanout
        return torch.cat(found, 2)

    def weights(self) -> Mapping[str, torch.Tensor]:
        """The head's parameters. When they change, keys of running sequences stay, so that their drafts are worse for a
        while, but never wrong."""
        return dict(self._head.named_parameters())

    def export(self, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
        heads.write_tensors(self._head, weights, folder, heads.facts_of(self._model))

    def state_bytes(self) -> int:
        return sum(x.nbytes for x in (self._k, self._v, self._positions, self._states, self._hidden))


def _attend(q_BNHD: torch.Tensor, k_BSGD: torch.Tensor, v_BSGD: torch.Tensor, sees_BNS: torch.Tensor) -> torch.Tensor:
    """[B, N, H, D]: every query head of a group is a row of its KV head. Every query sees a slot at least."""
    batch, count, num_heads, size = q_BNHD.shape
    groups = k_BSGD.shape[2]
    each = num_heads // groups
    q = q_BNHD.view(batch, count, groups, each, size).transpose(1, 2).reshape(batch, groups, count * each, size)
    mask = sees_BNS[:, None, :, None].expand(-1, -1, -1, each, -1).flatten(2, 3) if count > 1 else sees_BNS[:, None]
    out = F.scaled_dot_product_attention(q, k_BSGD.transpose(1, 2), v_BSGD.transpose(1, 2), attn_mask=mask)
    return out.view(batch, groups, count, each, size).transpose(1, 2).reshape(batch, count, num_heads, size)


def padded_rows(count: int) -> int:
    """The number of rows that ``count`` committed rows are padded to."""
    return next(size for size in (*range(8, 65, 8), *range(96, CAPTURED_ROWS + 1, 32)) if size >= count)


def _best(found_4BN: np.ndarray, asks: list[Ask], chains: bool) -> list[DraftTree]:
    """The nodes of largest joint probability, by sequence. A parent's is never less than its child's, and it stands
    before it. ``found``: as from ``_expand``; ``chains``: each node follows the one before it."""
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
