"""Make a small model with experts from `nano` on a CPU, in half an hour: `kvasir_lab.studies upcycle_experts FOLDER`.

Sparse upcycling (Komatsuzaki et al. 2022, arXiv:2212.05055) with narrow experts: nano's feed-forward block is cut into
four slices, and each slice becomes four experts. At first the router gives a token four slices of one copy, so that the
model computes what `nano` does. Then training on nano's own tasks, with the load-balancing loss, moves the copies
apart. The shape is that of `kvasir lab train experts`, which trains one from nothing on a GPU.

FOLDER gets the weights and ``training.json``. The run ends after --minutes of training.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import torch

from kvasir.bench.provenance import commit
from kvasir.bench.result import without_paths
from kvasir.models import checkpoint
from kvasir_lab import export
from kvasir_lab import tokenizer as lab_tokenizer
from kvasir_lab.model import Model, Shape
from kvasir_lab.study import Report, study
from kvasir_lab.training.data import Rows
from kvasir_lab.training.loop import run
from kvasir_lab.training.recipe import EXPERTS, SOLVE, Recipe
from kvasir_lab.training.trainer import Trainer

SPREAD = 0.1  # Standard deviation of a router's weights at the start.
PROSE = "story:form=prose,length=1024"
# Batches that fit into a minute of a CPU. A tenth of the tokens is prose, which measures perplexity.
RECIPE = EXPERTS.replace(
    rows=(Rows(4, 1024, SOLVE | {PROSE: 0.12}),),
    phases=(),
    own=None,
    validate=(Rows(8, 1024, {"countdown": 1.0}), Rows(4, 2048, {"story:form=prose,length=2048": 1.0}, whole=True)),
    pool=512,
    lr=1e-3,
    warmup=20,
)


def upcycled(small: Model, shape: Shape, seed: int = 0) -> Model:
    """A model with experts that computes what ``small`` does: slices of its blocks, each as several experts.

    ``shape`` has ``top_k`` slices, whose widths add up to the block of ``small``.
    """
    slices, copies = shape.top_k, shape.experts // shape.top_k
    assert shape.ffn * slices == small.shape.ffn and shape.experts == slices * copies, "the slices are the whole block"
    found, draw = Model(shape), torch.Generator().manual_seed(seed)
    weights = dict(small.state_dict())
    for layer in range(shape.layers):
        place = f"model.layers.{layer}.mlp."
        gate, up, down = (weights.pop(f"{place}{name}_proj.weight") for name in ("gate", "up", "down"))
        # The weights of the chosen experts are 1 / slices at first.
        parts = [gate.chunk(slices), up.chunk(slices), (down * slices).chunk(slices, 1)]
        for expert in range(shape.experts):
            for name, pieces in zip(("gate", "up", "down"), parts):
                weights[f"{place}experts.{expert}.{name}_proj.weight"] = pieces[expert % slices].clone()
        rows = torch.randn(copies, shape.dim, generator=draw) * SPREAD
        weights[f"{place}gate.weight"] = rows.repeat_interleave(slices, 0)
    found.load_state_dict(weights)
    return found


def train(recipe: Recipe, start: Model, out: Path, minutes: float) -> None:
    """Train ``start`` by ``recipe`` for so long, and write it to ``out``."""
    trainer = Trainer(recipe, lab_tokenizer.shipped_tokenizer(), "cpu", workers=0)
    trainer.model.load_state_dict(start.state_dict())
    run(trainer, out, minutes=minutes, stop_after=None, save_every=float("inf"))
    export.export(trainer.model, trainer.tokenizer, out)
    record = {
        "command": without_paths(" ".join(sys.argv)),
        "commit": commit(),
        "steps": trainer.done,
        "tokens": trainer.tokens,
        "train_seconds": round(trainer.seconds, 1),
        "history": trainer.history,
    }
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n")


@study()
def main(report: Report, output: Annotated[Path, "folder to write"], *, minutes: float = 25.0) -> None:
    output.mkdir(parents=True, exist_ok=True)
    start = upcycled(export.load(checkpoint.resolve("nano")), RECIPE.shape)
    train(RECIPE, start, output, minutes)
