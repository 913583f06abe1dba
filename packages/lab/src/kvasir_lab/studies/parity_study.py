"""Train one layer to say the parity of up to 64 bits, and let it read longer texts.

    python -m kvasir_lab.studies parity_study OUT.json [--only m2rnn]
        [--seeds 3]        a quarter of an hour of one core

A text is a mark and then bits. After each bit the layer says whether the ones so far are even; chance is a half. A
table holds the rows of the three tokens, and one product reads the layer's results. `mamba3` and `m2rnn` run the
engine's own rules, `gated_delta` the lab's scan (no convolution), and `attention` has RoPE. All have two heads.

All have the same lessons: texts grow from 4 to 64 bits, by 2 whenever the loss of a step is small. ``right_64`` is the
share of right answers at bits 33 to 64, which were trained; ``right_128`` at bits 65 to 128 and ``right_256`` at 129 to
256, which no layer has seen. ``reached``: bits of the longest texts in training.
"""

from __future__ import annotations

import time
from typing import Annotated

import torch
from torch.nn import functional as F

from kvasir.bench.result import spread
from kvasir.layers import recurrence
from kvasir.layers.mixers import m2rnn, mamba3
from kvasir.layers.recurrent_spec import M2RNNSpec, Mamba3Spec
from kvasir.layers.spec import NormSpec
from kvasir.layers.weights import Placement
from kvasir_lab.delta import scan
from kvasir_lab.model import rotate
from kvasir_lab.study import Arms, Report, study

MARK = 2  # the token before the bits
FIRST, MORE, TRAINED = 4, 2, 64  # bits of the first texts, bits by which they grow, and the most
READ, TEXTS = 256, 64  # bits of the texts that are read in the end, and how many there are
KNOWN, BATCH, RATE = 0.15, 16, 1e-2  # squared error below which texts grow, texts of a step, highest learning rate
HEADS, DIM, THETA = 2, 8, 1e4  # gated_delta and attention: heads, their width, and RoPE's base
STEPS = {"mamba3": 900, "m2rnn": 1200, "gated_delta": 1200, "attention": 1200}


