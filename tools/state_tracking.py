"""Train tiny models to track a state on texts of up to 64 tokens, and read longer ones.

    python -m tools.state_tracking OUT.json [--only mamba3] [--task parity] [--seeds 3]

Tasks: ``parity`` (is the number of ones so far even?) and ``swaps`` (three cups after the swaps so far: the word problem
of S3). A token follows every input, so chance is 1/2 and 1/6. Models are those of the lab, of two layers and equal
widths, with one mixer each: `attention`, `gated_delta`, `mamba3` and `m2rnn`. The last two run the engine's own rules.

Texts grow from 4 to 64 tokens, by 2 each time that a model has nearly no loss, so that all models have the same
lessons. ``right_64`` is the share of right answers at positions 33 to 64, which were trained; ``right_128`` at 65 to 128
and ``right_256`` at 129 to 256, which no model has seen. ``reached`` is the longest text of the training.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from kvasir.bench.result import arm, as_json, result, spread
from kvasir.lab.model import Model, Shape
from kvasir.layers import recurrence
from kvasir.layers.mixers import m2rnn, mamba3
from kvasir.layers.recurrent_spec import M2RNNSpec, Mamba3Spec
from kvasir.layers.spec import NormSpec
from kvasir.layers.weights import Placement

DIM, LAYERS, HEADS, STATE = 32, 1, 4, 8
MODELS = "attention", "gated_delta", "mamba3", "m2rnn"
CLASSES = {"parity": 2, "swaps": 6}
TRAINED, READ = 64, 256  # tokens
FIRST, MORE = 4, 2  # tokens of the first texts, and by how much they grow
KNOWN = 0.45  # loss below which they do, as a share of that of a guess
BATCH, STEPS, LR, WARM = 16, 1200, 5e-3, 50
TEXTS = 128  # that are read in the end
# The six permutations of three things: entry [a, b] is a after b. 0 is the one that changes nothing.
ORDERS = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
AFTER = torch.tensor([[ORDERS.index(tuple(a[i] for i in b)) for b in ORDERS] for a in ORDERS])


def texts_of(task: str, rows: int, length: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [B, T + 1], which begin with a mark, and the state after each of them [B, T]."""
    classes = CLASSES[task]
    x = torch.randint(0, classes, (rows, length), generator=generator)
    if task == "parity":
        states = x.cumsum(1) % 2
    else:
        now, found = torch.zeros(rows, dtype=torch.long), []
        for t in range(length):
            now = AFTER[x[:, t], now]
            found.append(now)
        states = torch.stack(found, 1)
    return F.pad(x, (1, 0), value=classes), states


class OfRule(nn.Module):
    """A rule of the engine between two products, in the place of a lab model's attention. Its result is gated."""

    def __init__(self, name: str) -> None:
        super().__init__()
        norm, place = NormSpec(1e-5), Placement(torch.device("cpu"), torch.float32)
        if name == "mamba3":
            spec: Any = Mamba3Spec(HEADS, STATE, STATE, norm, rate="softplus")
            self.rule, width = mamba3.Rule(spec, place), spec.inner
        else:
            spec = M2RNNSpec(HEADS, HEADS, STATE, STATE, norm)
            self.rule, width = m2rnn.Rule(spec, place), spec.values
        row = next(plane.shape[-1] for plane in spec.state() if plane.name == "ahead")
        self.rows, self.gate, self.out = nn.Linear(DIM, row, bias=False), nn.Linear(DIM, width), nn.Linear(width, DIM)
        self.start = {p.name: torch.zeros(p.shape) for p in spec.state() if p.name not in recurrence.OWN}
        learnt = {key: x for key, x in vars(self.rule).items() if isinstance(x, torch.Tensor)}
        for key, x in learnt.items():
            if "norm" in key:
                x.fill_(1)
            elif "inner" in key:
                x.copy_(torch.eye(x.shape[-1]).expand_as(x))
            elif "conv" in key:
                x.uniform_(-0.5, 0.5)
            else:
                x.zero_()
            setattr(self.rule, key, nn.Parameter(x))
        self.learnt = nn.ParameterList(getattr(self.rule, key) for key in learnt)
        if name == "mamba3":  # slow decays, and steps of one: turns of half a circle are near
            parts = {part: width for part, width in spec.parts.items() if part != "z"}
            at = {part: rows for part, rows in zip(parts, self.rows.weight.detach().split(list(parts.values())))}
            at["dt"].zero_(), at["A"].zero_()
            with torch.no_grad():
                self.rule.step_bias_H.fill_(math.log(math.e - 1))

    def forward(self, x: torch.Tensor, *given: Any) -> torch.Tensor:
        """Mix x [B, T, E]; what else a layer gives attention is not needed."""
        found = torch.func.vmap(lambda rows: self.rule.run(rows, self.start, 0, False)[0])(self.rows(x))
        return self.out(found.flatten(2) * F.silu(self.gate(x)))


def model_of(name: str, task: str, seed: int) -> Model:
    """A model of the lab with this mixer in each layer."""
    torch.manual_seed(seed)
    recurrent = tuple(range(LAYERS)) if name == "gated_delta" else ()
    shape = Shape(
        vocab=CLASSES[task] + 1, dim=DIM, layers=LAYERS, ffn=2 * DIM, heads=HEADS, kv_heads=HEADS, head_dim=STATE,
        positions=READ + 1, recurrent=recurrent, key_heads=HEADS, value_heads=HEADS, state_dim=STATE,
    )  # fmt: skip
    model = Model(shape, seed)
    nn.init.normal_(model.model.embed_tokens.weight, std=0.3)
    if name in ("mamba3", "m2rnn"):
        for layer in model.model.layers:
            layer.self_attn = OfRule(name)
    return model


def learn(name: str, task: str, seed: int, steps: int) -> dict[str, float]:
    """Train one model and read with it."""
    model, length, generator = model_of(name, task, seed), FIRST, torch.Generator().manual_seed(seed)
    optimizer, classes, begin = torch.optim.AdamW(model.parameters(), weight_decay=0.0), CLASSES[task], time.monotonic()
    for step in range(steps):
        rate = LR * min((step + 1) / WARM, 1.0, 2 * (1 - step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        x, states = texts_of(task, BATCH, length, generator)
        loss = F.cross_entropy(model(x)[:, 1:, :classes].flatten(0, 1), states.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if loss.item() < KNOWN * math.log(classes):
            length = min(TRAINED, length + MORE)
    with torch.no_grad():
        x, states = texts_of(task, TEXTS, READ, torch.Generator().manual_seed(10**6))
        right = (model(x)[:, 1:, :classes].argmax(-1) == states).float().mean(0)
    found = {f"right_{end}": round(right[end // 2 : end].mean().item(), 4) for end in (64, 128, 256)}
    return found | {"reached": length, "seconds": round(time.monotonic() - begin, 1), "loss": round(loss.item(), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", action="append", choices=MODELS)
    parser.add_argument("--task", action="append", choices=tuple(CLASSES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    arms = []
    for task in options.task or CLASSES:
        for name in options.only or MODELS:
            runs = [learn(name, task, seed, options.steps) for seed in range(options.seeds)]
            print(name, task, json.dumps(runs), flush=True)
            shared = {"task": task, "mixer": name, "steps": options.steps, "parameters": model_of(name, task, 0).num_parameters}
            arms.append(arm(f"{name} {task}", shared, {key: spread([run[key] for run in runs]) for key in runs[0]}))
            options.out.write_text(as_json(result("state-tracking", arms)))


if __name__ == "__main__":
    main()
