"""The trainer's loop without its process: traces in, candidates out, in slices that a shared GPU can bear.

AdamW with fp32 masters, clipped at 0.5, at one of two rates: 1e-4, and 1e-5 once three candidates in a row gained
nothing over weights that have learned something. The first rate is back when the served weights lose 5 % of their
tokens a forward, which says that the traffic has changed. These are the rates of models of width 4,096; narrower heads
learn at rates that grow as their width falls (Yang et al., arXiv 2203.03466), up to 20 times.

Every ``every`` steps the weights are a *candidate*. It must give 1 % more tokens a forward than the served weights on
the newest traces that were held back; the engine then judges it by time. Both what is learned and what is judged are
recent: weights that follow a change get worse at what came before it.

Legend: R rows, T tokens, J guesses, D levels, E model dim.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from kvasir.errors import ConfigError
from kvasir.learn.base import Base
from kvasir.learn.branch_loss import branch_loss
from kvasir.learn.packed import pack, place
from kvasir.learn.pieces import Pieces, cut
from kvasir.learn.trace import REJECTED, Trace
from kvasir.learn.walk import walk
from kvasir.logs import log
from kvasir.speculation import heads
from kvasir.speculation.head import Head

CLIP, GAIN = 0.5, 1.01
ENOUGH = 0.875  # share of a step's rows from which on no slice is launched for what is left
IDLE_GATES = 3  # candidates in a row without a gain, after which the rate falls
CHANGED = 0.95  # share of their best tokens a forward below which the served weights meet other traffic
WIDTH, MOST_SCALED = 4096, 20  # width that the rates are for, and the most that they are multiplied by
MOST_FAILED = 10  # steps in a row without a finite loss, after which learning ends
RECENT = 0.98  # weight of the past in the shown means


@dataclass(frozen=True)
class Recipe:
    """Settings of learning. ``every``: steps between candidates; ``lam``: weight of rejected branches; ``rate`` and
    ``settled_rate``: learning rates of a model of width WIDTH, while candidates gain and when they no longer do;
    ``rows``: of a step, at most; ``pool``: steps whose rows are kept to draw from; ``held_rows``: most rows held back;
    ``forwards``: fewest on which a candidate is judged, and four times as many are the most; ``num_bytes``: of traces
    to learn from."""

    every: int = 200
    lam: float = 0.25
    rate: float = 1e-4
    settled_rate: float = 1e-5
    rows: int = 1024
    pool: int = 16
    held_rows: int = 16384
    forwards: int = 256
    num_bytes: int = 256 << 20
    seed: int = 0


def head_to_learn(kind: str, base: Base, folder: str) -> Head:
    """The head of ``folder`` in fp32, or one with its first weights ("", new). Raises ConfigError."""
    cls = heads.class_of(kind)
    if cls.unroll_paths is Head.unroll_paths:
        able = [name for name in heads.kinds() if heads.class_of(name).unroll_paths is not Head.unroll_paths]
        raise ConfigError(f"'{kind}' cannot learn while it serves; {' and '.join(able)} can")
    if folder not in ("", "new"):
        return heads.read(kind, heads.folder_of(kind, folder))[0].to(base.device)
    head = cls(cls.shape_for(base.dim, base.num_layers))
    head.begin_with(base.norm_E.float().cpu(), base.embed_VE.float().cpu(), torch.Generator().manual_seed(0))
    return head.to(base.device)


class Learner:
    """A head that learns. ``scratch``: whether its weights are random, so that its rate must not fall before some have
    gained. ``layers``: the tapped layers of traces; the head reads those of its shape.

    `slices` does a bounded piece of work each time it is asked, of about ``slice_rows`` rows where it learns.
    ``candidate`` is set to (weights by name, tokens a forward before and after) when one has passed the gate; nothing
    new is proposed until `accepted` or `rolled_back` was called.
    """

    def __init__(self, head: Head, base: Base, recipe: Recipe, *, scratch: bool, layers: tuple[int, ...] = ()) -> None:
        self.head, self.base, self.recipe, self.scratch = head.train().requires_grad_(True), base, recipe, scratch
        self.settled = False  # whether the rate has fallen
        self.pieces = Pieces(recipe.num_bytes, recipe.held_rows, recipe.seed, recipe.pool * recipe.rows)
        self.slice_rows = recipe.rows
        self.steps, self.traced = 0, 0
        self.by_level = [0.0] * head.shape.depth
        self.candidate: tuple[dict[str, torch.Tensor], float, float] | None = None
        self._next_gate = recipe.every  # number of steps
        self._least = 0.0  # tokens a forward of the candidate that was rolled back
        self._best = 0.0  # most tokens a forward that a gate has seen of the served weights
        self._failed = self._idle_gates = 0
        self._depth = head.shape.depth
        self._layers = layers or head.shape.layers
        if self._layers[-1] != base.num_layers - 1 or not set(head.shape.layers) <= set(self._layers):
            raise ConfigError(
                f"traces hold layers {self._layers}: they must hold those that the head reads, {head.shape.layers}, "
                "and last the model's last one, which says what the model wanted"
            )
        self._served = self._copied()
        self._restart()

    def _restart(self) -> None:
        fused = self.base.device.type == "cuda"  # one pass over the weights, in place of a dozen
        self._optimizer = torch.optim.AdamW(self.head.parameters(), betas=(0.9, 0.95), weight_decay=0.01, fused=fused)

    def _copied(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.head.named_parameters()}

    @property
    def rate(self) -> float:
        """The present learning rate."""
        scale = min(MOST_SCALED, max(1.0, WIDTH / self.base.dim))
        return scale * (self.recipe.settled_rate if self.settled else self.recipe.rate)

    # ------------------------------------------------------------------------------------------------------------- news

    def add(self, trace: Trace) -> None:
        """Take a trace; one with numbers that are not finite, or of other layers, is left out."""
        if trace.dtype != "bfloat16" and not np.isfinite(trace.states).all():
            return
        if trace.dtype == "bfloat16" and ((trace.states & 0x7F80) == 0x7F80).any():
            return
        if trace.layers != self._layers:
            return
        for piece in cut(trace, max(32, self.slice_rows)):
            if self.pieces.add(piece):
                self.traced += int((piece.kinds != REJECTED).sum())

    def accepted(self) -> None:
        """Note that the candidate is served from now on."""
        assert self.candidate is not None
        self._served = {name: tensor.float() for name, tensor in self.candidate[0].items()}
        self._best = self.candidate[2]
        self.candidate, self._least, self._idle_gates, self.scratch = None, 0.0, 0, False

    def rolled_back(self) -> None:
        """Note that the candidate is not served. Its progress stays; the next one must gain 1 % over it, too."""
        if self.candidate is not None:
            self._least = self.candidate[2]
        self.candidate = None

    def forget(self, base: Base) -> None:
        """Take another base model; traces of the old one are dropped, and so are gradients of a step that had begun.
        Work goes on with new `slices`."""
        self.base = base
        self.pieces.clear()
        self._optimizer.zero_grad(set_to_none=True)
        self._best, self._least, self._idle_gates, self.settled = 0.0, 0.0, 0, False

    # ----------------------------------------------------------------------------------------------------------- slices

    def slices(self) -> Iterator[int | None]:
        """Yield after each slice of work the rows that it learned from, 0 where it did something else; None when there
        is nothing to do.

        Raises ConfigError when the loss stays without a finite value."""
        while True:
            if not len(self.pieces):
                yield None
                continue
            yield from self._step()
            if self.steps >= self._next_gate and self.candidate is None:
                self._next_gate = self.steps + self.recipe.every
                yield from self._gate()

    def _step(self) -> Iterator[int]:
        """One optimizer step, in as many slices as its rows need, and slices of nothing while the device finishes.

        What the device has found is read once, when it has arrived: no slice waits for it."""
        rows, parts, counts = 0, 0, np.zeros(self._depth)
        # Sums of nats by level, and of losses.
        nats, lost = torch.zeros(self._depth, device=self.base.device), torch.zeros(1, device=self.base.device)
        enough = ENOUGH * self.recipe.rows
        while rows < enough and (drawn := self.pieces.draw(min(self.slice_rows, self.recipe.rows - rows))):
            count = sum(trace.num_rows for trace in drawn)
            rows += count
            try:
                found = branch_loss(
                    self.head, self.base, pack(drawn, self._depth, self.recipe.lam > 0), self.recipe.lam
                )
            except ValueError:  # nothing in these traces can be judged
                yield 0
                continue
            found.pull.backward()
            parts += 1
            lost += found.loss
            nats[: len(found.counts)] += found.nats
            counts[: len(found.counts)] += found.counts
            yield count
        if not parts:
            return
        parameters = list(self.head.parameters())
        for p in parameters:
            if p.grad is not None:
                p.grad /= parts
        norm = torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        arriving = Arriving(torch.cat([nats, lost, norm[None]]))
        while not arriving.here():
            yield 0
        *by_level, lost_sum, size = arriving.numbers.tolist()
        if math.isfinite(lost_sum) and math.isfinite(size):
            for group in self._optimizer.param_groups:
                group["lr"] = self.rate
            self._optimizer.step()
            self.steps += 1
            self._failed = 0
            for level in np.flatnonzero(counts):
                new, old = by_level[level] / counts[level], self.by_level[level]
                self.by_level[level] = float(new if not old else RECENT * old + (1 - RECENT) * new)
        else:
            self._give_up()
        self._optimizer.zero_grad(set_to_none=True)
        yield 0

    def _give_up(self) -> None:
        """Go back to the served weights after a loss that is no number."""
        self._failed += 1
        if self._failed >= MOST_FAILED:
            raise ConfigError(f"the drafter's loss was no number {MOST_FAILED} times in a row")
        self.head.load_state_dict(self._served)
        self._restart()

    def _gate(self) -> Iterator[int]:
        """Judge the present weights on the newest held-back traces, one slice a trace."""
        if not bool(torch.stack([p.isfinite().all() for p in self.head.parameters()]).all()):
            self._give_up()
            return
        weights = {name: p.to(self.base.dtype) for name, p in self._copied().items()}
        newest = list(reversed(self.pieces.held_back))
        most, traces, scores = 4 * self.recipe.forwards, 0, []
        for version in (self._served, weights):
            head = copy.deepcopy(self.head).to(self.base.dtype).eval()
            head.load_state_dict(version)
            tokens = forwards = 0
            for number, trace in enumerate(newest[:traces] if scores else newest):
                mine = tokens_and_forwards(head, self.base, trace)
                tokens, forwards = tokens + mine[0], forwards + mine[1]
                yield 0
                if not scores:
                    traces = number + 1
                    if forwards >= most:
                        break
            if not scores and forwards < self.recipe.forwards:
                return
            scores.append(tokens / max(1, forwards))
        self._judge(weights, *scores)

    def _judge(self, weights: dict[str, torch.Tensor], before: float, after: float) -> None:
        """Propose weights if they gain, and choose the rate. ``before``, ``after``: tokens a forward on the same traces
        of the served weights and of these."""
        if before < CHANGED * self._best:
            log.info("step %d: %.3f tokens a forward, %.3f earlier: other traffic", self.steps, before, self._best)
            self.settled, self._idle_gates, self._best = False, 0, before
            self._least = 0.0  # it was measured on what came before
        self._best = max(self._best, before)
        if after >= GAIN * max(before, self._least):
            self.candidate, self._idle_gates = (weights, before, after), 0
            return
        log.info("step %d: %.3f tokens a forward, %.3f before: no candidate", self.steps, after, before)
        self._idle_gates += 1
        self.settled = self.settled or (not self.scratch and self._idle_gates >= IDLE_GATES)


class Arriving:
    """A copy of ``found``, a tensor of the device, on its way to the host. ``numbers`` holds it once it is `here`."""

    def __init__(self, found: torch.Tensor) -> None:
        self.numbers, self._copied = found, None
        if found.device.type == "cuda":
            self.numbers = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            self.numbers.copy_(found, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def here(self) -> bool:
        """Whether ``numbers`` may be read. Does not wait."""
        return self._copied is None or self._copied.query()


@torch.no_grad()
def tokens_and_forwards(head: Head, base: Base, trace: Trace) -> tuple[int, int]:
    """Tokens of a trace's reply, and the forwards that they take with greedy chains of this head."""
    packed = pack([trace], head.shape.depth, rejected=False)
    placed = place(packed, base.device)
    size = len(trace.tokens)
    with base.autocast():
        guesses = list(placed.unroll(head, base, base.normed(placed.states[:, -1])))
        found = torch.cat([base.logits(part).argmax(-1) for guess_ME in guesses for part in guess_ME.split(256)])
    right_JT, likeliest, at = np.zeros((head.shape.depth, size), bool), found.cpu().numpy(), 0
    for j, level in enumerate(packed.levels):
        guessed = likeliest[at : (at := at + len(level.root))]
        position = packed.positions[level.root] - trace.start
        known = (position + 2 + j < size) & ((level.judge >= 0) | (j == 0))
        right_JT[j, position[known]] = guessed[known] == trace.tokens[position[known] + 2 + j]
    begin = max(1, trace.prompt - trace.start, int(packed.positions[0]) - trace.start + 1)
    forwards, _ = walk(right_JT, begin, size)
    return max(0, size - 1 - begin), forwards
