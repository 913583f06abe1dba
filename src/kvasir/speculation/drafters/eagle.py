"""One decoder layer over the model's fused hidden states drafts, with keys of its own; a tree by joint probability.
Exact.

EAGLE-3 (arXiv 2503.01840) with the dynamic trees of EAGLE-2 (arXiv 2406.16858): each level expands the ``width`` nodes
of largest joint probability with ``width`` children each, and the best of all nodes are proposed. A child is the token
that the model would draw at its position if its distribution were the head's: the noise is the same (coupled drafting).
``width=1`` gives chains, which run in the CUDA graphs of decode steps.

Where decode steps are CUDA graphs or tapes, drafting is captured, too, for every number of sequences and of slots that
comes back.

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
    """The static buffers of one shape of drafting, and its replay once there is one."""

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
        self._capture, self._shapes = capture, {}
        self._host_noise = model.place.device.type == "cpu"  # which no tape sees
        self._model, self.hidden_layers = model, head.shape.layers
        self._depth = self.config.max_depth or head.shape.depth
        self._device, dtype = model.place.device, model.place.dtype
        size = (self.config.lanes, self.config.window)
        self._k, self._v = (
            torch.zeros(*size, head.shape.kv_heads, head.shape.head_dim, device=self._device, dtype=dtype)
            for _ in range(2)
        )
        self._positions = torch.full(size, -1, device=self._device)
        head.reserve(model.spec.max_position + self._depth)
        self._states = torch.zeros(size[0], head.shape.dim, device=self._device, dtype=dtype)  # last row of each lane

    def device_bytes(self, model: ServedModel) -> int:
        """Number of bytes of weights and rotations, and of the keys, values, positions and state of each lane."""
        shape, weights = heads.planned("eagle", self.config.model, model)
        slot = 2 * shape.kv_heads * shape.head_dim * model.place.dtype.itemsize + 8
        rotations = (model.spec.max_position + (self.config.max_depth or shape.depth)) * (shape.head_dim // 2) * 8
        return (
            (weights + self.config.lanes * shape.dim) * model.place.dtype.itemsize
            + rotations
            + self.config.lanes * self.config.window * slot
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
        queue, self._queue, self._num_waiting = self._queue, [], 0
        if not queue:
            return
        rows = [(piece.lane.index, piece.start + i, token) for piece in queue for i, token in enumerate(piece.tokens)]
        ends = np.cumsum([len(piece.tokens) for piece in queue]) - 1
        last = {piece.lane.index: end for piece, end in zip(queue, ends.tolist())}
        sent = heads.send(
            np.concatenate(
                [np.array(rows, np.int64).T.ravel(), np.array([[*last], [*last.values()]], np.int64).ravel()]
            ),
            self._device,
        )
        lane_R, position_R, token_R = sent[: 3 * len(rows)].view(3, -1)
        owner, end = sent[3 * len(rows) :].view(2, -1)
        state_RE = self._head.fuse(torch.cat([piece.hidden for piece in queue]))
        _, k_RGD, v_RGD = self._head.attention(self._head.mix(state_RE, self._model.embed(token_R)), position_R)
        slot_R = position_R % self.config.window
        self._k[lane_R, slot_R], self._v[lane_R, slot_R], self._positions[lane_R, slot_R] = k_RGD, v_RGD, position_R
        self._states[owner] = state_RE[end]

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
            found = self._draft([ask.seq for _, ask, _ in ready], [lane for *_, lane in ready], depth).tolist()
            for (i, ask, _), *nodes in zip(ready, *found):
                trees[i] = _best(*nodes, ask)
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
        shape = self._shapes.setdefault(
            (size, slots, depth, hot), _Shape(torch.zeros(len(given), size, dtype=torch.int64, device=self._device))
        )
        padded = np.repeat(given[:, :1], size, 1)  # padding repeats the first sequence
        padded[:, :count] = given
        shape.given.copy_(heads.send(padded, self._device))

        def work() -> None:
            found = self._expand(shape.given, slots, depth, hot)
            if shape.found is None:
                shape.found = torch.empty_like(found)
            shape.found.copy_(found)

        shape.uses += 1
        if shape.replay is None and shape.uses > EAGER_STEPS:
            try:
                shape.replay = self._capture(work)
            except Exception as error:  # drafting works without a replay
                self._capture = None
                log.warning(
                    "drafting is not captured: %d sequences cannot be (%s: %s)", size, type(error).__name__, error
                )
        (shape.replay or work)()
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
            log_BNC, id_BNC = log_BNV.topk(min(width, log_BNV.shape[-1]), -1)
            sum_BNC = joint_BN[..., None] + log_BNC
            columns = [id_BNC, place_BN[..., None].expand(-1, -1, id_BNC.shape[2]), log_BNC, sum_BNC]
            found.append(torch.stack([x.flatten(1).float() for x in columns]))
            if d + 1 == depth:
                break
            fanout = id_BNC.shape[2]
            joint_BN, chosen = sum_BNC.flatten(1).topk(min(width, count * fanout), -1)
            token_BN, place_BN = id_BNC.flatten(1).gather(1, chosen), total + chosen
            position_BN = (root_B + d + 1)[:, None].expand(-1, chosen.shape[1])
            if count > 1 or chosen.shape[1] > 1:
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
        return sum(x.nbytes for x in (self._k, self._v, self._positions, self._states))


def _attend(q_BNHD: torch.Tensor, k_BSGD: torch.Tensor, v_BSGD: torch.Tensor, sees_BNS: torch.Tensor) -> torch.Tensor:
    """[B, N, H, D]: every query head of a group is a row of its KV head. Every query sees a slot at least."""
    batch, count, num_heads, size = q_BNHD.shape
    groups = k_BSGD.shape[2]
    each = num_heads // groups
    q = q_BNHD.view(batch, count, groups, each, size).transpose(1, 2).reshape(batch, groups, count * each, size)
    mask = sees_BNS[:, None, :, None].expand(-1, -1, -1, each, -1).flatten(2, 3) if count > 1 else sees_BNS[:, None]
    out = F.scaled_dot_product_attention(q, k_BSGD.transpose(1, 2), v_BSGD.transpose(1, 2), attn_mask=mask)
    return out.view(batch, groups, count, each, size).transpose(1, 2).reshape(batch, count, num_heads, size)


def _best(tokens: list[float], parents: list[float], logs: list[float], sums: list[float], ask: Ask) -> DraftTree:
    """The nodes of largest joint probability. A parent's is never less than its child's, and it stands before it."""
    tree, places = DraftTree(), {-1: -1}
    for i in sorted(range(len(tokens)), key=lambda i: -sums[i]):
        parent = places.get(int(parents[i]))
        if len(tree) == ask.max_nodes:
            break
        if parent is not None and (tree.depths[parent] + 1 if parent >= 0 else 0) < ask.max_depth:
            places[i] = tree.add(parent, int(tokens[i]), float(np.exp(logs[i])))
    return tree.keep(range(len(tree)))
