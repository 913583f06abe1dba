"""Count what token rounding does to the rows of a model with experts: on a CPU, without a time.

    python -m kvasir_lab.studies rounding_counts RESULT.json --model FOLDER [--rows 512 1024 2048 4096] [--steps 8]

The router's logits of every layer that is rounded (all but the last) are those of the lab's model on held-out prose and
on prompts of two tasks. They are cut into steps of --rows rows, and each step is rounded by the reference that the
kernels are tested against. An arm has, over all steps and layers:

- ``padded``: the share of the rows of tiles that hold no pair, without rounding; with it there are none;
- ``tiles``: tiles after rounding over tiles before;
- ``changed``, ``fewer`` and ``none``: shares of the rows whose experts change, that have fewer, and that have none;
- ``weight_lost``: the mean share of its weights that a row loses.

Arms of ``random`` are routers of other shapes with drawn logits, since padding depends on the shape above all.
``control`` is the perplexity of prose with the experts of each layer in another order, so that every row gets others.
Were it not much worse, the experts would be alike, and rounding would cost nothing whatever it does.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Annotated

import torch
from torch.nn import functional as F

from kvasir.kernels.moe_rounding import DIRECTIONS, TILE, Rounding, round_reference
from kvasir.kernels.moe_routing import route_reference
from kvasir.models import checkpoint
from kvasir_lab import export
from kvasir_lab.evaluation.evaluator import Plan, prepare, read_tokenizer
from kvasir_lab.model import Model
from kvasir_lab.study import Arms, Report, study

PROSE, TASKS = "story:form=prose,length=512", ("chain", "countdown")
SHAPES = {"128 experts of which 8 are used": (128, 8), "256 experts of which 8 are used": (256, 8)}
SPREAD = 1.0  # Standard deviation of drawn logits.


def layers_of(model: Model) -> list[torch.nn.Module]:
    """The blocks of experts that rounding acts on."""
    return [layer.mlp for layer in model.model.layers][:-1]


@torch.no_grad()
def logits_of(model: Model, prompts: list[list[int]]) -> list[torch.Tensor]:
    """The router's logits [T, X] of each rounded layer, for the rows of all prompts in order."""
    found: list[list[torch.Tensor]] = [[] for _ in layers_of(model)]
    hooks = [
        block.gate.register_forward_hook(lambda _, __, out, rows=rows: rows.append(out.float()))
        for block, rows in zip(layers_of(model), found)
    ]
    for prompt in prompts:
        model(torch.tensor([prompt]))
    for hook in hooks:
        hook.remove()
    return [torch.cat(rows) for rows in found]


def tiles(counts_X: torch.Tensor) -> int:
    return int((-(-counts_X // TILE)).sum())


def counted(steps: list[torch.Tensor], top_k: int, rounding: Rounding) -> dict[str, float]:
    """The shares over all ``steps``, each the logits [T, X] of one layer."""
    sums: Counter[str] = Counter()
    for logits_TX in steps:
        weights_TK, ids_TK = route_reference(logits_TX, top_k, True)
        kept_TX, _ = round_reference(logits_TX, weights_TK, ids_TK, True, rounding)
        own_TX = torch.zeros_like(kept_TX).scatter_(1, ids_TK, True)
        weights_TX = torch.zeros_like(logits_TX).scatter_(1, ids_TK, weights_TK)
        before = tiles(own_TX.sum(0))
        sums["rows"] += len(logits_TX)
        sums["pairs"] += int(own_TX.sum())
        sums["before"] += before
        sums["after"] += tiles(kept_TX.sum(0))
        sums["changed"] += int((kept_TX != own_TX).any(1).sum())
        sums["fewer"] += int((kept_TX.sum(1) < top_k).sum())
        sums["none"] += int((kept_TX.sum(1) == 0).sum())
        sums["lost"] += float((weights_TX * ~kept_TX).sum())
    found = {
        "padded": 1 - sums["pairs"] / (sums["before"] * TILE),
        "tiles": sums["after"] / sums["before"],
        **{name: sums[name] / sums["rows"] for name in ("changed", "fewer", "none")},
        "weight_lost": sums["lost"] / sums["rows"],
    }
    return {name: round(value, 5) for name, value in found.items()}


@torch.no_grad()
def perplexity(model: Model, documents: list[list[int]]) -> float:
    losses = [
        F.cross_entropy(model(torch.tensor([ids]))[0, :-1].float(), torch.tensor(ids[1:]), reduction="none")
        for ids in documents
    ]
    return round(math.exp(float(torch.cat(losses).mean())), 3)


def shuffled(model: Model) -> None:
    """Put the router's outputs into another order, so that rows get other experts than those they chose."""
    for layer in model.model.layers:
        gate = layer.mlp.gate.weight
        gate.data = gate.data[torch.randperm(len(gate), generator=torch.Generator().manual_seed(0))]


@study("rounding-counts")
def main(
    report: Report,
    *,
    model: Annotated[str, "folder of a model with experts"] = "lab-experts",
    rows: tuple[int, ...] = (512, 1024, 2048, 4096),
    steps: Annotated[int, "most steps of each size"] = 8,
) -> Arms:
    folder = checkpoint.resolve(model)
    if (record := folder / "training.json").is_file():
        told = json.loads(record.read_text())
        report.more["trained"] = {name: told[name] for name in ("command", "steps", "tokens", "train_seconds")}
    net, tokenizer = export.load(folder), read_tokenizer(folder)
    shape, most = net.shape, max(rows) * steps
    prompts = {}
    for name, specs, count in (("prose", (PROSE,), 40), ("tasks", TASKS, most // 40)):
        exams = prepare(Plan(specs, count=count), tokenizer)
        prompts[name] = [ids for pair in zip(*(exam.prompts for exam in exams)) for ids in pair]
    for name, texts in prompts.items():
        layers = logits_of(net, texts)
        for size in rows:
            whole = min(steps, len(layers[0]) // size)
            parts = [part for logits in layers for part in logits.split(size)[:whole]]
            for direction in DIRECTIONS:
                found = counted(parts, shape.top_k, Rounding(direction))
                yield f"{name}-{size}-{direction}", {"steps": len(parts)}, found
    draw = torch.Generator().manual_seed(0)
    for name, (experts, top_k) in SHAPES.items():
        for size in rows:
            if size < Rounding("nearest").least_rows(experts, top_k):
                continue
            parts = [torch.randn(size, experts, generator=draw) * SPREAD for _ in range(steps)]
            for direction in DIRECTIONS:
                found = counted(parts, top_k, Rounding(direction))
                yield f"random {experts}-{size}-{direction}", {"router": name}, found
    known = perplexity(net, prompts["prose"])
    shuffled(net)
    yield "control", {}, {"perplexity": known, "shuffled_perplexity": perplexity(net, prompts["prose"])}