class OfRule:
    """A layer that runs a rule of the engine.

    Mamba-3 starts with the slowest decays and with steps near one. A run of seconds from an ordinary start gets 64 bits
    right, but its angles are not precise enough for 256.
    """

    def __init__(self, name: str) -> None:
        norm, place = NormSpec(1e-5), Placement(torch.device("cpu"), torch.float32)
        if name == "mamba3":
            spec = Mamba3Spec(HEADS, 4, DIM, norm, rate="softplus")
            self.rule, size = mamba3.Rule(spec, place), spec.inner
        else:
            spec = M2RNNSpec(HEADS, 1, DIM, DIM, norm)
            self.rule, size = m2rnn.Rule(spec, place), spec.values
        learnt = {key: value for key, value in vars(self.rule).items() if isinstance(value, torch.Tensor)}
        for key, value in learnt.items():
            value.zero_() if any(part in key for part in ("bias", "skip", "log")) else value.normal_(std=0.3)
            if "norm" in key:
                value.fill_(1)
            if "inner" in key:
                value.copy_(torch.eye(DIM))
        self.rows = torch.randn(3, spec.state()[-2].shape[-1]) * 0.5
        self.out = torch.randn(size, 1) * 0.1
        if name == "mamba3":
            widths = {part: width for part, width in spec.parts.items() if part != "z"}
            columns = dict(zip(widths, self.rows.split(list(widths.values()), -1)))
            columns["dt"].zero_(), columns["A"].fill_(-10), learnt["step_bias_H"].fill_(0.54)
        self.start = {p.name: torch.zeros(p.shape) for p in spec.state() if p.name not in recurrence.OWN}
        self.learnt = [*learnt.values()]

    def mix(self, rows_BTX: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(lambda one: self.rule.run(one, self.start, 0, False)[0])(rows_BTX)


class OfScan:
    """Gated DeltaNet's rule: queries and keys are normed, write strengths lie between 0 and 1."""

    def __init__(self) -> None:
        self.rows = torch.randn(3, 3 * HEADS * DIM + 2 * HEADS) * 0.5
        self.out, self.learnt = torch.randn(HEADS * DIM, 1) * 0.1, []

    def mix(self, rows_BTX: torch.Tensor) -> torch.Tensor:
        sides, beta, decay = rows_BTX.split((3 * HEADS * DIM, HEADS, HEADS), -1)
        q, k, v = sides.unflatten(-1, (3, HEADS, DIM)).unbind(2)
        q, k = (F.normalize(x, dim=-1) for x in (q, k))
        state = rows_BTX.new_zeros(len(rows_BTX), HEADS, DIM, DIM)
        return scan(q, k, v, -F.softplus(decay), beta.sigmoid(), torch.zeros(rows_BTX.shape[:2]), state)[0]


class OfAttention:
    """Causal attention with RoPE."""

    def __init__(self) -> None:
        self.rows = torch.randn(3, 3 * HEADS * DIM) * 0.5
        self.out, self.learnt = torch.randn(HEADS * DIM, 1) * 0.1, []
        angles = torch.arange(READ + 1)[:, None] * THETA ** (-torch.arange(0, DIM, 2) / DIM).repeat(2)
        self.turns = angles.cos(), angles.sin()

    def mix(self, rows_BTX: torch.Tensor) -> torch.Tensor:
        q, k, v = rows_BTX.unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        q, k = (rotate(x, *(turn[: x.shape[2]] for turn in self.turns)) for x in (q, k))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Learner:
    """A layer by its name, with what it learns."""

    def __init__(self, name: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        made = {"gated_delta": OfScan, "attention": OfAttention}.get(name)
        self.layer = OfRule(name) if made is None else made()
        self.parameters = [p.requires_grad_() for p in (self.layer.rows, self.layer.out, *self.layer.learnt)]

    def signs(self, bits: torch.Tensor) -> torch.Tensor:
        """Above 0 where the bits [B, T] so far are even: [B, T]."""
        found = self.layer.mix(self.layer.rows[F.pad(bits, (1, 0), value=MARK)])
        return (found[:, 1:].flatten(2) @ self.layer.out).squeeze(-1)

    def learn(self, steps: int) -> int:
        """Train; returns ``reached``."""
        optimizer, length = torch.optim.Adam(self.parameters), FIRST
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = RATE * min(1, 2 * (1 - step / steps))
            bits = torch.randint(0, 2, (BATCH, length))
            loss = F.mse_loss(self.signs(bits), 1.0 - 2 * (bits.cumsum(1) % 2))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
            optimizer.step()
            if loss.item() < KNOWN:
                length = min(TRAINED, length + MORE)
        return length

    @torch.no_grad()
    def right(self, texts: int = TEXTS) -> torch.Tensor:
        """Share of right answers after each of ``READ`` bits."""
        bits = torch.randint(0, 2, (texts, READ))
        return ((self.signs(bits) < 0).long() == bits.cumsum(1) % 2).float().mean(0)


def measured(name: str, seed: int, steps: int) -> dict[str, float]:
    """Metrics of one run."""
    begin, learner = time.monotonic(), Learner(name, seed)
    reached, right = learner.learn(steps), learner.right()
    found = {f"right_{end}": round(right[end // 2 : end].mean().item(), 4) for end in (64, 128, 256)}
    return found | {"reached": reached, "seconds": round(time.monotonic() - begin, 1)}


@study("parity")
def main(
    report: Report,
    *,
    only: Annotated[tuple[str, ...], STEPS] = (),
    seeds: int = 3,
    steps: Annotated[int, f"of every layer; default: {STEPS}"] = 0,
) -> Arms:
    torch.set_num_threads(1)
    for name in only or STEPS:
        count = steps or STEPS[name]
        runs = [measured(name, seed, count) for seed in range(seeds)]
        config = {"steps": count, "parameters": sum(p.numel() for p in Learner(name).parameters)}
        yield name, config, {key: spread([run[key] for run in runs]) for key in runs[0]}
